"""Compiled moves of the matrix update: what travels to put a matrix together, and back.

Owns the way from two placements of a tensor (where it lies, where it is wanted) to a list of moves,
one per axis on which they differ, and the pair of such lists that updates matrices: from where they
are stored to where the whole is worked on, and back. Invariants: pure and the same on every rank;
axes nest from the inside out, so a tensor comes together along the outer axes first (slices along
the shard axis are pieces of a tensor-parallel piece) and comes apart along the inner ones first; a
whole that lies on its owner moves nowhere. The bytes of a move are what its ranks count when it
runs. Tested by ``tests/ownership/test_update_plan.py`` and, against counted bytes, by
``tests/distributed/test_update_moves.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product, takewhile

import torch

from megamuon.matrices import LogicalParameter, Route
from megamuon.ownership.groups import grouped
from megamuon.ownership.plan import OwnershipPlan
from megamuon.placements import (
    Axis,
    Owned,
    Piece,
    Placement,
    Replicate,
    Shard,
    piece_of,
)

Place = Mapping[Axis, int]  # a rank's coordinate on each axis
Sizes = Mapping[Axis, int]  # ranks on each axis


class MoveKind(StrEnum):
    """What a move does along its axis."""

    LOCAL = "local"  # everybody has all of it: each keeps what it needs, and nothing travels
    GATHER = "gather"  # everybody's piece to everybody
    TO_OWNER = "to_owner"  # everybody's piece to one rank
    FROM_OWNER = "from_owner"  # everybody's piece from one rank
    BROADCAST = "broadcast"  # all of it from one rank


_KINDS: dict[tuple[type, type], MoveKind] = {
    (Shard, Replicate): MoveKind.GATHER,
    (Shard, Owned): MoveKind.TO_OWNER,
    (Owned, Shard): MoveKind.FROM_OWNER,
    (Owned, Replicate): MoveKind.BROADCAST,
    (Replicate, Shard): MoveKind.LOCAL,
    (Replicate, Owned): MoveKind.LOCAL,
}


@dataclass(frozen=True, kw_only=True)
class Journey:
    """One tensor and where it is to go."""

    name: str
    shape: tuple[int, ...]  # of the whole
    source: Placement
    target: Placement


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One tensor in one move, as one rank sees it. Pieces are boxes of the whole tensor; None is
    nothing, or what another rank owns.
    """

    name: str
    before: Piece | None  # what this rank has
    after: Piece | None  # what it has then
    sends: tuple[Piece | None, ...]  # to each rank of the axis, itself included
    receives: tuple[Piece | None, ...]  # from each


def _part(held: Piece | None, wanted: Piece | None) -> Piece | None:
    """What a sender has and a receiver wants: of the moves that there are, one contains the
    other.
    """
    if held is None or wanted is None:
        return None
    part = min(held, wanted, key=lambda piece: piece.numel)
    return part if part.numel else None


@dataclass(frozen=True, kw_only=True)
class Leg(Journey):
    """One tensor in one move, on all ranks: from source to target, which differ on one axis."""

    axis: Axis

    @property
    def kind(self) -> MoveKind:
        """Raises ValueError for a change that no move makes."""
        old, new = self.source.on(self.axis), self.target.on(self.axis)
        try:
            return _KINDS[type(old), type(new)]
        except KeyError:
            raise ValueError(
                f"{self.name}: nothing moves a tensor along {self.axis} from {old} to {new}"
            ) from None

    def pieces(
        self, sizes: Sizes, place: Place
    ) -> tuple[list[Piece | None], list[Piece | None]] | None:
        """What each rank of the group at ``place`` has before and after; None where the tensor lies
        on other groups.
        """
        others = self.source.replaced(self.axis, Replicate())
        if piece_of(self.shape, others, sizes, place) is None:
            return None
        group = [{**place, self.axis: index} for index in range(sizes[self.axis])]
        before = [piece_of(self.shape, self.source, sizes, rank) for rank in group]
        return before, [piece_of(self.shape, self.target, sizes, rank) for rank in group]

    def hop(self, sizes: Sizes, place: Place) -> Hop | None:
        """The leg at one rank; None where its group has no part in it."""
        pieces = self.pieces(sizes, place)
        if pieces is None:
            return None
        before, after = pieces
        rank = place[self.axis]
        local = self.kind is MoveKind.LOCAL
        return Hop(
            name=self.name,
            before=before[rank],
            after=after[rank],
            sends=() if local else tuple(_part(before[rank], wanted) for wanted in after),
            receives=() if local else tuple(_part(held, after[rank]) for held in before),
        )

    def elements(self, sizes: Sizes) -> int:
        """Elements that all ranks together send to others: what stays on its rank is not among
        them.
        """
        kind = self.kind
        if kind is MoveKind.LOCAL:
            return 0
        # Pieces meet at an owner, or come from it; the owner's own stays at home.
        there = kind in (MoveKind.GATHER, MoveKind.TO_OWNER)
        owner = (self.target if there else self.source).on(self.axis)
        total = 0
        for place, alike in _groups(self.source, self.axis, sizes):
            pieces = self.pieces(sizes, place)
            if pieces is None:
                continue
            before, after = pieces
            if kind is MoveKind.GATHER:
                sent = _numel(before) * (sizes[self.axis] - 1)
            else:
                assert isinstance(owner, Owned) and owner.index is not None
                moved = before if there else after
                sent = _numel(moved) - _numel([moved[owner.index]])
            total += sent * alike
        return total


def _numel(pieces: Iterable[Piece | None]) -> int:
    return sum(piece.numel for piece in pieces if piece is not None)


def _groups(placement: Placement, axis: Axis, sizes: Sizes) -> Iterator[tuple[Place, int]]:
    """One place of each kind of group along ``axis``, and how many groups are like it: a group for
    each shard of the other axes, for their owners, and alike where they replicate.
    """
    choices: list[list[tuple[Axis, int]]] = []
    alike = 1
    for other, size in sizes.items():
        if other == axis:
            continue
        on_other = placement.on(other)
        if isinstance(on_other, Shard):
            choices.append([(other, index) for index in range(size)])
        elif isinstance(on_other, Owned):
            choices.append([(other, on_other.index or 0)])
        else:
            alike *= size
    for chosen in product(*choices):
        yield dict(chosen), alike


@dataclass(frozen=True, kw_only=True)
class LocalMove:
    """A move as one rank runs it: the tensors that its own group moves. A group that moves none
    makes no call.
    """

    axis: Axis
    kind: MoveKind
    dtype: torch.dtype
    hops: Mapping[str, Hop]


@dataclass(frozen=True, kw_only=True)
class Move:
    """Tensors that change along one axis in one way, in one call on every group of that axis.

    There is one communicator per axis, so the axis names it; the moves of a list are run in its
    order on all ranks.
    """

    axis: Axis
    kind: MoveKind
    legs: tuple[Leg, ...]
    dtype: torch.dtype
    sizes: Mapping[Axis, int]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of what moves."""
        return tuple(leg.name for leg in self.legs)

    @cached_property
    def nbytes(self) -> int:
        """What all ranks together send to others."""
        return sum(leg.elements(self.sizes) for leg in self.legs) * self.dtype.itemsize

    def at(self, place: Place) -> LocalMove:
        """What the rank at ``place`` does."""
        hops = {leg.name: leg.hop(self.sizes, place) for leg in self.legs}
        return LocalMove(
            axis=self.axis,
            kind=self.kind,
            dtype=self.dtype,
            hops={name: hop for name, hop in hops.items() if hop is not None},
        )


def compile_moves(
    journeys: Sequence[Journey], sizes: Sizes, dtype: torch.dtype, *, apart: bool = False
) -> tuple[Move, ...]:
    """The moves that take all ``journeys``, in order: one per axis and kind, the tensors of each in
    the order given. Tensors come together unless ``apart``, which takes the axes the other way
    round. An axis of one rank moves nothing.

    Raises ValueError for a change that no move makes, and for a tensor that would have to change
    along an axis while an outer one still cuts it.
    """
    along = list(reversed(Axis)) if apart else list(Axis)
    legs: dict[tuple[Axis, MoveKind], list[Leg]] = {}
    for journey in journeys:
        now = journey.source
        for axis in along:
            new = journey.target.on(axis)
            if now.on(axis) == new:
                continue
            then = now.replaced(axis, new)
            if sizes.get(axis, 1) > 1:
                _check_nesting(journey.name, now, axis, sizes)
                leg = Leg(
                    name=journey.name, shape=journey.shape, axis=axis, source=now, target=then
                )
                legs.setdefault((axis, leg.kind), []).append(leg)
            now = then
    return tuple(
        Move(axis=axis, kind=kind, legs=tuple(legs[axis, kind]), dtype=dtype, sizes=sizes)
        for axis in along
        for kind in MoveKind
        if (axis, kind) in legs
    )


def _check_nesting(name: str, now: Placement, axis: Axis, sizes: Sizes) -> None:
    for outer in takewhile(lambda each: each is not axis, Axis):
        if isinstance(now.on(outer), Shard) and sizes.get(outer, 1) > 1:
            raise ValueError(
                f"{name} cannot change along {axis} while {outer} cuts it: slices along {outer} are"
                " pieces of what it is there"
            )


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """The moves around the update of some matrices."""

    sizes: Mapping[Axis, int]
    matrices: tuple[Journey, ...]  # from storage to update
    there: tuple[Move, ...]
    back: tuple[Move, ...]

    @property
    def moves(self) -> tuple[Move, ...]:
        """All that sends something, in order."""
        return tuple(m for m in (*self.there, *self.back) if m.kind is not MoveKind.LOCAL)

    @property
    def moved(self) -> frozenset[str]:
        """Matrices that are not updated where they are stored."""
        return frozenset(name for move in (*self.there, *self.back) for name in move.parameters)

    @property
    def axes(self) -> frozenset[Axis]:
        """Axes along which something is sent."""
        return frozenset(move.axis for move in self.moves)

    def workers(self, place: Place) -> frozenset[str]:
        """Matrices whose whole the rank at ``place`` works on: where their update is placed, but
        for a rank that would have no use for the result, since it has no part of the matrix and
        nobody waits for it.
        """
        sent = (move for move in self.back if move.kind is not MoveKind.LOCAL)
        awaited = {name for move in sent for name in move.parameters}
        found = set()
        for matrix in self.matrices:
            if piece_of(matrix.shape, matrix.target, self.sizes, place) is None:
                continue
            stored = piece_of(matrix.shape, matrix.source, self.sizes, place)
            if matrix.name in awaited or (stored is not None and stored.numel):
                found.add(matrix.name)
        return frozenset(found)

    @cached_property
    def _targets(self) -> dict[str, Placement]:
        return {matrix.name: matrix.target for matrix in self.matrices}

    def speaks(self, name: str, place: Place) -> bool:
        """Whether the rank at ``place`` is the first of those at which the update of a matrix is
        placed: the one that says what all of them have alike.
        """
        target = self._targets[name]
        return all(
            index == (on_axis.index if isinstance(on_axis := target.on(axis), Owned) else 0)
            for axis, index in place.items()
        )


def compile_update(matrices: Sequence[Journey], sizes: Sizes, dtype: torch.dtype) -> UpdatePlan:
    """The moves of ``matrices``, each from where it is stored to where it is updated, and back, in
    ``dtype``, that of masters.  Raises ValueError as ``compile_moves`` does.
    """
    returns = [
        Journey(name=m.name, shape=m.shape, source=m.target, target=m.source) for m in matrices
    ]
    return UpdatePlan(
        sizes=sizes,
        matrices=tuple(matrices),
        there=compile_moves(matrices, sizes, dtype),
        back=compile_moves(returns, sizes, dtype, apart=True),
    )


def matrices_of(parameters: Sequence[LogicalParameter]) -> tuple[Journey, ...]:
    """What a matrix optimizer trains of ``parameters``, from where it is stored to where its whole
    is worked on.
    """
    return tuple(
        Journey(name=p.name, shape=p.shape, source=p.storage, target=p.update)
        for p in parameters
        if p.route is Route.MATRIX
    )


def update_moves(plan: OwnershipPlan, dtype: torch.dtype) -> tuple[Move, ...]:
    """All that a step sends for the matrices of ``plan``, layer group by layer group, if each of
    them is updated.
    """
    return tuple(
        move
        for members in grouped(plan.parameters).values()
        for move in compile_update(matrices_of(members), plan.topology.sizes, dtype).moves
    )
