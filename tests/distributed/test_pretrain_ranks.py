"""Whole runs on two ranks: the same losses as one rank, and agreement about bad steps."""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.training.datasets import _compare
from megamuon.training.failures import TrainingError
from tests.support.ranks import run_ranks
from tests.support.training import LOG_LINE, Recorded, flags, train, use_launcher_variables

SHARED = {"fp64": True, "global_batch_size": 8, "eval_interval": 2, "train_iters": 4}


def captured(words: list[str], step: Recorded) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = train(words, step)
    return code, output.getvalue()


def scenarios(rank: int, world: int, folder: Path) -> dict[str, Any]:
    use_launcher_variables(rank, world)

    def bad_on_rank_1(call: int, training: bool, losses: Tensor) -> Tensor:
        return losses * math.nan if training and call == 3 and rank == 1 else losses

    step = Recorded()
    found: dict[str, Any] = {"plain": captured(flags(**SHARED), step), "losses": step.losses}
    found["adam"] = captured(
        flags(**SHARED, optimizer="adam", param_layout="even", zero_stage=2), Recorded()
    )
    found["bad"] = captured(flags(**SHARED), Recorded(bad_on_rank_1))
    try:
        _compare("indices", "same" if rank == 0 else "other")
    except TrainingError as error:
        found["difference"] = str(error)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(scenarios, 2, tmp_path_factory.mktemp("ranks"))


def losses_of(text: str) -> list[float]:
    return [float(line["loss"]) for line in LOG_LINE.finditer(text)]


def test_two_ranks_train_as_one(
    results: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [result["plain"][0] for result in results] == [0, 0]
    alone = Recorded()
    assert train(flags(**SHARED), alone) == 0
    text = capsys.readouterr().out
    assert losses_of(results[1]["plain"][1]) == pytest.approx(losses_of(text), rel=1e-6)
    # Micro-batches are dealt in turns: rank r has every second one.
    mixed = [loss for pair in zip(*(r["losses"] for r in results), strict=True) for loss in pair]
    torch.testing.assert_close(
        torch.tensor(mixed, dtype=torch.float64),
        torch.tensor(alone.losses, dtype=torch.float64),
        rtol=1e-9,
        atol=0.0,
    )
    blocks = [line for line in text.splitlines() if "validation loss at" in line]
    other = [line for line in results[1]["plain"][1].splitlines() if "validation loss at" in line]
    assert blocks == other
    assert len(blocks) == 4


def test_first_and_last_rank_share_the_output(results: list[dict[str, Any]]) -> None:
    first, last = results[0]["plain"][1], results[1]["plain"][1]
    assert "routing of parameters:" in first
    assert "end of arguments" in first
    assert not LOG_LINE.search(first)
    assert "routing of parameters:" not in last
    assert "validation loss at iteration 2 |" in last


def test_adam_on_even_slices_runs(results: list[dict[str, Any]]) -> None:
    code, text = results[1]["adam"]
    assert code == 0
    losses = losses_of(text)
    assert losses[-1] < losses[0]
    assert "optimizer adam | parameters by route: " in results[0]["adam"][1]


def test_a_bad_loss_on_one_rank_skips_the_step_on_all(results: list[dict[str, Any]]) -> None:
    code, text = results[1]["bad"]
    assert code == 0
    assert "iteration 2 skipped: loss is not finite on 1 of 2 ranks (lm loss nan; all wei" in text
    assert [line["skipped"] for line in LOG_LINE.finditer(text)] == ["0", "1", "0", "0"]


def test_other_index_contents_are_an_error_that_names_ranks(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert "indices: ranks [1] have other contents than rank 0" in result["difference"]
