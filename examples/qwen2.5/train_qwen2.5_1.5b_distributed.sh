#!/usr/bin/env bash
# Qwen2.5-1.5B from random weights with Muon on matrix owners: one node of 8 GPUs.
#
#   bash train_qwen2.5_1.5b_distributed.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# examples/launch.sh says what these are, which variables there are, and which flags all scripts share.
set -euo pipefail

# The preset fills in the architecture; a flag given beside it wins.
MODEL_ARGS=(--model qwen2.5-1.5b --seq-length 4096)

TRAINING_ARGS=(
  --micro-batch-size 2
  --global-batch-size 256
  --train-iters 50000
  --lr 4e-4
  --min-lr 4e-5
)

# A replica is a node. One node is the same as --sharding fsdp; more of them hold a replica each,
# and every matrix still has one owner.
PARALLEL_ARGS=(
  --sharding hsdp
  --zero-stage 3
  --recompute-granularity selective
)

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
train
