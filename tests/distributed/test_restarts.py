"""``torchrun --max-restarts``: a rank is killed, and the ranks that are started again go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.training import (
    ROOT,
    flags,
    same_bits,
    stored_tensors,
    train,
    use_launcher_variables,
)

SCRIPT = f"""
import os, signal, sys

sys.path.insert(0, {str(ROOT)!r})
import pretrain_gpt
from megamuon.training.train_step import Stepper
from tests.support.training import reuse_indices

usual, first = Stepper.__call__, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def killed(self, *args, **kwargs):
    killed.steps += 1
    if first and os.environ["RANK"] == "1" and killed.steps == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return usual(self, *args, **kwargs)

killed.steps = 0
Stepper.__call__ = killed
sys.exit(pretrain_gpt.main())
"""


def whole(rank: int, world: int, words: list[str]) -> int:
    use_launcher_variables(rank, world)
    return train(words)


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_the_run_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    run = {"train_iters": 6, "save_interval": 2, "eval_iters": 0}
    assert run_ranks(whole, 2, flags(**run, save=tmp_path / "whole")) == [0, 0]
    script = tmp_path / "killed.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = flags(**run, save=tmp_path / "cut", load=tmp_path / "cut")
    done = subprocess.run(
        [sys.executable, *launcher, "--max-restarts", "2", str(script), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "exitcode: -9" in done.stderr
    assert "at iteration 2" in done.stdout  # where it went on
    assert not same_bits(stored_tensors(tmp_path / "whole", 6), stored_tensors(tmp_path / "cut", 6))
