"""How far a run has come, and in which order it draws its samples.

Owns the counters of a checkpoint.  Invariants: a position is never read against another order than
the one it was counted in; what was tolerated is counted over all launches of a run. Tested by
``tests/training/test_progress.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megamuon.data.continued import SampleCount


@dataclass(kw_only=True)
class DataOrder:
    """What decides a split's order of samples beside flags and corpora; see ``data.continued`` and
    ``data.sampler``.
    """

    requests: list[int] = field(default_factory=list)  # samples that launches asked for, ascending
    layout: list[int] = field(default_factory=list)  # micro-batch size, ranks of the first launch
    start: int = 0  # the split's consumed samples at which this order began

    def ask(self, samples: int, *, endless: bool) -> SampleCount:
        """The count to build the split's dataset for, where ``samples`` are wanted in all.

        An ``endless`` loader goes round in the dataset of the first launch.  Where nothing is
        wanted nothing is remembered.
        """
        wanted = samples - self.start
        if wanted <= 0:
            return SampleCount(0)
        if not self.requests or (wanted > self.requests[-1] and not endless):
            self.requests.append(wanted)
        return SampleCount(self.requests[-1], self.requests[:-1])

    def begin(self, layout: tuple[int, int]) -> None:
        """Remember the layout of the launch that draws the first sample."""
        if not self.layout:
            self.layout = list(layout)


@dataclass(kw_only=True)
class Progress:
    """How far a run has come; the counters of a checkpoint."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    floating_point_operations: float = 0.0
    # Steps that were not applied because something was not finite, over all launches.
    skipped_iterations: int = 0
    nan_iterations: int = 0  # those whose loss was not finite
    skipped_in_a_row: int = 0
    nan_evaluations: int = 0
    failed_saves: int = 0
    # The newest checkpoint in the save directory from which a step was made.
    last_good_iteration: int | None = None
    train_order: DataOrder = field(default_factory=DataOrder)
    valid_order: DataOrder = field(default_factory=DataOrder)

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> Progress:
        """The counters of a checkpoint.  What an older one lacks keeps its default; what this
        release does not know is left out.
        """
        known = {item.name for item in fields(Progress)}
        values = {name: value for name, value in document.items() if name in known}
        for name in ("train_order", "valid_order"):
            if name in values:
                values[name] = DataOrder(**values[name])
        return Progress(**values)

    def new_order(self, *, train: bool, valid: bool) -> None:
        """Begin a split's data anew: the next sample is the first one of its new order."""
        if train:
            self.train_order = DataOrder(start=self.consumed_train_samples)
        if valid:
            self.valid_order = DataOrder(start=self.consumed_valid_samples)

    def applied(self) -> None:
        """A step was made."""
        self.skipped_in_a_row = 0

    def skipped(self, *, nan: bool) -> None:
        """A step was not made, since the loss (``nan``) or a gradient was not finite."""
        self.skipped_iterations += 1
        self.skipped_in_a_row += 1
        self.nan_iterations += nan
