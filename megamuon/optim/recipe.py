"""Recipes: what flags, planner, estimate and runtime know of an optimizer.

Owns ``Recipe``: name, settings, flags, how it is built, what an update costs, how it is told.
Invariant: flags, checks, runtime, planner, estimate, descriptions and checkpoints know an optimizer
by its recipe alone; none of them asks for a name. The recipes of this package are listed in
``registry.py``. Tested by ``tests/optim/test_recipes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from megamuon.optim.newton_schulz import NewtonSchulzConfig
from megamuon.optim.ns_plan import CpuDtype
from megamuon.optim.optimizer import MatrixOptimizer, OwnerOptimizer, Whole


@dataclass(frozen=True, kw_only=True)
class NoFlags:
    """An optimizer without flags of its own."""


class Work(NamedTuple):
    """Floating-point operations of one update of one matrix, on average over updates."""

    products: float  # of matrix products
    factorizations: float  # of eigen and QR decompositions


def _say_nothing(settings: Any, flags: Any) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An optimizer.

    ``settings`` is a frozen dataclass whose defaults are the optimizer's, ``build(settings)`` the
    optimizer: a ``MatrixOptimizer`` where ``whole`` says that it needs whole matrices, else an
    ``OwnerOptimizer``, which then trains everything. With it ``rest`` names the recipe
    that trains what is no matrix.

    ``flags`` is a dataclass of ``megamuon.flags.flag`` fields, the command line's names of the
    settings, and ``from_flags(flags, cpu_dtype)`` turns them into settings: ``flags`` has the
    fields of all registered optimizers, ``cpu_dtype`` is what ``--ns-dtype auto`` means on this
    run's CPUs. ``reads`` names recipes whose flags hold for this one too. ``describe(settings,
    flags)`` is what a run says about it when it starts.

    What the planner balances: with ``newton_schulz(settings)`` one such iteration; else what
    ``work(settings, rows, cols)`` counts, or ``period(settings)`` updates, measured. Bytes of state
    are asked of the optimizer itself (``state_sizes``).
    """

    name: str
    settings: type
    build: Callable[[Any], Any]
    whole: bool = True
    rest: str = "adam"
    flags: type = NoFlags
    from_flags: Callable[[Any, CpuDtype], Any]
    reads: tuple[str, ...] = ()
    describe: Callable[[Any, Any], list[str]] = _say_nothing
    newton_schulz: Callable[[Any], NewtonSchulzConfig] | None = None
    work: Callable[[Any, int, int], Work] | None = None
    period: Callable[[Any], int] = lambda settings: 1

    def __post_init__(self) -> None:
        if self.whole == (self.newton_schulz is None and self.work is None):
            raise ValueError(
                f"recipe {self.name!r}, whole={self.whole}: an optimizer of whole matrices says"
                " what an update costs, by newton_schulz or by work, and another one does not"
            )

    @property
    def dests(self) -> frozenset[str]:
        """The flags that this recipe declares."""
        return frozenset(field.name for field in fields(self.flags))

    def trial(self, settings: Any, matrix: torch.Tensor) -> Callable[[], object]:
        """One update's work on a whole matrix, to be called again and again and timed."""
        optimizer: MatrixOptimizer = self.build(settings)
        state = optimizer.init_whole(tuple(matrix.shape), matrix.dtype, matrix.device)
        wholes = [Whole("of a trial", matrix, state)]
        return lambda: optimizer.directions(wholes)


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """Elements of state, without the counts of steps (4 bytes each, on the CPU)."""

    piece: int  # beside each element of a piece, or of a parameter that is trained element-wise
    whole: Callable[[int, int], int]  # of a whole [rows, cols] matrix, where it is worked on


def state_sizes(optimizer: MatrixOptimizer | OwnerOptimizer) -> StateSizes:
    """What ``optimizer`` keeps: asked of its own fresh state, on the meta device."""

    def elements(state: dict[str, torch.Tensor]) -> int:
        return sum(tensor.numel() for tensor in state.values() if tensor.ndim)

    one = torch.empty((1, 1), device="meta")
    if not isinstance(optimizer, MatrixOptimizer):
        return StateSizes(piece=elements(optimizer.init_state(one)), whole=lambda rows, cols: 0)

    def whole(rows: int, cols: int) -> int:
        return elements(optimizer.init_whole((rows, cols), torch.float32, one.device))

    return StateSizes(piece=elements(optimizer.init_piece(one)), whole=whole)
