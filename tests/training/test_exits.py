"""Reasons for leaving, their order, and the handler that comes back."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from megamuon.arguments import parse_config
from megamuon.mesh import Mesh
from megamuon.models import PRESETS
from megamuon.training import exits
from megamuon.training.exits import ExitWatch, Pacer, Requests
from tests.support.training import flags

ALONE = Mesh(
    world_size=1,
    rank=0,
    local_rank=0,
    replicas=1,
    shards=1,
    device=torch.device("cpu"),
    backend="gloo",
)


def watch(started: float | None = None, **changes: object) -> ExitWatch:
    config = parse_config(flags(**changes), presets=PRESETS, world_size=1).config
    return ExitWatch(config, started=started)


def test_the_handler_is_armed_and_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    watched = watch(exit_signal_handler=True, exit_signal="SIGUSR1")
    with watched.armed():
        assert not watched.poll(ALONE).signal
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watched.poll(ALONE).signal
    assert signal.getsignal(signal.SIGUSR1) is before


def test_without_the_flag_no_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with watch().armed():
        assert signal.getsignal(signal.SIGTERM) is before


def test_order_of_reasons() -> None:
    watched = watch(exit_signal_handler=True, exit_duration_in_mins=1, exit_interval=3)
    both = Requests(signal=True, expired=True)
    assert watched.reason(both, 3, minutes=1.0) == "exiting program after receiving SIGTERM."
    late = Requests(expired=True)
    assert watched.reason(late, 3, minutes=1.5) == "exiting program after 1.50 minutes"
    assert watched.reason(Requests(), 3, minutes=0.0) == "exiting program at iteration 3"
    assert watched.reason(Requests(), 4, minutes=0.0) is None


def test_duration() -> None:
    assert not watch(exit_duration_in_mins=1).poll(ALONE).expired
    assert watch(time.monotonic() - 61.0, exit_duration_in_mins=1).poll(ALONE).expired


def test_ranks_ask_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, done = [0.0], [], 0
    monkeypatch.setattr(exits.time, "monotonic", lambda: clock[0])
    watched = watch(exit_signal_handler=True)
    pacer, poll = Pacer(watched, ALONE, limit=50), watched.poll_with

    def counted(mesh: Mesh, number: float) -> tuple[Requests, float]:
        asked.append(done)
        return poll(mesh, number)

    monkeypatch.setattr(watched, "poll_with", counted)
    for seconds in [0.125] * 20 + [4.0] * 7:  # micro-batches become slow
        clock[0] += seconds
        done += 1
        assert not pacer.between().any
    assert asked == [1, 9, 17, 25, 26, 27]
    watched._received = True
    assert pacer.between().signal


def test_no_more_than_a_step_passes_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits.time, "monotonic", lambda: 0.0)
    pacer = Pacer(watch(exit_signal_handler=True), ALONE, limit=50)
    pacer.between()
    assert pacer.every == 50


def test_without_a_flag_nobody_asks() -> None:
    watched = watch()
    watched._received = True
    pacer = Pacer(watched, ALONE, limit=4)
    assert not any(pacer.between().any for _ in range(9))
