# A chain of Slurm jobs for one run; the slurm_*.sh scripts source this file.
#
# submit_chain ENTRY FLAGS... submits JOBS jobs of one name that all run `torchrun ENTRY FLAGS...`.
# `--dependency=singleton` lets one of them run at a time; each saves and leaves before its wall
# time is over (--exit-duration-in-mins), and the next one continues from its checkpoint. A job that
# finds the run finished ends at once.
#
# The sourcing script sets NODES, JOB_NAME and LOGS, and passes EXIT_MINUTES on to the run.
# Variables of the user: GPUS_PER_NODE (8), JOBS (3), WALL_MINUTES (240), MASTER_PORT (6000),
# PARTITION and ACCOUNT where the cluster asks for them, CONTAINER (an image for srun).

GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
JOBS="${JOBS:-3}"
WALL_MINUTES="${WALL_MINUTES:-240}"
MARGIN_MINUTES=15 # start-up before the clock of the run, the last step, the last save

if ((WALL_MINUTES <= MARGIN_MINUTES)); then
  echo "WALL_MINUTES=$WALL_MINUTES: more than $MARGIN_MINUTES are needed to start and to save" >&2
  exit 2
fi
EXIT_MINUTES=$((WALL_MINUTES - MARGIN_MINUTES))

submit_chain() {
  # What the jobs run, quoted once more: the text below passes through another shell.
  local pretrain srun job
  pretrain=$(printf '%q ' "$@")

  local sbatch_args=(
    --job-name "$JOB_NAME"
    --dependency singleton
    --nodes "$NODES"
    --ntasks-per-node 1 # torchrun starts one process per GPU itself
    --gres "gpu:$GPUS_PER_NODE"
    --exclusive
    --time "$WALL_MINUTES"
    --output "$LOGS/%x-%j.log"
  )
  [[ -z "${PARTITION:-}" ]] || sbatch_args+=(--partition "$PARTITION")
  [[ -z "${ACCOUNT:-}" ]] || sbatch_args+=(--account "$ACCOUNT")

  local srun_args=(--kill-on-bad-exit=1)
  [[ -z "${CONTAINER:-}" ]] || srun_args+=("--container-image=$CONTAINER")
  srun=$(printf '%q ' "${srun_args[@]}")

  mkdir -p "$LOGS"
  for ((job = 1; job <= JOBS; job++)); do
    sbatch "${sbatch_args[@]}" <<SCRIPT
#!/usr/bin/env bash
set -euo pipefail
cd $(printf '%q' "$PWD")
export OMP_NUM_THREADS=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
mapfile -t hosts < <(scontrol show hostnames "\$SLURM_JOB_NODELIST")
srun $srun torchrun --nnodes $NODES --nproc-per-node $GPUS_PER_NODE \\
  --rdzv-backend c10d --rdzv-id "\$SLURM_JOB_ID" \\
  --rdzv-endpoint "\${hosts[0]}:${MASTER_PORT:-6000}" \\
  $pretrain
SCRIPT
  done
}
