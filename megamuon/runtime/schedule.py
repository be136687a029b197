"""When gathers and reductions start, and which of those under way is waited for first.

Owns ``Schedule``, the decisions that the engine carries out, and ``Lagged``, today's. Invariant: a
schedule is a frozen value, equal on all ranks (it is compared with the other settings), and decides
by places in the frozen order and by what is in flight alone, so that all ranks decide alike. Tested
by ``tests/runtime/test_schedule.py`` and ``tests/distributed/test_schedule.py``.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Started(Protocol):
    """One reduction in flight: inside the replica first, then, on several replicas, across them."""

    @property
    def across(self) -> bool:
        """Whether it has stages across replicas."""

    def wait_inside(self) -> None:
        """Wait for the stage inside the replica; starts nothing."""

    def start_across(self) -> None:
        """Wait for the stage inside the replica and start the one across replicas; again:
        nothing.
        """

    def finish(self) -> None:
        """Wait for the result; the reduction is in flight no more."""


class Flight(Protocol):
    """What a schedule sees and does where a reduction starts."""

    @property
    def started(self) -> Sequence[Started]:
        """Reductions in flight, in the order of their start."""

    def launch(self) -> None:
        """Start the stage inside the replica of the reduction whose turn it is."""


@dataclass(frozen=True, kw_only=True)
class Schedule(abc.ABC):
    """The policy of one run."""

    prefetch_depth: int = 1  # groups gathered ahead of the one that computes

    def __post_init__(self) -> None:
        if self.prefetch_depth < 0:
            raise ValueError(f"prefetch_depth={self.prefetch_depth}: choose 0 or more")

    @property
    def lag(self) -> int:
        """With places counted from the last group down: the reduction at place p starts behind the
        gather at p + lag - 1 and before the gather at p + lag, complete or not.
        """
        return self.prefetch_depth + 1

    @abc.abstractmethod
    def reduce(self, flight: Flight) -> None:
        """Launch the reduction whose turn it is, once, and do with older ones what is due."""


@dataclass(frozen=True, kw_only=True)
class Lagged(Schedule):
    """A few reductions in flight: the oldest is waited for whole before one more starts, and the
    stages across replicas start with the reduction that follows.
    """

    outstanding: int = 2  # each keeps its unsharded gradients or its send buffer alive

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outstanding < 1:
            raise ValueError(f"outstanding={self.outstanding}: choose 1 or more reductions")

    def reduce(self, flight: Flight) -> None:
        """See Schedule."""
        while len(flight.started) >= self.outstanding:
            flight.started[0].finish()
        for earlier in flight.started:
            if earlier.across:  # its stage inside the replica is over by now, or nearly
                earlier.start_across()
        flight.launch()
