#!/usr/bin/env bash
# Qwen2.5-1.5B from random weights with Muon on matrix owners: one node of 8 GPUs.
#
#   bash train_qwen2.5_1.5b_distributed.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# CHECKPOINTS  folder to save in and to continue from; a first run starts from random weights
# TENSORBOARD  folder of the event files
# TOKENIZER    folder of a Hugging Face tokenizer, such as Qwen2.5's
# DATA         prefix of the dataset: what stands before .bin and .idx (tools/preprocess_data.py)
# Flags that follow come last, so they win: --optimizer adam, --zero-stage 2, --train-iters 100
#
# Several nodes: run it on each, with NNODES, NODE_RANK and MASTER_ADDR set.
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

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

DISTRIBUTED_ARGS=(
  --nproc-per-node "${GPUS_PER_NODE:-8}"
  --nnodes "${NNODES:-1}"
  --node-rank "${NODE_RANK:-0}"
  --master-addr "${MASTER_ADDR:-localhost}"
  --master-port "${MASTER_PORT:-6000}"
)

# The preset fills in the architecture; a flag given beside it wins.
MODEL_ARGS=(
  --model qwen2.5-1.5b
  --seq-length 4096
)

TRAINING_ARGS=(
  --micro-batch-size 2
  --global-batch-size 256
  --train-iters 50000
  --optimizer muon
  --muon-momentum 0.95
  --adam-beta1 0.9
  --adam-beta2 0.95
  --lr 4e-4
  --min-lr 4e-5
  --lr-decay-style cosine
  --lr-warmup-fraction 0.01
  --weight-decay 0.1
  --clip-grad 1.0
  --bf16
)

# A replica is a node. One node is the same as --sharding fsdp; more of them hold a replica each,
# and every matrix still has one owner.
MODEL_PARALLEL_ARGS=(
  --sharding hsdp
  --line D
  --zero-stage 3
  --recompute-granularity selective
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
  --eval-interval 1000
  --eval-iters 20
  --save "$CHECKPOINT_PATH"
  --load "$CHECKPOINT_PATH"
  --save-interval 1000
  --tensorboard-dir "$TENSORBOARD_PATH"
  --distributed-timeout-minutes 30
)

torchrun "${DISTRIBUTED_ARGS[@]}" "$ROOT/pretrain_gpt.py" \
  "${MODEL_ARGS[@]}" \
  "${TRAINING_ARGS[@]}" \
  "${MODEL_PARALLEL_ARGS[@]}" \
  "${DATA_ARGS[@]}" \
  "${EVAL_AND_LOGGING_ARGS[@]}" \
  "$@"
