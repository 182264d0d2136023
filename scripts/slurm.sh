#!/usr/bin/env bash
# Trains on several hosts under Slurm, with one task per host. JAX finds the other tasks through Slurm.
#   sbatch scripts/slurm.sh configs/diffcse_base.py [--config.KEY=VALUE ...]
# The repository, the workdir and the data must be on a file system that all hosts see.
#SBATCH --job-name=diffcse
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

config=$1
shift

# Five minutes before the limit Slurm sends this script SIGUSR1. Training then saves and ends, and the job is queued
# again to resume from there. (`--requeue` alone does so only for a lost node or a preemption.)
time_is_up=
trap 'time_is_up=1; kill -TERM "$!"' USR1
srun --kill-on-bad-exit=1 python train.py --config "$config" --config.distributed=True "$@" &
training=$!
status=0
wait "$training" || status=$?
if [[ $time_is_up ]]; then
    wait "$training" || true  # the signal ended the first wait, not the training
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
