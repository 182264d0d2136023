#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice, from a machine with gcloud.
#   TPU=my-slice ZONE=us-west4-a RUNS=/mnt/runs scripts/tpu_vm.sh diffcse_base [--config.KEY=VALUE ...]
# RUNS is a folder that all hosts see and that supports file locks, such as a mounted Filestore (NFS). A mounted bucket
# (gcsfuse) has no locks across hosts. The images of TPU VMs have an older Python, so uv installs Python 3.12.
set -euo pipefail

: "${TPU:?name of the slice}" "${ZONE:?its zone}" "${RUNS:?folder for runs that all hosts see}"
config=$1
shift
arguments=
if (($#)); then
    arguments=$(printf ' %q' "$@")  # without arguments printf would make an empty one
fi

on_all_hosts() {
    gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm scp --recurse --zone="$ZONE" --worker=all . "$TPU":diffcse_jax
on_all_hosts "cd diffcse_jax && python3 -m pip install --user --quiet uv \
    && python3 -m uv venv --quiet --allow-existing --python 3.12 .venv \
    && python3 -m uv pip install --quiet --python .venv -c constraints.txt -r requirements.txt -e . 'jax[tpu]'"
on_all_hosts "cd diffcse_jax && PATH=\$PWD/.venv/bin:\$PATH python train.py --config $config \
    --workdir $RUNS/$(basename "$config" .py) --config.distributed=True$arguments"
