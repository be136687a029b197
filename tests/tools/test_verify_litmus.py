"""tools/verify_litmus.py: its variants, how Dartagnan is read; the programs where it is there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tools import verify_litmus
from tools.verify_litmus import BREAKS, HOLDS, MISSING, PROGRAMS

NAMES = sorted(path.stem for path in PROGRAMS.glob("*.litmus"))
needs_dartagnan = pytest.mark.skipif(
    verify_litmus.command() is None, reason="Dartagnan is not here (DAT3M_HOME)"
)


def text_of(name: str) -> str:
    return (PROGRAMS / f"{name}.litmus").read_text(encoding="utf-8")


def test_every_hand_off_has_a_program() -> None:
    assert NAMES == [
        "acknowledge_reuse",
        "block_message",
        "entry_alias",
        "last_leaves",
        "multicast_arrival",
        "task_tail",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_lacks_one_fence_and_nothing_else(name: str) -> None:
    text = text_of(name)
    whole, *without = verify_litmus.variants(text)
    assert whole == ("", text)
    fences = re.findall(r"fence\.[\w.]+", text)
    assert len(without) == len(fences) >= 1
    for (what, changed), fence in zip(without, fences, strict=True):
        assert what.startswith(fence)
        assert len(changed) == len(text) and changed.count("fence.") == len(fences) - 1
        assert changed.split() == " ".join(changed.split()).split()


@pytest.mark.parametrize("name", NAMES)
def test_a_program_names_the_code_that_it_is_of(name: str) -> None:
    """And the code still has those functions."""
    files = re.findall(r"(csrc/[\w/.]+?):((?:[ ,]*\w+)+)", text_of(name))
    assert files
    for file, functions in files:
        code = (PROGRAMS.parents[1] / file).read_text(encoding="utf-8")
        assert any(function in code for function in re.findall(r"\w+", functions)), file


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("Test: a\nResult: PASS\nTime: 1 secs", HOLDS),
        ("Test: a\nResult: FAIL\nTime: 1 secs", BREAKS),
        ("Result: UNKNOWN", "no result: Result: UNKNOWN"),
        ("Error: no such file", "no result: Error: no such file"),
    ],
)
def test_dartagnan_is_read(output: str, found: str) -> None:
    assert verify_litmus.read_output(output) == found


def stand_in(folder: Path, answer: str) -> str:
    """A program that answers in Dartagnan's place; the command that starts it."""
    (folder / "cat").mkdir()
    (folder / "cat" / "ptx-v7.5.cat").write_text("")
    program = folder / "dartagnan.py"
    program.write_text(f"import sys\ntext = open(sys.argv[2]).read()\nprint('Result:', {answer})\n")
    return f"{sys.executable} {program}"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("'PASS' if text.count('fence.') == 1 else 'FAIL'", 0),
        ("'PASS'", 1),  # a fence that is not needed
        ("'FAIL'", 1),
        ("'ERROR'", 1),
    ],
)
def test_a_program_that_does_not_need_its_fence_is_no_success(
    answer: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DARTAGNAN", stand_in(tmp_path, answer))
    monkeypatch.setenv("DAT3M_HOME", str(tmp_path))
    found = tmp_path / "found.json"
    assert verify_litmus.main(["--only", "task_tail", "--json", str(found)]) == status
    record = json.loads(found.read_text())
    assert record["passed"] == (status == 0)
    assert [row["expected"] for row in record["findings"]] == [HOLDS, BREAKS]


def test_without_dartagnan_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DAT3M_HOME", raising=False)
    assert verify_litmus.main([]) == MISSING
    assert "set DAT3M_HOME" in capsys.readouterr().err


@needs_dartagnan
@pytest.mark.slow
def test_all_programs_hold_and_need_each_fence() -> None:
    assert verify_litmus.main([]) == 0
