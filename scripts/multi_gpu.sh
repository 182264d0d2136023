#!/usr/bin/env bash
# Trains on one host with several GPUs: one process uses them all, so there is nothing to launch.
#   scripts/multi_gpu.sh configs/diffcse_base.py [--config.KEY=VALUE ...]
set -euo pipefail

config=$1
shift
exec python train.py --config "$config" "$@"
