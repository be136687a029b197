"""Named timers with levels, summarised across ranks.

Owns when a timer runs and how ranks are summarised. Invariant: a timer above the chosen level costs
nothing and appears nowhere; how the times of the ranks travel is the caller's affair, so nothing
here knows of process groups. The text is Megatron-LM's
(``--timing-log-level``, ``--timing-log-option``). Tested by ``tests/metrics/test_timers.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

OPTIONS = ("max", "minmax", "all")
NAME_WIDTH = 48


@dataclass
class _Timer:
    level: int
    started: float | None = None
    seconds: float = 0.0


class Timers:
    """Levels: 0 the step only, 1 coarse, 2 fine. ``synchronize`` waits for the device (CUDA), or is
    None.
    """

    def __init__(
        self,
        level: int = 0,
        option: str = "minmax",
        *,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if level not in (0, 1, 2):
            raise ValueError(f"--timing-log-level is {level}: choose 0, 1 or 2")
        if option not in OPTIONS:
            raise ValueError(
                f"--timing-log-option is {option!r}: choose one of {', '.join(OPTIONS)}"
            )
        self.level = level
        self.option = option
        self._synchronize = synchronize
        self._clock = clock
        self._timers: dict[str, _Timer] = {}

    def start(self, name: str, level: int = 0) -> None:
        """Start ``name``; a RuntimeError if it runs already or was first used at another level."""
        if level > self.level:
            return
        timer = self._timers.setdefault(name, _Timer(level))
        if timer.level != level:
            raise RuntimeError(
                f"timer {name!r} has level {timer.level} and was started with level {level}"
            )
        if timer.started is not None:
            raise RuntimeError(f"timer {name!r} was started twice")
        timer.started = self._now()

    def stop(self, name: str, level: int = 0) -> None:
        """Stop ``name`` and add the time since its start; a RuntimeError if it does not run."""
        if level > self.level:
            return
        timer = self._timers.get(name)
        if timer is None or timer.started is None:
            raise RuntimeError(f"timer {name!r} was stopped without being started")
        timer.seconds += self._now() - timer.started
        timer.started = None

    @contextmanager
    def time(self, name: str, level: int = 0) -> Iterator[None]:
        """Time a block; a block that raises leaves the timer stopped."""
        self.start(name, level)
        try:
            yield
        finally:
            self.stop(name, level)

    def elapsed(self, iterations: int = 1, *, reset: bool = True) -> dict[str, float]:
        """Milliseconds per iteration of every timer that ran since the last reset.

        A running timer counts up to now and goes on.
        """
        times: dict[str, float] = {}
        for name, timer in self._timers.items():
            if timer.started is not None:
                now = self._now()
                timer.seconds += now - timer.started
                timer.started = now
            if timer.seconds > 0:
                times[name] = 1000.0 * timer.seconds / max(1, iterations)
            if reset:
                timer.seconds = 0.0
        return times

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()


def slowest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each timer's maximum over the ranks that ran it (the ``<timer>-time`` scalars)."""
    return {name: max(times) for name, times in _by_name(ranks).items()}


def timer_summary(ranks: Sequence[Mapping[str, float]], option: str) -> str:
    """Text of the ranks' times in ms; names are padded with dots. Ranks that did not run a timer
    are left out of it.
    """
    names = _by_name(ranks)
    if not names:
        return ""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name in names:
            lines.append(f"  {name}:")
            lines += [
                f"     rank {rank:2d}: {times[name]:.2f}"
                for rank, times in enumerate(ranks)
                if name in times
            ]
        return "\n".join(lines)
    head = "max" if option == "max" else "(min, max)"
    lines = [f"{head} time across ranks (ms):"]
    for name, times in names.items():
        value = f"{max(times):.2f}" if option == "max" else f"({min(times):.2f}, {max(times):.2f})"
        lines.append(f"    {(name + ' ').ljust(NAME_WIDTH, '.')}: {value}")
    return "\n".join(lines)


def _by_name(ranks: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names: dict[str, list[float]] = {}
    for times in ranks:
        for name, value in times.items():
            names.setdefault(name, []).append(value)
    return names
