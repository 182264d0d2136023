#!/usr/bin/env bash
# Several hosts under Slurm, one task a host; JAX finds its peers by Slurm's variables.
#   sbatch scripts/slurm.sh configs/diffcse_base.py [--config.KEY=VALUE ...]
# The repository, the workdir and the data must be on a file system that all hosts see.
#SBATCH --job-name=diffcse
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

config=$1
shift
# Two minutes before the limit Slurm sends SIGTERM: training saves and ends, and the requeued job goes on from there.
exec srun --kill-on-bad-exit=1 python train.py --config "$config" --config.distributed=True "$@"
