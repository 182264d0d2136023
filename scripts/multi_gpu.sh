#!/usr/bin/env bash
# One host with several GPUs: one process drives them all, so there is nothing to launch.
#   scripts/multi_gpu.sh configs/diffcse_base.py [--config.KEY=VALUE ...]
set -euo pipefail

config=$1
shift
exec python train.py --config "$config" "$@"
