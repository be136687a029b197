#!/usr/bin/env bash
# Qwen1.5-MoE-A2.7B from random weights with Muon on matrix owners: 8 GPUs a node.
#
#   bash train_qwen1.5_moe_a2.7b_distributed.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# examples/launch.sh says what these are, which variables there are, and which flags all scripts share.
set -euo pipefail

# The preset says how many experts, how they are chosen and how they are balanced.
MODEL_ARGS=(--model qwen1.5-moe-a2.7b --seq-length 4096)

TRAINING_ARGS=(
  --micro-batch-size 1
  --global-batch-size 256
  --train-iters 100000
  --lr 3e-4
  --min-lr 3e-5
)

# A replica is a node. One node is the same as --sharding fsdp; more of them hold a replica each,
# and every matrix still has one owner.
PARALLEL_ARGS=(
  --sharding hsdp
  --zero-stage 3
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
train
