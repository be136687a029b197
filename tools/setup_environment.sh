#!/usr/bin/env bash
# Makes .venv and installs MegaMuon into it; `make setup`, `make pretrain` and `make test` all call it.
#
# Where the interpreter already has torch >= 2.11 (a CUDA container), .venv sees it through --system-site-packages and
# it is never touched; else torch==2.13.0 is installed, or what TORCH and TORCH_INDEX say. A finished set-up leaves a
# stamp, so the next call returns at once; one that was interrupted leaves a marker, so the next call starts afresh.
# Every call brings the native libraries up to date with csrc/ (csrc/build.py; nothing to do takes a tenth of a second).
# Variables: PYTHON (interpreter), TORCH (pip requirement), TORCH_INDEX (index URL for torch), and csrc/build.py's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv STAMP=.venv/.megamuon-complete MARKER=.venv.installing
readonly DEFAULT_TORCH="torch==2.13.0"
readonly APT_LINE="apt-get install -y git g++ make python3 python3-venv"

say() { echo "setup: $*"; }
fail() { printf 'setup: error: %s\n' "$@" >&2; exit 1; }

# Two makes at once must not install into (or clear) the same environment.
if command -v flock >/dev/null; then
  exec 9<setup.py
  flock 9 || true
fi

# The only question about torch's version: what pip knows, the metadata of the first torch on the path of $1 (nothing if
# there is none). torch.__version__ may say it otherwise (a wheel 2.13.0 calls itself 2.13.0+cu130): never compare the two.
torch_version() {
  "$1" - <<'PY'
import importlib.metadata as metadata
try:
    print(metadata.version("torch") or "")
except metadata.PackageNotFoundError:
    pass
PY
}

# Prints the torch version that $1 sees, if it is at least 2.11 (pre-releases such as 2.11.0a0+x count).
usable_torch() {
  local version
  version=$(torch_version "$1")
  if [[ "$version" =~ ^([0-9]+)\.([0-9]+) ]] &&
    ((10#${BASH_REMATCH[1]} > 2 || (10#${BASH_REMATCH[1]} == 2 && 10#${BASH_REMATCH[2]} >= 11))); then
    echo "$version"
  fi
}

# An environment may know its interpreter's folder by another link than the interpreter itself.
identity() { "$1" -c 'import os, sys; print(os.path.realpath(sys.base_prefix), sys.version_info[:3])'; }

# What a finished set-up depends on: the metadata, this script, and the folder (an editable install holds its path).
fingerprint() { { cat setup.py pyproject.toml tools/setup_environment.sh; pwd; } | cksum; }

# A GPU that torch cannot use is an error: a CPU run in its place would look like a very slow success.
check_gpus() {
  local seen
  seen=$(nvidia-smi -L 2>/dev/null) || return 0
  [[ "$seen" =~ (^|$'\n')GPU\ [0-9] ]] || return 0
  if [[ "${CUDA_VISIBLE_DEVICES-unset}" =~ ^(-1)?$ ]]; then
    say "CUDA_VISIBLE_DEVICES hides this machine's GPUs: running on the CPU, as asked"
    return 0
  fi
  "$VENV/bin/python" - <<'PY' || fail "this machine has GPUs (nvidia-smi -L lists them), but torch cannot use them: see above" \
    "install a torch build that fits the driver, e.g. make setup TORCH=torch==2.13.0 TORCH_INDEX=<wheel index of your CUDA version>," \
    "or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU on purpose"
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}: torch.cuda.is_available() is False")
PY
}

check_python() {
  command -v "$python" >/dev/null || fail "no interpreter '$python'; on Debian: $APT_LINE (or name another: make setup PYTHON=...)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is $("$python" -V 2>&1), and Python >= 3.11 is needed; name another: make setup PYTHON=python3.12"
}

make_venv() {
  local flags=(--clear) parent
  request="${torch_request} ${TORCH_INDEX:-}" # a new environment remembers nothing
  [[ -n "$system_torch" ]] && flags+=(--system-site-packages)
  say "making $VENV with $("$python" -V) ${flags[*]}"
  touch "$MARKER"
  "$python" -m venv "${flags[@]}" "$VENV" || fail "python -m venv failed; on Debian it needs: $APT_LINE"
  # --system-site-packages means the base interpreter's packages; in a virtual environment torch lies in its own folder.
  parent=$("$python" -c 'import sys, sysconfig; print(sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else "")')
  if [[ -n "$system_torch" && -n "$parent" ]]; then
    echo "$parent" >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent_environment.pth"
  fi
}

quiet=(--quiet)
[[ ! -t 1 ]] || quiet=() # a terminal gets pip's progress bars
pip_install() { "$VENV/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check --no-input "$@"; }

install() {
  local have constraint=$VENV/torch-constraint.txt
  pip_install "setuptools>=77"
  have=$(usable_torch "$VENV/bin/python")
  if [[ -n "$have" && -z "$torch_request" ]]; then
    say "keeping torch $have"
  else
    say "installing ${torch_request:-$DEFAULT_TORCH}${TORCH_INDEX:+ from $TORCH_INDEX} (this takes a minute or more)"
    # An installed 2.13.0+cpu satisfies torch==2.13.0, so another build of one version needs the old one out first.
    "$VENV/bin/python" -m pip uninstall --quiet --yes torch 2>/dev/null
    pip_install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${torch_request:-$DEFAULT_TORCH}" ||
      fail "pip cannot install ${torch_request:-$DEFAULT_TORCH}: see above$(local_part_hint)"
    have=$(usable_torch "$VENV/bin/python")
    [[ -n "$have" ]] || fail "torch >= 2.11 is needed, and TORCH=$torch_request is not"
  fi
  # Without the local part (+cu130, +cpu, +git...): every build of this version satisfies it, the installed one at once.
  echo "torch==${have%%+*}" >"$constraint"
  say "installing megamuon and its requirements"
  pip_install --no-build-isolation --constraint "$constraint" -e ".[test]"
  check_torch "$have"
}

# An index that knows a version without its local part never finds it with one.
local_part_hint() {
  [[ ! "$torch_request" =~ ^torch\ *==[^/]*\+ ]] ||
    echo "; ${torch_request%%+*} names any build, ${torch_request} only one that a wheel index (TORCH_INDEX=) lists so"
}

# That torch is the one it was ($1), and imports.
check_torch() {
  local now
  now=$(torch_version "$VENV/bin/python")
  [[ "$now" == "$1" ]] ||
    fail "the requirements replaced torch $1 by torch ${now:-(none)}: remove $VENV and run make setup again"
  "$VENV/bin/python" -c 'import torch' ||
    fail "torch $1 does not import from $VENV: see above; remove $VENV and run make setup again"
}

# First with any interpreter and only the host library, so that a missing compiler is known before the downloads.
build_native() { "$1" csrc/build.py "${@:2}" || fail "the native libraries cannot be built: see above"; }

python=${PYTHON:-python3}
torch_request=${TORCH:-${TORCH_INDEX:+$DEFAULT_TORCH}}
request="${torch_request} ${TORCH_INDEX:-}"

# The quick way out: complete, unchanged, and nothing else asked for.
if [[ -f "$STAMP" && ! -e "$MARKER" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
  { IFS= read -r stamped && IFS= read -r stamped_request; } <"$STAMP" || true
  if [[ "$stamped" == "$(fingerprint)" ]] &&
    [[ "$request" == " " || "$request" == "${stamped_request:-}" ]] &&
    [[ -z "${PYTHON:-}" || "$(identity "$python")" == "$(identity "$VENV/bin/python")" ]]; then
    build_native "$VENV/bin/python" all --quiet
    check_gpus
    exit 0
  fi
  [[ "$request" != " " ]] || request=${stamped_request:-} # remembered, should the environment need no other torch
fi

started=$SECONDS
check_python
build_native "$python" host
system_torch=
[[ -n "$torch_request" ]] || system_torch=$(usable_torch "$python")
[[ -z "$system_torch" ]] || say "$python has torch $system_torch: $VENV will use it as it is"
if [[ -e "$MARKER" ]]; then
  say "an earlier set-up did not finish: starting afresh"
  make_venv
elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
  make_venv
elif [[ -n "${PYTHON:-}" && "$(identity "$python")" != "$(identity "$VENV/bin/python")" ]]; then
  say "$VENV was made with another interpreter than $python: making it anew"
  make_venv
elif [[ -n "$torch_request" ]] && grep -q "^include-system-site-packages = true" "$VENV/pyvenv.cfg"; then
  say "$VENV uses the interpreter's torch, and another is asked for: making it anew"
  make_venv
fi
touch "$MARKER"
install
build_native "$VENV/bin/python" all # all is built by now; this says what was skipped
printf '%s\n%s\n' "$(fingerprint)" "$request" >"$STAMP"
rm -f "$MARKER"
say "done in $((SECONDS - started)) s: $("$VENV/bin/python" -V), torch $(usable_torch "$VENV/bin/python"), in $VENV"
check_gpus
