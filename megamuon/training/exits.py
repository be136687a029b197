"""Planned ends of a run: signals, duration and interval.

Owns the signal handler, when ranks ask each other about it, and the order of reasons at a step
boundary (Megatron-LM's): signal, duration, interval. Invariants: ranks decide from the same reduced
flags, never from their own clock or signal, and ask at the same places; the handler that was there
before comes back when training ends.  Tested by
``tests/training/test_exits.py`` and ``tests/distributed/test_pretrain_exits.py``.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from megamuon.arguments import Config
from megamuon.mesh import Mesh

POLL_SECONDS = 1.0  # a launcher's patience after a signal is 30 s, and the save needs its part


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What any rank asks for; equal on all ranks."""

    signal: bool = False
    expired: bool = False

    @property
    def any(self) -> bool:
        """Whether training has to stop at the next boundary."""
        return self.signal or self.expired


class ExitWatch:
    """Remembers a signal and the time since ``started`` (``time.monotonic``)."""

    def __init__(self, config: Config, *, started: float | None = None) -> None:
        self.signal_name = config.fault.exit_signal if config.fault.exit_signal_handler else None
        self.minutes = config.training.exit_duration_in_mins
        self.interval = config.training.exit_interval
        self.started = time.monotonic() if started is None else started
        self._received = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Catch the signal inside the block; outside the main thread there is nothing to catch."""
        if self.signal_name is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        number = signal.Signals[self.signal_name]
        before = signal.signal(number, self._receive)
        try:
            yield
        finally:
            # None: a handler that was not installed from Python; the default is the nearest thing.
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def local_flags(self) -> list[float]:
        """This rank's [signal, expired] as 0 or 1, to be summed over ranks."""
        return [float(self._received), float(self._expired())]

    def _expired(self) -> bool:
        return self.minutes is not None and self.elapsed_minutes > self.minutes

    @property
    def elapsed_minutes(self) -> float:
        """Minutes since ``started``."""
        return (time.monotonic() - self.started) / 60.0

    @property
    def asks(self) -> bool:
        """Whether there is anything that ranks could be asked about."""
        return self.signal_name is not None or self.minutes is not None

    def poll(self, mesh: Mesh) -> Requests:
        """What any rank asks for.  A collective of three numbers, and none where no flag asks for
        it.
        """
        return self.poll_with(mesh, 0.0)[0] if self.asks else Requests()

    def poll_with(self, mesh: Mesh, number: float) -> tuple[Requests, float]:
        """``poll``, and the mean of ``number`` over all ranks."""
        # Gloo takes numbers of the host, so that the device goes on with what it has to do.
        device = torch.device("cpu") if "gloo" in mesh.backend else mesh.device
        flags = torch.tensor([*self.local_flags(), number], dtype=torch.float64, device=device)
        if mesh.world_size > 1:
            dist.all_reduce(flags)
        received, expired, total = flags.tolist()
        return Requests(signal=received > 0, expired=expired > 0), total / mesh.world_size

    def reason(self, requests: Requests, iteration: int, *, minutes: float) -> str | None:
        """The line to print before leaving, None to go on."""
        if requests.signal:
            return f"exiting program after receiving {self.signal_name}."
        if requests.expired:
            return f"exiting program after {minutes:.2f} minutes"
        if self.interval is not None and iteration > 0 and iteration % self.interval == 0:
            return f"exiting program at iteration {iteration}"
        return None


class Pacer:
    """Asks the ranks between micro-batches, about once a second.

    How many micro-batches that is follows from the mean of the ranks' clocks, which is exchanged
    with the flags, so all ranks ask at the same micro-batch and short steps pay nothing.  ``limit``
    is the most micro-batches without a question: those of a step, at whose end ranks ask anyway.
    """

    def __init__(self, watch: ExitWatch, mesh: Mesh, *, limit: int) -> None:
        self.watch = watch
        self.mesh = mesh
        self.limit = limit
        self.every = 1  # micro-batches from one question to the next; nothing is known yet
        self._done = 0
        self._since = time.monotonic()

    def between(self) -> Requests:
        """What any rank asks for, after a micro-batch that is not the last one of its step.  All
        ranks call it alike.
        """
        if not self.watch.asks:
            return Requests()
        self._done += 1
        if self._done < self.every:
            return Requests()
        now = time.monotonic()
        seconds = (now - self._since) / self._done
        requests, mean = self.watch.poll_with(self.mesh, seconds)
        self.every = max(1, min(self.limit, int(POLL_SECONDS / max(mean, 1e-9))))
        self._done, self._since = 0, now
        return requests
