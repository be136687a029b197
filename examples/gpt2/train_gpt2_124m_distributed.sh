#!/usr/bin/env bash
# GPT-2 of 124M parameters from random weights with Muon on matrix owners: one node of 8 GPUs.
#
#   bash train_gpt2_124m_distributed.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# examples/launch.sh says what these are, which variables there are, and which flags all scripts share.
set -euo pipefail

# The architecture in Megatron's flags. `--model gpt2` says the same, with GPT-2's dropout of 0.1.
MODEL_ARGS=(
  --num-layers 12
  --hidden-size 768
  --ffn-hidden-size 3072
  --num-attention-heads 12
  --kv-channels 64
  --seq-length 1024
  --max-position-embeddings 1024
  --position-embedding-type learned_absolute
  --normalization LayerNorm
  --openai-gelu
  --hidden-dropout 0.0
  --attention-dropout 0.0
  --make-vocab-size-divisible-by 128
)

TRAINING_ARGS=(
  --micro-batch-size 32
  --global-batch-size 512
  --train-iters 20000
  --lr 1e-3
  --min-lr 1e-4
)

PARALLEL_ARGS=(
  --sharding fsdp
  --zero-stage 2
)

source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
train
