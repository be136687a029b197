#!/usr/bin/env bash
# Qwen2.5-7B from random weights with Muon on matrix owners: HSDP, 4 nodes of 8 GPUs under Slurm.
#
#   bash slurm_qwen2.5_7b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# examples/launch.sh says what these are, which variables there are, and which flags all scripts share.
set -euo pipefail

MODEL_ARGS=(--model qwen2.5-7b --seq-length 4096)

TRAINING_ARGS=(
  --micro-batch-size 1
  --global-batch-size 512
  --train-iters 100000
  --lr 3e-4
  --min-lr 3e-5
)

# A replica is a node: weights are gathered inside it, and every matrix has one owner in all 4.
PARALLEL_ARGS=(
  --sharding hsdp
  --zero-stage 3
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
submit qwen2.5-7b 4
