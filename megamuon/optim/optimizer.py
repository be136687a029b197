"""What the runtime and an owner's optimizer agree on.

Owns ``Item`` (one parameter that this rank updates, with its reduced and clipped gradient) and the
protocol ``OwnerOptimizer``. Invariant: an optimizer sees whole items and its own state only, writes
parameters and state in place, and never communicates. Tested through its implementations in
``tests/optim``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Item:
    """One update. ``parameter`` (the master) and ``gradient`` (reduced over ranks, already
    clipped) have one shape and one dtype, FP32 or FP64; either may be a view of a larger buffer.
    ``logical_shape`` is the shape of the logical matrix: update scales come from it. ``wd`` is
    the decay of this parameter after all multipliers.
    """

    name: str
    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    lr: float
    wd: float
    logical_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if (
            self.parameter.shape != self.gradient.shape
            or self.parameter.dtype != self.gradient.dtype
        ):
            raise ValueError(
                f"item {self.name!r}: parameter is {tuple(self.parameter.shape)} "
                f"{self.parameter.dtype}, gradient is "
                f"{tuple(self.gradient.shape)} {self.gradient.dtype}; both must be the same"
            )


@runtime_checkable
class OwnerOptimizer(Protocol):
    """An update rule over the items that one rank owns."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Keys of the state of each parameter; a checkpoint stores exactly these."""
        ...

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh state for a parameter, on its device and of its dtype (``step`` counts are 0-d
        FP32 on the CPU).
        """
        ...

    def update(self, items: Sequence[Item]) -> None:
        """One step for each item; parameters and state change in place."""
        ...
