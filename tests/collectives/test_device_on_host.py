"""The GPU's kernels on a CPU: csrc/tests/device_on_host.cpp, with its mutants.

Once with the workers of a block in turn, many cases; once with workers that are threads, under
ThreadSanitizer, which is skipped, with the reason, where it does not link.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDARD = ["-std=c++17", "-O1", "-pthread"]
FLAGS = [*STANDARD, "-Wall", "-Werror", "-Wno-unknown-pragmas"]
# Warnings off: with a sanitizer, g++ takes loads that a dtype leaves out for uninitialized.
THREADS = [*STANDARD, "-g1", "-w", "-fsanitize=thread", "-DMEGAMUON_HOST_WORKERS=3"]
RACE = 66


def build(tree: Path, program: Path, flags: list[str] = FLAGS) -> Path:
    source = tree / "csrc" / "tests" / "device_on_host.cpp"
    command = ["g++", *flags, f"-I{tree / 'csrc'}", str(source), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode and flags is THREADS and "tsan" in made.stderr:
        pytest.skip(f"ThreadSanitizer does not link here: {made.stderr.strip()[-200:]}")
    assert made.returncode == 0, made.stderr
    return program


def run(program: Path, cases: int, seed: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(cases), str(seed)]
    options = {**os.environ, "TSAN_OPTIONS": f"halt_on_error=1:exitcode={RACE}"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=options)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("device") / "device_on_host")


def test_the_kernels_do_what_the_oracles_say(program: Path) -> None:
    done = run(program, 150, 11)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip() == "150 cases: all as the oracles say"


def test_workers_that_are_threads_do_not_race(tmp_path: Path) -> None:
    done = run(build(ROOT, tmp_path / "threads", THREADS), 10, 3)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert done.stdout.strip() == "10 cases: all as the oracles say"


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
    "a column of the eight is read too late": (
        "fabric/device_arithmetic.cuh",
        "load_raw<Acc>(raw[k], slot(k0 + k) + at, sum.slot);",
        "load_raw<Acc>(raw[k], slot(k0) + at, sum.slot);",
    ),
    "the row hears of an entry but for its last column": (
        "fabric/direct.cuh",
        "for (int k = 0; k < place_.columns; ++k) {\n      store_word(",
        "for (int k = 0; k + 1 < place_.columns; ++k) {\n      store_word(",
    ),
}

# Those that only workers which are threads show; they are few, so that a chunk is several batches.
THREAD_MUTANTS = {
    "the last bytes of a batch are left out": (
        1,
        "fabric/device_arithmetic.cuh",
        "if (at + i * step < bytes) one(",
        "if (i + 1 < kInFlight && at + i * step < bytes) one(",
    ),
    "the leader does not wait for the workers": (
        RACE,
        "fabric/device_group.cuh",
        "  barrier_meet(&barrier_memory);\n  barrier_meet(&barrier_memory);\n}",
        "  barrier_meet(&barrier_memory);\n}",
        "      work(order(), int(threadIdx.x) - 32);\n      barrier_meet(&barrier_memory);\n",
        "      work(order(), int(threadIdx.x) - 32);\n",
    ),
}


def mutated(tree: Path, name: str, *changes: str) -> Path:
    """The sources in ``tree``, with (sound, broken) pairs in one file."""
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    path = tree / "csrc" / name
    text = path.read_text(encoding="utf-8")
    for sound, broken in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(sound) == 1, f"{name} has changed: mend the mutant"
        text = text.replace(sound, broken)
    path.write_text(text, encoding="utf-8")
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, tmp_path: Path) -> None:
    done = run(build(mutated(tmp_path, *MUTANTS[mutant]), tmp_path / "mutant"), 600, 3)
    assert done.returncode == 1, f"not found: {mutant}"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", THREAD_MUTANTS)
def test_a_mutant_of_the_workers_is_found(mutant: str, tmp_path: Path) -> None:
    status, *changes = THREAD_MUTANTS[mutant]
    program = build(mutated(tmp_path, *changes), tmp_path / "mutant", THREADS)
    assert run(program, 10, 3).returncode == status, f"not found: {mutant}"
