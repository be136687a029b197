"""The GPU checks without a GPU: their cases fit a GPU, their verdicts, and that they say so."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.gpu_checks import (
    GATHER,
    MAX_BLOCKS,
    PUBLISH,
    REDUCE,
    Case,
    NativeCase,
    NativeResult,
    checked_cases,
    join,
    main,
    run_apart,
    sanitize,
    sanitized_cases,
    timed_cases,
    verdict,
)
from tools.gpu_ranks import FAILED, NOT_RUN, PASSED, judge_ranks

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "csrc" / "bindings" / "loopback_api.h"
MULTIPROCESSORS = 132  # of an H200; a sum takes one block of each


def fields(name: str) -> list[str]:
    text = re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8"))
    body = re.search(r"typedef struct \{([^}]*)\} " + name + ";", text)
    assert body is not None
    declarations = re.findall(r"(?:int|uint64_t|double) ([\w, ]+);", body[1])
    return [field.strip() for line in declarations for field in line.split(",")]


def test_the_structures_are_the_header_s() -> None:
    assert fields("mm_loopback_case") == [name for name, _ in NativeCase._fields_]
    assert fields("mm_loopback_result") == [name for name, _ in NativeResult._fields_]


@pytest.mark.parametrize("case", checked_cases() + timed_cases() + sanitized_cases(), ids=Case.name)
def test_every_case_fits_one_gpu(case: Case) -> None:
    blocks = 1 if case.kind == PUBLISH else case.pipelines * case.groups
    assert blocks <= MAX_BLOCKS
    assert case.groups <= case.nodes
    assert case.nodes * case.columns * blocks <= MULTIPROCESSORS
    assert case.chunk_bytes % 256 == 0


def test_cases_cover_every_kind_and_path() -> None:
    cases = checked_cases()
    for kind in (GATHER, REDUCE):
        mine = [case for case in cases if case.kind == kind]
        assert any(case.star_bytes for case in mine)
        assert any(case.nodes == 1 for case in mine)
        assert any(case.columns == 1 for case in mine)
        assert any(case.pipelines > 1 and case.groups > 1 for case in mine)
        assert any(case.granule % 16 for case in mine)
        assert any(case.slots == 1 for case in mine)
    dtypes = {(c.slot_dtype, c.wire_dtype) for c in cases if c.kind == REDUCE}
    assert len(dtypes) >= 6
    assert any(case.kind == PUBLISH for case in cases)
    assert all(case.calls >= 4 for case in cases)  # both tables at both bases


def test_a_case_passes_only_if_all_was_compared() -> None:
    case = Case(kind=GATHER, nodes=2, columns=2)
    result = {"error": "", "checked": 100, "mismatches": 0, "bytes": 1, "call_seconds": 0.0}
    assert verdict(case, result)[0]
    assert not verdict(case, result | {"mismatches": 1})[0]
    assert not verdict(case, result | {"checked": 0})[0]
    good, text = verdict(case, result | {"error": "no progress"})
    assert not good and "no progress" in text


# --- parts that do not run -----------------------------------------------------------------------

RAN = {"stage": "done", "error": "", "gather_differs": 0, "reduction_differs": 0}
REFUSED = {"stage": "error", "error": "CollectiveError: no symmetric memory"}


def test_ranks_that_were_refused_did_not_pass() -> None:
    assert judge_ranks([RAN, RAN])["status"] == PASSED
    held = judge_ranks([RAN, REFUSED])
    assert held["status"] == NOT_RUN
    assert held["reason"] == "rank 1, at stage 'error': CollectiveError: no symmetric memory"
    assert judge_ranks([RAN | {"gather_differs": 3}, REFUSED])["status"] == FAILED


def part(folder: Path, name: str, **fields: object) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(fields))
    return path


def test_the_verdict_is_the_worst_of_the_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = part(tmp_path, "good", status=PASSED, reason="")
    trained = part(tmp_path, "gpu_training", differs=False)
    idle = part(tmp_path, "idle", status=NOT_RUN, reason="no switch")
    bad = part(tmp_path, "bad", status=FAILED, reason="3 elements differ")
    assert join([good, trained])["status"] == PASSED
    assert join([good, idle])["status"] == NOT_RUN
    assert join([good, tmp_path / "absent.json"])["status"] == NOT_RUN
    assert join([bad, idle, good])["status"] == FAILED
    assert join([part(tmp_path, "gpu_training", differs=True)])["status"] == FAILED
    assert join([])["status"] == NOT_RUN
    capsys.readouterr()
    statuses = [main(["join", *map(str, paths)]) for paths in ([good], [good, idle], [idle, bad])]
    assert statuses == [0, 4, 1]
    said = capsys.readouterr().out
    assert re.search(r"^gpu_checks: idle +not run +no switch$", said, re.MULTILINE)


def test_without_a_sanitizer_its_part_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert sanitize(1.0) == {
        "status": NOT_RUN,
        "reason": "there is no compute-sanitizer on the PATH",
    }


def test_what_a_sanitizer_finds_fails_its_case(tmp_path: Path) -> None:
    """Its exit status counts, whatever the case says of itself."""
    tool = tmp_path / "sanitizer"
    tool.write_text("#!/bin/sh\necho '{\"error\": \"\"}'\necho 'Invalid read' >&2\nexit 9\n")
    tool.chmod(0o755)
    result = run_apart(sanitized_cases()[0], [str(tool)], limit=20)
    assert result == {"error": "exit status 9: Invalid read"}


def run_script(tmp_path: Path, gpus: int, **statuses: int) -> subprocess.CompletedProcess[str]:
    """The script among stand-ins for nvidia-smi and the interpreter; each part writes a file unless
    it has no status here.
    """
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    smi = bin_ / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: H200'\n" for i in range(gpus)))
    python = bin_ / "python"
    names = {0: PASSED, 1: FAILED, 4: NOT_RUN}
    script = f"""#!/bin/bash
echo "$*" "${{NCCL_NVLS_ENABLE:-}}" >> {tmp_path}/calls
case "$*" in *" join "*) exec {shutil.which("python3")} "$@";; esac
while [ $# -gt 1 ]; do [ "$1" = --json ] && file=$2; shift; done
[ -n "${{file:-}}" ] || exit 0
part=$(basename "$file" .json); part=${{part#gpu_checks_}}
case $part in
"""
    for name, status in statuses.items():
        text = json.dumps({"status": names[status], "reason": name})
        script += f"  {name}) echo '{text}' > $file; exit {status};;\n"
    python.write_text(script + "esac\n")
    for program in (smi, python):
        program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "PYTHON": str(python),
        "OUT": str(tmp_path / "out"),
    }
    command = ["bash", str(ROOT / "tools" / "gpu_checks.sh")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


ALL = {"loopback": 0, "sanitize": 0, "lsa": 0, "multicast": 0, "gpu_training": 0}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 0),
        ({"multicast": 4}, 4),
        ({"lsa": None}, 4),  # it left no file: killed, or out of time
        ({"lsa": 1, "multicast": 4}, 1),
        ({"loopback": 1}, 1),
    ],
)
def test_the_script_is_green_only_where_all_parts_ran(
    changed: dict[str, int | None], expected: int, tmp_path: Path
) -> None:
    statuses = {name: status for name, status in (ALL | changed).items() if status is not None}
    done = run_script(tmp_path, 1, **statuses)
    assert done.returncode == expected, done.stdout + done.stderr
    for name in changed:
        assert f"gpu_checks_{name}" in done.stdout


@pytest.mark.parametrize(("gpus", "ranks", "switch"), [(1, 2, "0"), (8, 8, "")])
def test_a_rank_for_each_gpu_and_multicast_where_there_are_several(
    gpus: int, ranks: int, switch: str, tmp_path: Path
) -> None:
    assert run_script(tmp_path, gpus, **ALL).returncode == 0
    calls = (tmp_path / "calls").read_text()
    assert f"--nproc-per-node {ranks} " in calls
    for multicast in ("on", "off"):
        (call,) = [line for line in calls.splitlines() if f"--multicast {multicast}" in line]
        assert call.endswith(f".json {switch}")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="needs a machine without GPUs")
def test_without_a_gpu_the_script_ends_with_3_and_says_why(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_checks.sh")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 3
    assert done.stdout.strip() == "gpu_checks: there is no GPU here, nothing was checked"
