#!/usr/bin/env bash
# Qwen3-30B-A3B from random weights with Muon on matrix owners.
# HSDP, 8 nodes of 8 GPUs under Slurm.
#
#   bash slurm_qwen3_30b_a3b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# Runs on the login node and submits a chain of jobs, each of which continues the one before; see
# examples/slurm_chain.sh.
#
# Variables: NODES (8), JOB_NAME, LOGS (a folder), and those of examples/slurm_chain.sh:
#            GPUS_PER_NODE, JOBS, WALL_MINUTES, PARTITION, ACCOUNT, CONTAINER, MASTER_PORT.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

if (($# < 4)); then
  echo "usage: $0 CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]" >&2
  exit 2
fi
CHECKPOINT_PATH=$1
TENSORBOARD_PATH=$2
TOKENIZER_PATH=$3
DATA_PATH=$4
shift 4

NODES="${NODES:-8}"
JOB_NAME="${JOB_NAME:-qwen3-30b-a3b}"
LOGS="${LOGS:-$CHECKPOINT_PATH/logs}"
source "$ROOT/examples/slurm_chain.sh"

# The preset says how many experts, how they are chosen and how they are balanced.
MODEL_ARGS=(
  --model qwen3-30b-a3b
  --seq-length 4096
)

TRAINING_ARGS=(
  --micro-batch-size 1
  --global-batch-size 512
  --train-iters 100000
  --optimizer muon
  --muon-momentum 0.95
  --adam-beta1 0.9
  --adam-beta2 0.95
  --lr 3e-4
  --min-lr 3e-5
  --lr-decay-style cosine
  --lr-warmup-fraction 0.01
  --weight-decay 0.1
  --clip-grad 1.0
  --bf16
  --exit-duration-in-mins "$EXIT_MINUTES"
)

# A replica is a node: weights are gathered inside it, and every matrix has one owner in all 8.
MODEL_PARALLEL_ARGS=(
  --sharding hsdp
  --line D
  --zero-stage 3
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
)

DATA_ARGS=(
  --data-path "$DATA_PATH"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "$TOKENIZER_PATH"
  --split 990,8,2
)

EVAL_AND_LOGGING_ARGS=(
  --log-interval 10
  --log-throughput
  --log-progress
  --eval-interval 1000
  --eval-iters 20
  --save "$CHECKPOINT_PATH"
  --load "$CHECKPOINT_PATH"
  --save-interval 500
  --tensorboard-dir "$TENSORBOARD_PATH"
  --distributed-timeout-minutes 30
)

submit_chain "$ROOT/pretrain_gpt.py" \
  "${MODEL_ARGS[@]}" \
  "${TRAINING_ARGS[@]}" \
  "${MODEL_PARALLEL_ARGS[@]}" \
  "${DATA_ARGS[@]}" \
  "${EVAL_AND_LOGGING_ARGS[@]}" \
  "$@"
