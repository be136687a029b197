#!/usr/bin/env bash
# A Llama 3 of 8B parameters from random weights with Muon on matrix owners: 8 GPUs a node.
#
#   bash train_llama3_8b_distributed.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# examples/launch.sh says what these are, which variables there are, and which flags all scripts share.
set -euo pipefail

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
