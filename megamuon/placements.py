"""Placements: where a tensor lies on each axis of the mesh.

Owns the names of the mesh's axes and what a parameter can be on one of them: ``Replicate``,
``Shard`` (cut along a dim, evenly or at given bounds) or ``Owned`` (whole, on one rank of the axis,
and nowhere else); a gradient can be ``Partial``. FSDP2 and DTensor users know the first two and the
last; ``Owned`` is what a matrix optimizer adds. Invariant: everything here is a frozen value that
knows shapes and indices and no process group, so it can be planned, hashed and stored. Axes nest
from the inside out: tensor parallelism cuts the parameter, and the shard axis cuts what tensor
parallelism leaves. Tested by ``tests/test_placements.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Axis(StrEnum):
    """The axes of the mesh, outermost first."""

    REPLICATE = "replicate"  # the replicas of HSDP
    SHARD = "shard"  # the ranks of one replica between which weights are sharded
    EP = "ep"  # expert parallelism, inside the shard axis; of size 1 in this version
    CP = "cp"  # context parallelism, inside the shard axis; of size 1 in this version
    TP = "tp"  # tensor parallelism, innermost


DATA_AXES = (Axis.REPLICATE, Axis.SHARD)  # along which ranks see other samples


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis has all of it."""


@dataclass(frozen=True)
class Partial:
    """Every rank of the axis has a summand of it; for gradients only."""


@dataclass(frozen=True)
class Owned:
    """One rank of the axis has all of it, the others have nothing.

    ``index`` is that rank's coordinate on the axis; None where the planner has yet to choose it.
    """

    index: int | None = None

    def __post_init__(self) -> None:
        if self.index is not None and self.index < 0:
            raise ValueError(f"an owner's coordinate on an axis is 0 or more, got {self.index}")


@dataclass(frozen=True)
class Shard:
    """Cut along ``dim``: rank i of the axis has ``bounds[i] .. bounds[i + 1]`` of it.

    Without ``bounds`` the cut follows ``torch.chunk``: ceil(extent / ranks) each, and the last
    ranks may have less or nothing.
    """

    dim: int
    bounds: tuple[int, ...] | None = None  # one more than ranks, from 0 to the extent of the dim

    def __post_init__(self) -> None:
        if self.bounds is None:
            return
        rising = all(a <= b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not rising:
            raise ValueError(f"bounds of a shard must rise from 0, got {self.bounds}")

    def interval(self, index: int, *, extent: int, ranks: int) -> tuple[int, int]:
        """What rank ``index`` of ``ranks`` has of a dim of ``extent``, as [start, stop).

        Raises ValueError where the bounds are for another extent or number of ranks.
        """
        if self.bounds is None:
            share = -(-extent // ranks)
            return min(index * share, extent), min((index + 1) * share, extent)
        if len(self.bounds) != ranks + 1 or self.bounds[-1] != extent:
            raise ValueError(
                f"bounds {self.bounds} do not cut an extent of {extent} for {ranks} ranks"
            )
        return self.bounds[index], self.bounds[index + 1]


AxisPlacement = Replicate | Shard | Owned | Partial


@dataclass(frozen=True)
class Placement:
    """One tensor on all axes.  An axis that is not named replicates.

    Two equal placements compare equal however they were written: replicated axes are left out and
    the others are in the order of ``Axis``.
    """

    axes: tuple[tuple[Axis, AxisPlacement], ...] = ()

    def __post_init__(self) -> None:
        if self.axes != _ordered(self.axes):
            raise ValueError(
                f"axes of a placement out of order, repeated or replicated: {self.axes}"
            )

    @staticmethod
    def of(axes: Mapping[Axis, AxisPlacement]) -> Placement:
        """The placement that ``axes`` says, in any order, replicated axes included."""
        return Placement(_ordered(axes.items()))

    def on(self, axis: Axis) -> AxisPlacement:
        """What the tensor is on ``axis``."""
        return dict(self.axes).get(axis, Replicate())

    def replaced(self, axis: Axis, placement: AxisPlacement) -> Placement:
        """The same but on ``axis``."""
        return Placement.of({**dict(self.axes), axis: placement})


_ORDER = tuple(Axis)


def _ordered(
    axes: Iterable[tuple[Axis, AxisPlacement]],
) -> tuple[tuple[Axis, AxisPlacement], ...]:
    kept = {axis: p for axis, p in axes if not isinstance(p, Replicate)}
    return tuple((axis, kept[axis]) for axis in _ORDER if axis in kept)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: what one rank has of it."""

    offset: tuple[int, ...]  # where it starts in the whole, by dim
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index the whole tensor with to get a view of the piece."""
        bounds = zip(self.offset, self.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in bounds)


def piece_of(
    shape: tuple[int, ...],
    placement: Placement,
    sizes: Mapping[Axis, int],
    place: Mapping[Axis, int],
) -> Piece | None:
    """What the rank at ``place`` has of a tensor of ``shape``; None: another rank owns it.

    ``sizes`` and ``place`` give the number of ranks of an axis and this rank's coordinate on it;
    an axis that they leave out has one rank. Axes cut from the inside out. A shard may be empty:
    it then has no elements and is not None. Raises ValueError where bounds are for another extent
    or number of ranks, and for an owner that the planner has yet to choose.
    """
    offset, extents = [0] * len(shape), list(shape)
    owned = True
    for axis, on_axis in reversed(placement.axes):
        ranks, index = sizes.get(axis, 1), place.get(axis, 0)
        if isinstance(on_axis, Shard):
            start, stop = on_axis.interval(index, extent=extents[on_axis.dim], ranks=ranks)
            offset[on_axis.dim] += start
            extents[on_axis.dim] = stop - start
        elif isinstance(on_axis, Owned):
            if on_axis.index is None:
                raise ValueError(f"nobody has been chosen on the {axis} axis to own this tensor")
            owned = owned and on_axis.index == index
    return Piece(tuple(offset), tuple(extents)) if owned else None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A parameter as model parallelism leaves it: what ``megamuon.sharding`` says of it."""

    shape: tuple[int, ...]  # the whole parameter's
    compute: Placement = Placement()  # what its module reads
    gradient: Placement = Placement()  # as ``compute``, but partial where each rank has a summand

    def piece(self, tp_rank: int) -> Piece:
        """What a tp rank has of it."""
        return tp_piece(self.shape, self.compute, tp_rank)


def tp_piece(shape: tuple[int, ...], placement: Placement, tp_rank: int) -> Piece:
    """What tensor parallelism leaves a tp rank of a tensor: the whole where nothing is cut.

    Raises ValueError where a cut says no bounds, so that its number of ranks is not known.
    """
    on_tp = placement.on(Axis.TP)
    if not isinstance(on_tp, Shard):
        return Piece((0,) * len(shape), shape)
    if on_tp.bounds is None:
        raise ValueError("a cut of tensor parallelism must say its bounds")
    only = Placement.of({Axis.TP: on_tp})
    piece = piece_of(shape, only, {Axis.TP: len(on_tp.bounds) - 1}, {Axis.TP: tp_rank})
    assert piece is not None  # a shard is on every rank
    return piece
