"""The GPU checks without a GPU: their cases fit a GPU, their verdicts, and that they say so."""

from __future__ import annotations

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
    timed_cases,
    verdict,
)

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


@pytest.mark.parametrize("case", checked_cases() + timed_cases(), ids=Case.name)
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
