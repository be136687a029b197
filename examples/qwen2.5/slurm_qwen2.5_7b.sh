#!/usr/bin/env bash
# Qwen2.5-7B from random weights with Muon on matrix owners, on a Slurm cluster.
#
#   bash slurm_qwen2.5_7b.sh CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# Runs on the login node and submits JOBS jobs of one name. `--dependency=singleton` lets one of them
# run at a time; each saves and leaves before its wall time is over (--exit-duration-in-mins), and the
# next one continues from its checkpoint. A job that finds the run finished ends at once.
#
# Variables: NODES (4), GPUS_PER_NODE (8), JOBS (3), WALL_MINUTES (240), JOB_NAME, LOGS (a folder),
#            PARTITION and ACCOUNT where the cluster asks for them, CONTAINER (an image for srun).
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

NODES="${NODES:-4}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
JOBS="${JOBS:-3}"
WALL_MINUTES="${WALL_MINUTES:-240}"
JOB_NAME="${JOB_NAME:-qwen2.5-7b}"
LOGS="${LOGS:-$CHECKPOINT_PATH/logs}"
MARGIN_MINUTES=15 # start-up before the clock of the run, the last step, the last save

if ((WALL_MINUTES <= MARGIN_MINUTES)); then
  echo "WALL_MINUTES=$WALL_MINUTES: more than $MARGIN_MINUTES are needed to start and to save" >&2
  exit 2
fi

MODEL_ARGS=(
  --model qwen2.5-7b
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
  --exit-duration-in-mins "$((WALL_MINUTES - MARGIN_MINUTES))"
)

MODEL_PARALLEL_ARGS=(
  --sharding fsdp
  --line C
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

# What the jobs run, quoted once more: the text below passes through another shell.
PRETRAIN=$(printf '%q ' "$ROOT/pretrain_gpt.py" \
  "${MODEL_ARGS[@]}" \
  "${TRAINING_ARGS[@]}" \
  "${MODEL_PARALLEL_ARGS[@]}" \
  "${DATA_ARGS[@]}" \
  "${EVAL_AND_LOGGING_ARGS[@]}" \
  "$@")

SBATCH_ARGS=(
  --job-name "$JOB_NAME"
  --dependency singleton
  --nodes "$NODES"
  --ntasks-per-node 1 # torchrun starts one process per GPU itself
  --gres "gpu:$GPUS_PER_NODE"
  --exclusive
  --time "$WALL_MINUTES"
  --output "$LOGS/%x-%j.log"
)
[[ -z "${PARTITION:-}" ]] || SBATCH_ARGS+=(--partition "$PARTITION")
[[ -z "${ACCOUNT:-}" ]] || SBATCH_ARGS+=(--account "$ACCOUNT")

SRUN_ARGS=(--kill-on-bad-exit=1)
[[ -z "${CONTAINER:-}" ]] || SRUN_ARGS+=("--container-image=$CONTAINER")
SRUN=$(printf '%q ' "${SRUN_ARGS[@]}")

mkdir -p "$LOGS"
for ((job = 1; job <= JOBS; job++)); do
  sbatch "${SBATCH_ARGS[@]}" <<EOF
#!/usr/bin/env bash
set -euo pipefail
cd $(printf '%q' "$PWD")
export OMP_NUM_THREADS=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
mapfile -t hosts < <(scontrol show hostnames "\$SLURM_JOB_NODELIST")
srun $SRUN torchrun --nnodes $NODES --nproc-per-node $GPUS_PER_NODE \\
  --rdzv-backend c10d --rdzv-id "\$SLURM_JOB_ID" --rdzv-endpoint "\${hosts[0]}:${MASTER_PORT:-6000}" \\
  $PRETRAIN
EOF
done
