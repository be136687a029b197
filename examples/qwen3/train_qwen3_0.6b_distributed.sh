#!/usr/bin/env bash
# Qwen3-0.6B from random weights with Muon on matrix owners: one node of 8 GPUs.
#
#   bash train_qwen3_0.6b_distributed.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# examples/launch.sh says what these are, which variables there are, and which flags all scripts share.
set -euo pipefail

# The preset fills in the architecture (query and key norms among it).
MODEL_ARGS=(--model qwen3-0.6b --seq-length 4096)

TRAINING_ARGS=(
  --micro-batch-size 4
  --global-batch-size 256
  --train-iters 50000
  --lr 6e-4
  --min-lr 6e-5
)

PARALLEL_ARGS=(
  --sharding fsdp
  --zero-stage 2
)

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
train
