"""Timers: levels, misuse, and the summary across ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megamuon.metrics.timers import Timers, slowest, timer_summary


def ticking(step: float = 1.0) -> Callable[[], float]:
    """A clock that advances by ``step`` seconds at every reading."""
    now = [0.0]

    def read() -> float:
        now[0] += step
        return now[0]

    return read


RANKS = [{"optimizer": 10.0, "forward-backward": 1.0}, {"optimizer": 30.25}]


def test_levels_above_the_chosen_one_do_not_exist() -> None:
    timers = Timers(1, clock=ticking())
    with timers.time("step"), timers.time("optimizer", 1), timers.time("batch-generator", 2):
        pass
    assert timers.elapsed() == {"step": 3000.0, "optimizer": 1000.0}


def test_elapsed_divides_and_resets() -> None:
    timers = Timers(0, clock=ticking(0.5))
    for _ in range(4):
        with timers.time("step"):
            pass
    assert timers.elapsed(4, reset=False) == {"step": 500.0}
    assert timers.elapsed(4) == {"step": 500.0}
    assert timers.elapsed(4) == {}


def test_a_running_timer_counts_up_to_now_and_goes_on() -> None:
    timers = Timers(0, clock=ticking())
    timers.start("step")
    assert timers.elapsed() == {"step": 1000.0}
    timers.stop("step")
    assert timers.elapsed() == {"step": 1000.0}


def test_a_block_that_raises_stops_its_timer() -> None:
    timers = Timers(0, clock=ticking())
    with pytest.raises(ZeroDivisionError), timers.time("step"):
        raise ZeroDivisionError
    timers.start("step")


def test_the_device_is_waited_for() -> None:
    waits: list[None] = []
    timers = Timers(1, clock=ticking(), synchronize=lambda: waits.append(None))
    with timers.time("step"), timers.time("fine", 2):
        pass
    assert len(waits) == 2  # the fine timer is off, so it waits for nothing


def test_misuse_is_an_error() -> None:
    timers = Timers(1, clock=ticking())
    with pytest.raises(RuntimeError, match="'step' was stopped without being started"):
        timers.stop("step")
    timers.start("step")
    with pytest.raises(RuntimeError, match="'step' was started twice"):
        timers.start("step")
    with pytest.raises(RuntimeError, match="level 0 and was started with level 1"):
        timers.start("step", 1)
    with pytest.raises(ValueError, match="--timing-log-option is 'mean'"):
        Timers(option="mean")
    with pytest.raises(ValueError, match="--timing-log-level is 3"):
        Timers(3)


def test_minmax_text() -> None:
    assert timer_summary(RANKS, "minmax") == (
        "(min, max) time across ranks (ms):\n"
        "    optimizer ......................................: (10.00, 30.25)\n"
        "    forward-backward ...............................: (1.00, 1.00)"
    )
    name = timer_summary(RANKS, "minmax").split("\n")[1].split(":")[0]
    assert len(name) == 4 + 48


def test_max_and_all_text() -> None:
    lines = timer_summary(RANKS, "max").split("\n")
    assert lines[0] == "max time across ranks (ms):"
    assert lines[1].endswith("....: 30.25")
    assert timer_summary(RANKS, "all") == (
        "times across ranks (ms):\n"
        "  optimizer:\n     rank  0: 10.00\n     rank  1: 30.25\n"
        "  forward-backward:\n     rank  0: 1.00"
    )


def test_times_are_reset_when_they_are_taken_and_the_slowest_rank_counts() -> None:
    timers = Timers(0, "max", clock=ticking())
    with timers.time("step"):
        pass
    text = timer_summary([timers.elapsed(), {"step": 7000.0}], timers.option)
    assert text.endswith(": 7000.00")
    assert timer_summary([timers.elapsed(), {}], timers.option) == ""
    assert slowest(RANKS) == {"optimizer": 30.25, "forward-backward": 1.0}
