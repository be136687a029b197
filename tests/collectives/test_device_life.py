"""What the device library asks of CUDA and NCCL, and when: csrc/tests/device_life.cpp.

It runs the library's own host code over recorded calls, for each version of NCCL that the code
tells apart; mutants show that it notices.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-std=c++17", "-O0", "-pthread", "-Wall", "-Werror", "-Wno-unknown-pragmas")
VERSIONS = (22809, 22907, 23203)  # without the order of windows, with it, with GIN


def command(tree: Path, version: int, *more: str) -> list[str]:
    csrc = tree / "csrc"
    include = [f"-I{csrc / 'tests' / 'recorded_gpu'}", f"-I{csrc}", f"-DRECORDED_NCCL={version}"]
    return ["g++", *FLAGS, *include, str(csrc / "tests" / "device_life.cpp"), *more]


def run(tree: Path, version: int, program: Path) -> subprocess.CompletedProcess[str]:
    subprocess.run(command(tree, version, "-o", str(program)), check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_library_lives_as_it_should(version: int, tmp_path: Path) -> None:
    done = run(ROOT, version, tmp_path / "life")
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip() == "all as it should be"
    assert "kernels of the device operators do not end" in done.stderr


def test_a_version_with_gin_and_without_ordered_windows_does_not_compile() -> None:
    wanted = command(ROOT, 23203, "-DRECORDED_WITHOUT_ORDER", "-E", "-o", "/dev/null")
    done = subprocess.run(wanted, capture_output=True, text=True)
    assert done.returncode != 0
    assert "raises could overtake their data" in done.stderr


def sources() -> dict[str, str]:
    """Device code without comments, by file."""
    paths = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cuh", ".cu"}]
    return {
        p.name: re.sub(r"//.*", "", p.read_text(encoding="utf-8"))
        for p in paths
        if "tests" not in p.parts
    }


def test_every_window_whose_words_are_raised_is_registered_for_signals() -> None:
    """GIN raises words of one window, the control window; all windows are made in one place."""
    files = sources()
    text = "\n".join(files.values())
    assert text.count("ncclCommWindowRegister(") == 1
    made = re.findall(r"register_window\(\"(\w+)\", [^;]*?, (k\w+), &(\w+)\)", text)
    assert sorted(made) == [
        ("control", "kSignalWindow", "control_window_"),
        ("pool", "kDataWindow", "pool_window_"),
    ]
    raised = re.findall(r"GinRaise\{([\w.]+),", text)
    assert raised and set(raised) == {"memory_.controls"}
    assert "return {pool_window_, control_window_," in files["device_fabric.cuh"]  # to .controls


# What must not hold, in which file, in place of what.
MUTANTS = {
    "the control window has no order": (
        "device/device_fabric.cuh",
        "control_, kSignalWindow,",
        "control_, kDataWindow,",
    ),
    "zeros on the legacy stream": (
        "device/cuda_support.h",
        "cudaMemsetAsync(data, 0, bytes, stream_)",
        "cudaMemsetAsync(data, 0, bytes, nullptr)",
    ),
    "a round begins before its tasks": (
        "device/device_operators.cuh",
        "    require_handed_over(order, count);\n",
        "",
    ),
    "memory is freed under a kernel": (
        "device/device_fabric.cuh",
        "if (!ended_) return false;",
        "",
    ),
    "the device is synchronised before the abort": (
        "device/device_fabric.cuh",
        "      alarm_.request_abort();\n",
        "      alarm_.request_abort();\n      cudaDeviceSynchronize();\n",
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
    done = run(tmp_path, 23203, tmp_path / "mutant")
    assert done.returncode == 1, f"not found: {mutant}"
    assert "NOT SO" in done.stdout
