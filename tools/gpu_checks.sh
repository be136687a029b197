#!/usr/bin/env bash
# The device code on the GPUs of this machine, in at most fifteen minutes: builds it, checks the
# operators on virtual places of one GPU, also under compute-sanitizer, times them, runs NCCL's
# device interface with a rank for each GPU (two on the only one), with and without multicast, beside
# NCCL's own calls, and trains with it (tools/gpu_training.py). Tables on the terminal,
# gpu_checks.json in ${OUT:-.}.
#
# Exit status: 0 all parts ran and passed; 1 one failed; 3 there is no GPU or no nvcc, so nothing was
# checked; 4 nothing failed, and some part did not run: the last lines say which and why.
#
#   PYTHON    the interpreter, with torch for all but the first part (default: .venv/bin/python, else
#             python3)
#   SECONDS_MAX   when the first part begins no further case (default 220)
set -u
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-.}
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ -x .venv/bin/python ] && python=.venv/bin/python
fi

if ! gpus=$(nvidia-smi -L 2>/dev/null) || [ -z "$gpus" ]; then
  echo "gpu_checks: there is no GPU here, nothing was checked"
  exit 3
fi
echo "$gpus"
count=$(printf '%s\n' "$gpus" | grep -c '^GPU')
if ! "$python" csrc/build.py nvcc; then
  echo "gpu_checks: there is no nvcc here, nothing was checked"
  exit 3
fi

mkdir -p "$out"
parts=()
for part in loopback sanitize lsa multicast; do parts+=("$out/gpu_checks_$part.json"); done
parts+=("$out/gpu_training.json")
rm -f "${parts[@]}"

# The two libraries take half a minute to a minute each and need a core each.
"$python" csrc/build.py loopback >"$out/build_loopback.log" 2>&1 &
loopback=$!
"$python" csrc/build.py device >"$out/build_device.log" 2>&1 &
device=$!
wait "$loopback"
built_loopback=$?
cat "$out/build_loopback.log"
if [ $built_loopback -eq 0 ]; then
  "$python" tools/gpu_checks.py loopback --json "$out/gpu_checks_loopback.json" \
    --seconds "${SECONDS_MAX:-220}"
  "$python" tools/gpu_checks.py sanitize --json "$out/gpu_checks_sanitize.json" --seconds 180
fi

wait "$device"
built_device=$?
cat "$out/build_device.log"
if [ $built_device -eq 0 ]; then
  export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
  # Ranks that share a GPU need NCCL's leave, and have no multicast.
  if [ "$count" -lt 2 ]; then
    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0
  fi
  timeout 100 "$python" tools/gpu_checks.py nccl --multicast off --json "$out/gpu_checks_lsa.json"
  timeout 100 "$python" tools/gpu_checks.py nccl --multicast on \
    --json "$out/gpu_checks_multicast.json"
  ranks=$((count > 2 ? count : 2))
  timeout 120 "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    tools/gpu_training.py --json "$out/gpu_training.json"
fi

"$python" tools/gpu_checks.py join "${parts[@]}" --json "$out/gpu_checks.json"
verdict=$?
if [ $built_loopback -ne 0 ] || [ $built_device -ne 0 ]; then
  echo "gpu_checks: a library does not build"
  exit 1
fi
exit $verdict
