"""Random schedules of the operators pass, every broken rule is caught, threads do not race.

The long runs are ``tools/chaos.py``'s; here are a few thousand schedules, all mutants, and some
seconds of ThreadSanitizer, which is skipped, with the reason, where it does not link.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools import chaos

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = 2000


@pytest.fixture(scope="module")
def programs() -> list[Path | RuntimeError]:
    """The fuzzer and the threads' driver, built side by side; the error where one cannot be."""

    def build(make: Callable[[], Path]) -> Path | RuntimeError:
        try:
            return make()
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(build, [chaos.chaos_program, chaos.threads_program]))


def usable(program: Path | RuntimeError) -> Path:
    if isinstance(program, RuntimeError):
        pytest.skip(str(program))
    return program


@pytest.fixture
def program(programs: list[Path | RuntimeError]) -> Path:
    return usable(programs[0])


def rules() -> set[str]:
    """The switches of csrc/operators/rules.h."""
    text = (ROOT / "csrc" / "operators" / "rules.h").read_text(encoding="utf-8")
    found = set(re.findall(r"static constexpr bool (\w+) = true;", text))
    assert len(found) == text.count("static constexpr bool") > 0  # however they are written
    return found


def test_every_rule_has_a_mutant(program: Path) -> None:
    names = {mutant["name"] for mutant in chaos.run_driver(program, "--list")}
    assert rules() <= names
    assert {"weak_signals", "weak_signals_one_slot", "unordered_signals"} <= names


def test_random_schedules_pass_and_all_mutants_are_caught(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "chaos.json"
    status = chaos.main(["--schedules", str(SCHEDULES), "--seed", "5", "--json", str(found)])
    result = json.loads(found.read_text(encoding="utf-8"))
    assert result["failures"] == 0, result["first_failures"]
    wrong = [m["name"] for m in result["mutants"] if not m["passed"]]
    assert wrong == []
    assert status == 0
    assert result["schedules"] == SCHEDULES
    assert result["mutations_caught"] == result["mutations"] >= len(rules()) + 2
    assert f"{SCHEDULES} schedules, 0 failures" in capsys.readouterr().out


def test_halves_are_converted_as_rounding_says(program: Path) -> None:
    """All values, and what is between two neighbours; the number of wrong ones."""
    assert chaos.run_driver(program, "--conversions") == {"bf16": 0, "f16": 0}


def test_a_schedule_is_a_function_of_its_seed_and_number(program: Path) -> None:
    whole = chaos.run_batch(program, 9, 0, 60)
    parts = [chaos.run_batch(program, 9, 0, 25), chaos.run_batch(program, 9, 25, 35)]
    assert whole["turns"] == sum(part["turns"] for part in parts)
    assert chaos.run_batch(program, 10, 0, 60)["turns"] != whole["turns"]


def test_a_failure_is_found_again_by_its_number(
    program: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "acknowledge_after_forward"
    caught = chaos.try_mutant(program, {"name": name, "caught": True}, 3, 3000)
    assert caught["passed"]
    number = str(caught["schedules"] - 1)
    assert chaos.main(["--replay", number, "--seed", "3", "--mutant", name]) == 1
    assert caught["by"] in capfd.readouterr().out
    assert chaos.main(["--replay", number, "--seed", "3"]) == 0
    assert "all is well" in capfd.readouterr().out


def test_a_mutant_that_is_missed_makes_the_run_fail(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "MUTANT_SCHEDULES", 0)
    found = tmp_path / "chaos.json"
    assert chaos.main(["--schedules", "10", "--json", str(found), "--quiet"]) == 1
    assert json.loads(found.read_text(encoding="utf-8"))["mutations_caught"] == 0


def test_threads_do_not_race(programs: list[Path | RuntimeError]) -> None:
    result = chaos.run_threads(usable(programs[1]), 5, 1)
    assert result["failures"] == 0, result
    assert result["scenarios"] >= 3
