#!/usr/bin/env bash
# Qwen3-30B-A3B from random weights with Muon on matrix owners: HSDP, 8 nodes of 8 GPUs under Slurm.
#
#   bash slurm_qwen3_30b_a3b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# examples/launch.sh says what these are, which variables there are, and which flags all scripts share.
set -euo pipefail

# The preset says how many experts, how they are chosen and how they are balanced.
MODEL_ARGS=(--model qwen3-30b-a3b --seq-length 4096)

TRAINING_ARGS=(
  --micro-batch-size 1
  --global-batch-size 512
  --train-iters 100000
  --lr 3e-4
  --min-lr 3e-5
)

# A replica is a node: weights are gathered inside it, and every matrix has one owner in all 8.
PARALLEL_ARGS=(
  --sharding hsdp
  --zero-stage 3
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
submit qwen3-30b-a3b 8
