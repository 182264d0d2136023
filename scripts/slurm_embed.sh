#!/usr/bin/env bash
# Embeds a corpus on several hosts under Slurm. Tasks share the input files and do not wait for one another. Submitted
# again, the job embeds what is missing.
#   sbatch scripts/slurm_embed.sh --model runs/diffcse_base --input 'shards/*.txt.gz' --output embeddings
#SBATCH --job-name=embed
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
set -euo pipefail

# Quoted so that patterns reach the command, not the shell. Without --kill-on-bad-exit a lost host stops no other.
exec srun bash -c 'JAX_PROCESS_ID=$SLURM_PROCID JAX_NUM_PROCESSES=$SLURM_NTASKS exec diffcse embed "$@"' \
    embed "$@"
