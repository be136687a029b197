#!/usr/bin/env bash
# The device code on one GPU, in at most eight minutes: builds it, checks the operators on virtual places, times them,
# tries NCCL's device interface with two ranks on this GPU, and trains with it (tools/gpu_training.py). Tables on the terminal, gpu_checks.json in
# ${OUT:-.}. Exit status: 0 all checks passed, 1 one failed, 3 there is no GPU or no nvcc, so nothing
# was checked.
#
#   PYTHON    the interpreter, with torch for the second part (default: .venv/bin/python, else python3)
#   SECONDS_MAX   when to begin no further case (default 220)
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
if ! "$python" csrc/build.py nvcc; then
  echo "gpu_checks: there is no nvcc here, nothing was checked"
  exit 3
fi

mkdir -p "$out"
# The two libraries take half a minute to a minute each and need a core each.
"$python" csrc/build.py loopback >"$out/build_loopback.log" 2>&1 &
loopback=$!
"$python" csrc/build.py device >"$out/build_device.log" 2>&1 &
device=$!
wait "$loopback"
if [ $? -ne 0 ]; then
  cat "$out/build_loopback.log"
  echo "gpu_checks: the loopback library does not build"
  kill "$device" 2>/dev/null
  exit 1
fi
cat "$out/build_loopback.log"
"$python" tools/gpu_checks.py loopback --json "$out/gpu_checks_loopback.json" \
  --seconds "${SECONDS_MAX:-220}"
first=$?

second=0
wait "$device"
built=$?
cat "$out/build_device.log"
if [ $built -ne 0 ]; then
  echo "gpu_checks: the device library does not build"
  second=1
else
  NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 CUDA_MODULE_LOADING=EAGER \
    CUDA_DEVICE_MAX_CONNECTIONS=32 \
    timeout 80 "$python" tools/gpu_checks.py nccl --json "$out/gpu_checks_nccl.json"
  second=$?
  rm -f "$out/gpu_training.json"
  NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 CUDA_MODULE_LOADING=EAGER \
    CUDA_DEVICE_MAX_CONNECTIONS=32 timeout 80 "$python" -m torch.distributed.run --standalone \
    --nproc-per-node 2 tools/gpu_training.py --json "$out/gpu_training.json"
  # Other weights are a failure; that the two ranks could not train is a finding.
  [ $? -eq 1 ] && [ -f "$out/gpu_training.json" ] && second=1
fi
"$python" tools/gpu_checks.py join "$out/gpu_checks_loopback.json" "$out/gpu_checks_nccl.json" \
  --json "$out/gpu_checks.json"
[ $first -eq 0 ] && [ $second -eq 0 ]
