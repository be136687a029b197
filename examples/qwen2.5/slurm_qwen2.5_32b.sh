#!/usr/bin/env bash
# Qwen2.5-32B from random weights with Muon on matrix owners: HSDP and tensor parallelism, 8 nodes
# of 8 GPUs under Slurm.
#
#   bash slurm_qwen2.5_32b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# examples/launch.sh says what these are, which variables there are, and which flags all scripts share.
set -euo pipefail

MODEL_ARGS=(--model qwen2.5-32b --seq-length 4096)

TRAINING_ARGS=(
  --micro-batch-size 1
  --global-batch-size 512
  --train-iters 100000
  --lr 3e-4
  --min-lr 3e-5
)

# A layer is computed by two GPUs together, so a replica is the four pairs of a node. Every matrix
# has one owner in all 8 nodes.
PARALLEL_ARGS=(
  --sharding hsdp
  --tensor-model-parallel-size 2
  --sequence-parallel
  --zero-stage 3
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
submit qwen2.5-32b 8
