#!/usr/bin/env bash
# All hosts of a Cloud TPU slice, from a machine with gcloud; the package is installed on each first.
#   TPU=my-slice ZONE=us-west4-a BUCKET=gs://bucket scripts/tpu_vm.sh configs/diffcse_base.py [--config.KEY=VALUE ...]
# The workdir must be one folder for all hosts: here the bucket, mounted by gcsfuse.
set -euo pipefail

: "${TPU:?name of the slice}" "${ZONE:?its zone}" "${BUCKET:?bucket for workdirs, gs://...}"
config=$1
shift
arguments=
if (($#)); then
    arguments=$(printf ' %q' "$@")  # of nothing it would make one empty argument
fi

on_all_hosts() {
    gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm scp --recurse --zone="$ZONE" --worker=all . "$TPU":diffcse_jax
on_all_hosts "cd diffcse_jax && pip install -r requirements.txt -e . 'jax[tpu]'"
on_all_hosts "mkdir -p ~/runs && (mountpoint -q ~/runs || gcsfuse --implicit-dirs ${BUCKET#gs://} ~/runs)"
on_all_hosts "cd diffcse_jax && python train.py --config $config --workdir ~/runs/$(basename "$config" .py) \
    --config.distributed=True$arguments"
