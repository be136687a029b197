"""tools/verify_models.py: the protocol models hold, and every rule that is taken away is missed.

The searches need spin and gcc and are skipped, with the reason, where they are not; how spin's
output is read and what the table of variants covers is tested everywhere. The larger bounds take
minutes and are the tool's alone (without ``--quick``).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import verify_models
from tools.verify_models import ASSERTION, DEADLOCK, HOLDS, INCOMPLETE, MODELS, VARIANTS

ROOT = Path(__file__).resolve().parents[2]
MISSING = verify_models.missing()
needs_spin = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
MODEL_NAMES = sorted(path.stem for path in MODELS.glob("*.pml"))

# The rules of the rings, and what happens without each (with one slot, if not said otherwise).
RULES = {
    "FORWARD_FROM_POOL": {HOLDS},
    "ACK_BEFORE_DONE": {ASSERTION},
    "WEAK_SIGNALS": {HOLDS, ASSERTION},  # the latter with two slots
    "NO_ENTRY_WAIT": {ASSERTION},
    "BLOCKING_GROUP": {DEADLOCK},
    "SHARED_CREDIT": {DEADLOCK},
    "RESET_ARRIVALS": {DEADLOCK},
}


def documented(model: str) -> set[str]:
    """Macros that the comment at the top of a model lists."""
    top = (MODELS / f"{model}.pml").read_text(encoding="utf-8").split("*/")[0]
    return set(re.findall(r"^ \*   ([A-Z_]+) ", top, re.MULTILINE))


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_every_macro_of_a_model_is_checked_and_used(model: str) -> None:
    checked = {m for v in VARIANTS if v.model == model for m in v.macros.split() if "=" not in m}
    assert documented(model) == checked
    code = (MODELS / f"{model}.pml").read_text(encoding="utf-8").split("*/", 1)[1]
    for macro in checked:
        assert re.search(rf"^#(?:ifn?def|elif|if)\b.*\b{macro}\b", code, re.MULTILINE), macro


def test_every_rule_of_the_rings_has_the_outcome_that_is_known() -> None:
    rings = [v for v in VARIANTS if v.model == "queue_ring"]
    for macro, outcomes in RULES.items():
        assert {v.expected for v in rings if macro in v.macros.split()} == outcomes, macro
    weak = {v.macros.split()[0]: v.expected for v in rings if "WEAK_SIGNALS" in v.macros}
    assert weak == {"S=1": HOLDS, "S=2": ASSERTION}


def test_names_are_unique_and_models_exist() -> None:
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)
    assert sorted({v.model for v in VARIANTS}) == MODEL_NAMES


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (
            "State-vector 9 byte, depth reached 3, errors: 0\n   31 states, stored\n",
            (HOLDS, 31, ""),
        ),
        (
            "pan:1: assertion violated (slot[0]==1) (at depth 8)\nerrors: 1\n 9 states, stored\n",
            (ASSERTION, 9, "assertion violated (slot[0]==1)"),
        ),
        (
            "pan:1: invalid end state (at depth 14)\nerrors: 1\n 16 states, stored\n",
            (DEADLOCK, 16, "invalid end state"),
        ),
        (
            "pan: reached -DMEMLIM bound\nerrors: 0\n 1.0886334e+07 states, stored\n",
            (INCOMPLETE, 10886334, "pan: reached -DMEMLIM bound"),
        ),
        (
            "error: max search depth too small\nerrors: 0\n 5 states, stored\n",
            (INCOMPLETE, 5, "error: max search depth too small"),
        ),
        ("Segmentation fault\n", (INCOMPLETE, 0, "no result")),
    ],
    ids=["holds", "assertion", "deadlock", "memory", "depth", "crash"],
)
def test_output_of_a_search_is_read(text: str, result: tuple[str, int, str]) -> None:
    assert verify_models.read_output(text) == result


def test_without_spin_the_status_is_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_models.shutil, "which", lambda name: None)
    assert verify_models.main(["--quick"]) == verify_models.MISSING
    assert "spin is not on PATH" in capsys.readouterr().err


@needs_spin
def test_the_models_hold_and_their_mutants_do_not(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    command = [sys.executable, "tools/verify_models.py", "--quick", "--jobs", "2", "--json"]
    run = subprocess.run([*command, str(file)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["passed"]
    assert {v["name"] for v in record["variants"]} == {v.name for v in VARIANTS if not v.slow}
    for finding in record["variants"]:
        assert finding["found"] == finding["expected"], finding
        assert finding["states"] > 10, finding


@needs_spin
def test_an_outcome_that_is_not_expected_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mutant that is said to hold, and one whose breach is said to be elsewhere."""
    wrong = verify_models.holds("queue_ring", "S=1 BLOCKING_GROUP")
    wrong += verify_models.breaks("publish", ASSERTION, "outbox[", "BOOLEAN_FLAG")
    monkeypatch.setattr(verify_models, "VARIANTS", tuple(wrong))
    assert verify_models.main([]) == 1
    output = capsys.readouterr().out
    assert output.count("NOT AS EXPECTED") == 2
    assert "2 of 2 not as expected" in output
