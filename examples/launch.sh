# What the scripts of the examples share. A script sets MODEL_ARGS, TRAINING_ARGS and PARALLEL_ARGS,
# sources this file, and calls `train` (this node) or `submit NAME NODES` (a chain of Slurm jobs):
#
#   bash SCRIPT CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]
#
# CHECKPOINTS  folder to save in and to continue from; a first run starts from random weights
# TENSORBOARD  folder of the event files
# TOKENIZER    folder of a Hugging Face tokenizer
# DATA         prefix of the dataset: what stands before .bin and .idx (tools/preprocess_data.py)
# Flags that follow come last, so they win: --optimizer adam, --zero-stage 2, --train-iters 100
#
# train_*.sh: for several nodes, run it on each with NNODES, NODE_RANK and MASTER_ADDR set; further
# variables: GPUS_PER_NODE (8), MASTER_PORT (6000).
#
# slurm_*.sh run on the login node and submit JOBS jobs of one name. `--dependency=singleton` lets
# one of them run at a time; each saves and leaves before its wall time is over
# (--exit-duration-in-mins), and the next one continues from its checkpoint. A job that finds the
# run finished ends at once. Variables: NODES, JOB_NAME, LOGS (a folder), GPUS_PER_NODE (8), JOBS
# (3), WALL_MINUTES (240), MASTER_PORT (6000), PARTITION and ACCOUNT where the cluster asks for
# them, CONTAINER (an image for srun).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if (($# < 4)); then
  echo "usage: $0 CHECKPOINTS TENSORBOARD TOKENIZER DATA [more flags]" >&2
  exit 2
fi

ENTRY=(
  "$ROOT/pretrain_gpt.py"
  "${MODEL_ARGS[@]}"
  --optimizer muon
  --muon-momentum 0.95
  --adam-beta1 0.9
  --adam-beta2 0.95
  --lr-decay-style cosine
  --lr-warmup-fraction 0.01
  --weight-decay 0.1
  --clip-grad 1.0
  --bf16
  "${TRAINING_ARGS[@]}"
  --line D
  "${PARALLEL_ARGS[@]}"
  --data-path "$4"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "$3"
  --split 990,8,2
  --log-interval 10
  --log-throughput
  --eval-interval 1000
  --eval-iters 20
  --save "$1"
  --load "$1"
  --tensorboard-dir "$2"
  --distributed-timeout-minutes 30
)
CHECKPOINTS=$1
shift 4
MORE_ARGS=("$@")

train() {
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  torchrun \
    --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --nnodes "${NNODES:-1}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" \
    --master-port "${MASTER_PORT:-6000}" \
    "${ENTRY[@]}" --save-interval 1000 "${MORE_ARGS[@]}"
}

submit() {
  local name="${JOB_NAME:-$1}" nodes="${NODES:-$2}" logs="${LOGS:-$CHECKPOINTS/logs}"
  local gpus="${GPUS_PER_NODE:-8}" minutes="${WALL_MINUTES:-240}" job pretrain srun
  local margin=15 # minutes: start-up before the clock of the run, the last step, the last save
  if ((minutes <= margin)); then
    echo "WALL_MINUTES=$minutes: more than $margin are needed to start and to save" >&2
    exit 2
  fi

  # What the jobs run, quoted once more: the text below passes through another shell.
  pretrain=$(printf '%q ' "${ENTRY[@]}" --save-interval 500 --log-progress \
    --exit-duration-in-mins $((minutes - margin)) "${MORE_ARGS[@]}")

  local sbatch_args=(
    --job-name "$name"
    --dependency singleton
    --nodes "$nodes"
    --ntasks-per-node 1 # torchrun starts one process per GPU itself
    --gres "gpu:$gpus"
    --exclusive
    --time "$minutes"
    --output "$logs/%x-%j.log"
  )
  [[ -z "${PARTITION:-}" ]] || sbatch_args+=(--partition "$PARTITION")
  [[ -z "${ACCOUNT:-}" ]] || sbatch_args+=(--account "$ACCOUNT")

  local srun_args=(--kill-on-bad-exit=1)
  [[ -z "${CONTAINER:-}" ]] || srun_args+=("--container-image=$CONTAINER")
  srun=$(printf '%q ' "${srun_args[@]}")

  mkdir -p "$logs"
  for ((job = 1; job <= ${JOBS:-3}; job++)); do
    sbatch "${sbatch_args[@]}" <<SCRIPT
#!/usr/bin/env bash
set -euo pipefail
cd $(printf '%q' "$PWD")
export OMP_NUM_THREADS=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
mapfile -t hosts < <(scontrol show hostnames "\$SLURM_JOB_NODELIST")
srun $srun torchrun --nnodes $nodes --nproc-per-node $gpus \\
  --rdzv-backend c10d --rdzv-id "\$SLURM_JOB_ID" \\
  --rdzv-endpoint "\${hosts[0]}:${MASTER_PORT:-6000}" \\
  $pretrain
SCRIPT
  done
}
