"""A run whose ranks are killed while they save, again and again, ends as if nothing had happened.

The ranks are real processes that save after every step, so most instants are inside a save.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.corpora import random_documents, write_corpus
from tests.support.training import LOG_LINE, ROOT, flags, same_bits, stored_tensors

SECONDS = 90.0


def start(words: list[str], log: Path, world: int) -> list[subprocess.Popen[bytes]]:
    """``world`` ranks; all write to ``log``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("ab") as file:
        return [
            subprocess.Popen(
                [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=file,
                stderr=file,
            )
            for rank in range(world)
        ]


def saved_iteration(folder: Path) -> int:
    try:
        return int((folder / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


def kill_after_next_save(ranks: list[subprocess.Popen[bytes]], folder: Path, delay: float) -> None:
    before, end = saved_iteration(folder), time.monotonic() + SECONDS
    while saved_iteration(folder) == before:
        assert all(rank.poll() is None for rank in ranks) and time.monotonic() < end
        time.sleep(0.001)
    time.sleep(delay)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        assert rank.wait() == -signal.SIGKILL  # not done yet


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "grid", "steps", "kills"),
    [(2, {}, 24, 5), (4, {"sharding": "hsdp", "shard_size": 2}, 12, 2)],
    ids=["fsdp", "hsdp"],
)
def test_the_curve_is_that_of_a_run_that_nobody_killed(
    world: int, grid: dict[str, object], steps: int, kills: int, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus", random_documents(60, seed=1))
    common = {"data_path": corpus, "split": "1,0,0", "eval_iters": 0, "train_iters": steps}
    common |= grid
    common |= {"lr_decay_style": "cosine", "hidden_dropout": 0.1}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = flags(**common, save=whole, save_interval=steps)
    undisturbed = start(words, tmp_path / "whole.log", world)
    assert [rank.wait(SECONDS) for rank in undisturbed] == [0] * world
    words = flags(**common, save=cut, load=cut, save_interval=1, save_retain_interval=8)
    draw, log = random.Random(5), tmp_path / "cut.log"
    for _ in range(kills):
        kill_after_next_save(start(words, log, world), cut, draw.uniform(0.0, 0.15))
    assert 0 < saved_iteration(cut) < steps
    assert [rank.wait(SECONDS) for rank in start(words, log, world)] == [0] * world
    assert "Traceback" not in log.read_text()
    expected = {m["iteration"]: m["loss"] for m in LOG_LINE.finditer(read(tmp_path / "whole.log"))}
    seen = [(match["iteration"], match["loss"]) for match in LOG_LINE.finditer(read(log))]
    assert len(expected) == steps and {iteration for iteration, _ in seen} == set(expected)
    assert all(expected[iteration] == loss for iteration, loss in seen)
    assert same_bits(stored_tensors(whole, steps), stored_tensors(cut, steps)) == []


def read(log: Path) -> str:
    return log.read_text(encoding="utf-8")
