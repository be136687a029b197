"""The interface of an optimizer: pieces, wholes, gradients and state.

Owns ``Item`` (one parameter, or one piece of it, that this rank updates, with its reduced and
clipped gradient) and two protocols: ``OwnerOptimizer`` for rules that work element by element, and
``MatrixOptimizer`` for rules that need whole matrices. Invariant: an optimizer sees tensors only,
writes parameters and state in place, and never communicates. Tested through its implementations in
``tests/optim``.

[Note: three steps of a matrix update]

A matrix may lie in pieces: even slices over the shard ranks, or cut by tensor parallelism. So a
matrix optimizer works in three steps, and whoever runs it moves bytes between them:
``prepare`` (element by element, on each piece) gives the input of the whole-matrix work;
``directions`` does that work where the whole input has been put together; ``apply`` (element by
element again, on each piece) takes the piece's part of the direction. On a whole matrix the three
simply follow one another, and that is ``update``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

# What masters, gradients and states may be: shorter ones lose updates that are small beside the
# weight, and eigenvalue solvers have none.
MASTER_DTYPES = (torch.float32, torch.float64)


def check_master(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a parameter that no optimizer here trains in its dtype."""
    if tensor.dtype not in MASTER_DTYPES:
        raise ValueError(
            f"item {name!r}: the parameter is {tensor.dtype}; optimizers train FP32 masters (or"
            " FP64). Keep an FP32 master, as RuntimeConfig(compute_dtype=torch.bfloat16) does for a"
            " model that computes in BF16"
        )


@dataclass(frozen=True, slots=True)
class Item:
    """One update of a parameter or of a piece of it. ``parameter`` (the master) and ``gradient``
    (reduced over ranks, already clipped) have one shape and one dtype, FP32 or FP64; either may be
    a view of a larger buffer. ``logical_shape`` is the shape of the logical matrix: update scales
    come from it. ``wd`` is the decay of this parameter after all multipliers.
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
        check_master(self.name, self.parameter)


@runtime_checkable
class OwnerOptimizer(Protocol):
    """An update rule over the items that one rank owns."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Keys of the state of each parameter; a checkpoint stores exactly these."""
        ...

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh state for a parameter, on its device and of its dtype (``step`` counts are 0-d
        FP32 on the CPU). ValueError for a dtype that masters cannot have.
        """
        ...

    def update(self, items: Sequence[Item], updated: Callable[[Item], None] | None = None) -> None:
        """One step for each item; parameters and state change in place. ``updated`` is called
        once for each item as soon as its parameter has its new values.
        """
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole matrix on the rank that works on it: what ``prepare`` gave, put together from all
    pieces, and the state that lives with the whole.
    """

    name: str
    matrix: Tensor  # of the logical shape
    state: dict[str, Tensor]


@runtime_checkable
class MatrixOptimizer(Protocol):
    """An update rule that needs whole matrices. See [Note: three steps of a matrix update]."""

    @property
    def piece_names(self) -> tuple[str, ...]:
        """Keys of the state beside each piece: tensors of the piece's shape, and 0-d counts."""
        ...

    @property
    def whole_names(self) -> tuple[str, ...]:
        """Keys of the state of the whole matrix, of any shape."""
        ...

    def init_piece(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh state beside a piece, on its device and of its dtype."""
        ...

    def init_whole(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Fresh state of a whole matrix."""
        ...

    def prepare(self, item: Item) -> Tensor:
        """Advance the state beside the piece; the piece's part of the input, of its shape."""
        ...

    def directions(self, wholes: Sequence[Whole]) -> list[Tensor]:
        """For each whole matrix its update before any scale or learning rate; advances the state
        of the whole. Equal shapes may be batched, which must not change a result.
        """
        ...

    def apply(self, item: Item, direction: Tensor) -> None:
        """Decay and update a piece with its part of the direction."""
        ...

    def update(self, items: Sequence[Item], updated: Callable[[Item], None] | None = None) -> None:
        """All three steps for items that are whole; their state holds both kinds of keys.

        ``updated`` is called once for each item as soon as its parameter has its new values.
        """
        ...
