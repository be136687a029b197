"""Dead ranks and bad input: one clear line, a non-zero exit code, in bounded time."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from megamuon.data.indexed import IndexedDatasetBuilder
from tests.support.ranks import run_ranks_outcomes
from tests.support.training import ROOT, Recorded, flags, train, use_launcher_variables


def dies(rank: int, world: int, folder: Path) -> int:
    use_launcher_variables(rank, world)

    def kill(call: int, training: bool, losses: Tensor) -> Tensor:
        if rank == 1 and call == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses

    return train(flags(save=folder, save_interval=2), Recorded(kill))


def test_a_killed_rank_ends_the_others_with_one_line(tmp_path: Path) -> None:
    began = time.monotonic()
    outcomes = run_ranks_outcomes(dies, 3, tmp_path, grace=60.0)
    assert time.monotonic() - began < 60.0
    for rank in (0, 2):
        assert outcomes[rank].finished, outcomes[rank]
        assert outcomes[rank].value == 1  # pretrain's exit code
        said = [line for line in outcomes[rank].output.splitlines() if "lost contact" in line]
        assert len(said) == 1
        assert said[0].startswith(f"rank {rank} lost contact with the other ranks during ")
        assert "of iteration 3: " in said[0]
        assert "Traceback" not in outcomes[rank].output
    # Nothing is lost: the last checkpoint is whole and named.
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def launch(
    words: list[str],
    world: int,
    timeout: float = 90.0,
    script: Path = ROOT / "pretrain_gpt.py",
) -> list[tuple[int, str]]:
    """``script`` as real processes; exit codes and what they wrote, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world):
        variables = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        if world > 1:
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(script), *words],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    results = []
    for process in ranks:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        results.append((process.returncode, output))
    return results


# Trains as pretrain_gpt.py does; rank 1 raises an error without a text, with the pool open.
RAISES = """
import os, sys
sys.path.insert(0, {root!r})
import pretrain_gpt
from megamuon.runtime.pool import PoolConflictError
forward, calls = pretrain_gpt.forward_step, [0]
def raising(batches, model, **more):
    calls[0] += 1
    if os.environ["RANK"] == "1" and calls[0] == 4:
        raise PoolConflictError
    return forward(batches, model, **more)
pretrain_gpt.forward_step = raising
sys.exit(pretrain_gpt.main())
"""


def test_an_exception_on_one_rank_is_heard_by_the_others(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISES.format(root=str(ROOT)))
    (first, heard), (second, said) = launch(flags(eval_iters=0), 2, script=script)
    own = "rank 1 failed during forward of iteration 4: PoolConflictError: PoolConflictError"
    assert (first, second) == (1, 1)
    assert own in said.splitlines()
    (line,) = [line for line in heard.splitlines() if "lost contact" in line]
    assert line.startswith("rank 0 lost contact with the other ranks during ")
    assert line.endswith(f"({own})")


def write_corpus(prefix: Path, documents: list[list[int]]) -> str:
    builder = IndexedDatasetBuilder(str(prefix), dtype=np.uint16)
    for tokens in documents:
        builder.add_document(np.array(tokens, dtype=np.uint16), [len(tokens)])
    builder.finalize()
    return str(prefix)


def test_a_token_id_outside_the_vocabulary_on_real_processes(tmp_path: Path) -> None:
    documents = [[index % 250 for index in range(70)] for _ in range(20)]
    documents[3][5] = 300
    path = write_corpus(tmp_path / "corpus", documents)
    results = launch(flags(data_path=path, split="1,0,0", eval_iters=0, train_iters=30), 2)
    assert [code for code, _ in results] == [1, 1]
    text = "".join(output for _, output in results)
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "token id 300" in error
    assert str(tmp_path / "corpus") in error
    assert "Traceback" not in text
    assert "frame #" not in text


def one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run one rank in this process; the only line of standard error."""
    capsys.readouterr()
    assert train(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_bad_checkpoints_and_bad_data_give_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good"
    assert train(flags(train_iters=2, save=good, save_interval=2, eval_iters=0)) == 0
    resume = {"train_iters": 4, "eval_iters": 0}

    missing = flags(**resume, load=tmp_path / "none", exit_on_missing_checkpoint=True)
    assert "no checkpoint in --load" in one_line(missing, capsys)

    shape = one_line(flags(**resume, load=good, num_layers=2), capsys)
    assert "num_layers is 3 in the checkpoint and 2 here" in shape

    schedule = one_line(flags(**resume, load=good, min_lr=1e-3), capsys)
    assert "min_lr is 0.0 in the checkpoint and 0.001" in schedule

    flipped = tmp_path / "flipped"
    shutil.copytree(good, flipped)
    victim = max((flipped / "iter_0000002").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert victim.name in one_line(flags(**resume, load=flipped), capsys)

    victim.unlink()
    assert victim.name in one_line(flags(**resume, load=flipped), capsys)

    (flipped / "latest_checkpointed_iteration.txt").write_text("")
    assert "latest_checkpointed_iteration.txt" in one_line(flags(**resume, load=flipped), capsys)

    path = write_corpus(tmp_path / "corpus", [list(range(50))] * 4)
    (tmp_path / "corpus.idx").write_bytes(b"foreign")
    assert str(tmp_path / "corpus") in one_line(flags(data_path=path), capsys)

    empty = write_corpus(tmp_path / "empty", [])
    assert str(tmp_path / "empty") in one_line(flags(data_path=empty), capsys)


def test_bad_flags_exit_with_code_2_and_every_problem() -> None:
    words = flags(lr=None, save="x") + ["--trian-iters", "3"]
    ((code, text),) = launch(words, 1)
    assert code == 2
    lines = text.splitlines()
    assert len(lines) == 3
    assert any("--train-iters" in line and "--trian-iters" in line for line in lines)
