"""Reasons for leaving, their order, and the handler that comes back."""

from __future__ import annotations

import os
import signal
import time

import torch

from megamuon.arguments import parse_config
from megamuon.mesh import Mesh
from megamuon.models import PRESETS
from megamuon.training.exits import ExitWatch, Requests
from tests.support.training import flags

ALONE = Mesh(
    world_size=1,
    rank=0,
    local_rank=0,
    rows=1,
    columns=1,
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
    clock = [0.0]
    monkeypatch.setattr(exits.time, "monotonic", lambda: clock[0])
    config = parse_config(flags(exit_signal_handler=True), presets=PRESETS, world_size=1).config
    watch = ExitWatch(config)
    asked: list[int] = []
    poll = watch.poll_with
    monkeypatch.setattr(watch, "poll_with", lambda *a: (asked.append(len(waits)), poll(*a))[1])
    pacer = Pacer(watch, mesh(), limit=50)
    waits: list[float] = []
    for seconds in [0.1] * 25 + [3.0] * 4:  # micro-batches become slow
        clock[0] += seconds
        waits.append(seconds)
        assert not pacer.between().any
    # The first, then every ten; one late, since the pace was another; then every one.
    assert asked == [1, 11, 21, 31][:3] + [len(waits)] * 0 + asked[3:]
    assert pacer.every in (1, 2, 10)
    watch._received = True
    for _ in range(10):
        found = pacer.between()
        if found.any:
            break
    assert found.signal


def test_without_a_flag_nobody_asks() -> None:
    config = parse_config(flags(), presets=PRESETS, world_size=1).config
    pacer = Pacer(ExitWatch(config), mesh(), limit=4)
    pacer.watch._received = True
    assert not any(pacer.between().any for _ in range(9))
