"""A signal on one rank ends all ranks at the same step, in training and in evaluation."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.training import Recorded, flags, train, use_launcher_variables


def scenarios(rank: int, world: int, folder: Path) -> dict[str, Any]:
    use_launcher_variables(rank, world)
    found: dict[str, Any] = {}
    for name, where in (("training", True), ("evaluation", False)):

        def interrupt(call: int, training: bool, losses: Tensor, where: bool = where) -> Tensor:
            if rank == 0 and training is where and call == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            return losses

        step = Recorded(interrupt)
        words = flags(
            global_batch_size=8,
            eval_interval=3,
            eval_iters=4,
            exit_signal_handler=True,
            exit_signal="SIGUSR1",
            save=folder / name,
            save_interval=100,
        )
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = train(words, step)
        found[name] = (code, output.getvalue(), step.calls)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("exits")
    return folder, run_ranks(scenarios, 2, folder)


@pytest.mark.parametrize(
    ("name", "saved", "training_calls"), [("training", "2", 4), ("evaluation", "3", 6)]
)
def test_all_ranks_leave_together(
    name: str, saved: str, training_calls: int, results: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, found = results
    assert [result[name][0] for result in found] == [0, 0]
    assert "exiting program after receiving SIGUSR1." in found[1][name][1]
    assert (folder / name / "latest_checkpointed_iteration.txt").read_text() == saved
    assert [result[name][2][True] for result in found] == [training_calls] * 2
    evaluations = [result[name][2][False] for result in found]
    assert evaluations[0] == evaluations[1] < 8
