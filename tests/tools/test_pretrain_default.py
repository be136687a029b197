"""The default job in small: two launches, a resume, a sample; then RESUME=1."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "pretrain_default.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_default", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def call(folder: Path, *words: str, **variables: str) -> str:
    command = [sys.executable, str(SCRIPT), "--runs", str(folder / "runs"), *words]
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_train_resume_sample(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("--model", "nano", "--steps", "6", "--files", "100")
    variables = {"ARGS": "--seq-length 32 --eval-iters 1 --ns-cost closed-form", "RESUME": ""}
    text = call(tmp_path, *small, "--json", str(tmp_path / "figures.json"), **variables)
    assert text.count("pretrain_gpt.py --model nano") == 2
    assert "exiting program at iteration 5" in text
    assert "successfully loaded checkpoint from" in text
    assert "def read_lines(path):" in text
    figures = json.loads((tmp_path / "figures.json").read_text())
    run = Path(figures["run"])
    assert figures["validation_loss"] < 6
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "6"
    # RESUME=1: the same folder, and a longer run because this one was complete.
    commands: list[str] = []
    monkeypatch.setattr(script, "run", lambda words, _: commands.append(" ".join(words)))
    settings = script.Settings(steps=6, first_launch=4, runs=tmp_path / "runs", files=100)
    assert script.job(settings, resume=True) == run
    assert len(commands) == 2
    assert f"--load {run / 'checkpoints'} --exit-on-missing-checkpoint" in commands[0]
    assert f"--train-iters {6 + script.EXTENSION} " in commands[0]
    assert "--override-opt_param-scheduler" in commands[0]
    # An interrupted run goes on to its planned end.
    tracker.write_text("3")
    assert script.job(settings, resume=True) == run
    assert "--train-iters 6 " in commands[2]
    assert "--override-opt_param-scheduler" not in commands[2]


def test_sources_are_shuffled_in_a_fixed_order(script: ModuleType) -> None:
    files = script.source_files(20)
    assert files == script.source_files(20)
    assert files != sorted(files)
    assert all(file.endswith(".py") and "site-packages" not in file for file in files)


def test_resume_without_a_run_says_so(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no run in"):
        script.newest_run(tmp_path)


def test_runs_of_one_second_get_folders_of_their_own(script: ModuleType, tmp_path: Path) -> None:
    assert len({script.new_run(tmp_path) for _ in range(3)}) == 3


def test_gpus_get_bf16_and_all_ranks(script: ModuleType, tmp_path: Path) -> None:
    machine = script.Machine(ranks=8, gpu=True)
    words = script.training_flags(tmp_path, "data", machine, script.Settings())
    assert "--bf16" in words
    assert words[words.index("--global-batch-size") + 1] == "16"
    assert words[words.index("--micro-batch-size") + 1] == "2"
    command = script.train_command(machine, words)
    assert command[command.index("--nproc-per-node") + 1] == "8"
