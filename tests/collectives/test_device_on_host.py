"""The GPU's kernels on a CPU: csrc/tests/device_on_host.cpp, with its mutants."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c++17", "-O1", "-pthread", "-Wall", "-Werror", "-Wno-unknown-pragmas"]


def build(tree: Path, program: Path) -> Path:
    source = tree / "csrc" / "tests" / "device_on_host.cpp"
    command = ["g++", *FLAGS, f"-I{tree / 'csrc'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(program: Path, cases: int, seed: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(cases), str(seed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("device") / "device_on_host")


def test_the_kernels_do_what_the_oracles_say(program: Path) -> None:
    done = run(program, 150, 11)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip() == "150 cases: all as the oracles say"


# What must not hold, in which file, in place of what.
MUTANTS = {
    "the first group to finish leaves for all": (
        "operators/kernels.cuh",
        "expected + u64(groups)) return;",
        "expected + 1) return;",
    ),
    "a pipeline takes its neighbour's chunks": (
        "operators/kernels.cuh",
        "table.star ? 0 : pipeline)",
        "table.star ? 0 : pipeline > 1 ? 1 : pipeline)",
    ),
    "a chain adds without rounding": (
        "fabric/device_arithmetic.cuh",
        "t[i] = round_to(sum.wire, t[i] + next[i]);",
        "t[i] = t[i] + next[i];",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, tmp_path: Path) -> None:
    name, sound, broken = MUTANTS[mutant]
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    path = tmp_path / "csrc" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(sound) == 1, f"{name} has changed: mend the mutant"
    path.write_text(text.replace(sound, broken), encoding="utf-8")
    done = run(build(tmp_path, tmp_path / "mutant"), 600, 3)
    assert done.returncode == 1, f"not found: {mutant}"
