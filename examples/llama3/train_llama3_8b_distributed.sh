#!/usr/bin/env bash
# A Llama 3 of 8B parameters from random weights with Muon on matrix owners: 8 GPUs a node.
#
#   bash train_llama3_8b_distributed.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# CHECKPOINTS  folder to save in and to continue from; a first run starts from random weights
# TENSORBOARD  folder of the event files
# TOKENIZER    folder of a Hugging Face tokenizer, such as Llama 3's
# DATA         prefix of the dataset: what stands before .bin and .idx (tools/preprocess_data.py)
# Flags that follow come last, so they win: --optimizer adam, --train-iters 100
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

# The architecture in Megatron's flags; `--model llama3-8b` says the same.
MODEL_ARGS=(
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --seq-length 8192
  --max-position-embeddings 8192
  --position-embedding-type rope
  --rotary-base 500000
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --hidden-dropout 0.0
  --attention-dropout 0.0
  --make-vocab-size-divisible-by 128
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
)

# A replica is a node. One node is the same as --sharding fsdp; more of them hold a replica each,
# and every matrix still has one owner.
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
