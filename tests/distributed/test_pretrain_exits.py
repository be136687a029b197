"""A signal on one rank ends all ranks at the same step, in training and in evaluation."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megamuon.training import exits
from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Recorded, flags, train, use_launcher_variables


def scenarios(rank: int, world: int, folder: Path) -> dict[str, Any]:
    use_launcher_variables(rank, world)
    exits.POLL_SECONDS = 0.0  # after every micro-batch
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
    ("name", "saved", "training_calls"), [("training", "1", 3), ("evaluation", "3", 6)]
)
def test_all_ranks_leave_together(
    name: str, saved: str, training_calls: int, results: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, found = results
    assert [result[name][0] for result in found] == [0, 0]
    assert "exiting program after receiving SIGUSR1." in found[1][name][1]
    assert (folder / name / "latest_checkpointed_iteration.txt").read_text() == saved
    assert [result[name][2][True] for result in found] == [training_calls] * 2
    # A batch is two micro-batches: both ranks left within one.
    evaluations = [result[name][2][False] for result in found]
    assert evaluations == ([0, 0] if name == "training" else [3, 3])


# A script that trains as pretrain_gpt.py does, with slow micro-batches and a mark at the third.
SLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import pretrain_gpt
forward, calls = pretrain_gpt.forward_step, [0]
def slow(batches, model, **more):
    calls[0] += 1
    if calls[0] == 3:
        Path({mark!r}).touch()
    time.sleep(1.0)
    return forward(batches, model, **more)
pretrain_gpt.forward_step = slow
sys.exit(pretrain_gpt.main())
"""


@pytest.mark.parametrize(
    ("number", "handled"), [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGINT, False)]
)
def test_a_signal_to_the_launcher_in_a_long_accumulation(
    number: signal.Signals, handled: bool, tmp_path: Path
) -> None:
    """A step of 120 micro-batches, two minutes: torchrun kills its ranks after 30 s."""
    script, mark, log = tmp_path / "slow.py", tmp_path / "mark", tmp_path / "log"
    script.write_text(SLOW.format(root=str(ROOT), mark=str(mark)))
    words = flags(eval_iters=0, save=tmp_path / "run", save_interval=1, global_batch_size=480)
    if handled:
        words += ["--exit-signal-handler", "--exit-signal", number.name]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(script), *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
    try:
        end = time.monotonic() + 120.0
        while not mark.exists():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(60.0)
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    if handled:
        assert "iteration 1 was cut short and dropped" in text
        assert f"exiting program after receiving {number.name}." in text
    assert "lost contact" not in text and " failed during " not in text
