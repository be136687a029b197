"""Tables that follow from placements: segments, leaders, who counts, who writes a checkpoint.

Owns every question about where a parameter lies that the rooms above ask: its segments (what
gathers and reductions move), who leads in replicas that do not own it, whose copy counts in a norm,
who writes it to a checkpoint, and whose gradients are summands. Invariant: pure functions of
placements and the sizes of the axes; nobody above this floor asks what a parameter is on an axis,
so a placement that has these answers needs no new branch there. Tested by
``tests/ownership/test_holdings.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megamuon.matrices import LogicalParameter
from megamuon.placements import Axis, Owned, Partial, Placement, Replicate, Shard

MODEL_AXES = (Axis.EP, Axis.CP, Axis.TP)


class PlanError(ValueError):
    """A plan that contradicts itself, or a question that the plan has no answer to."""


class Segment(NamedTuple):
    """Elements ``[start, stop)`` of a tp rank's piece of a parameter, flattened row-major, and the
    rank that has their master.
    """

    start: int
    stop: int
    shard: int
    replica: int | None  # None: each replica has them

    def held_at(self, replica: int, shard: int) -> bool:
        """Whether the rank at this place has the master."""
        return shard == self.shard and self.replica in (None, replica)

    def led_at(self, shard: int, replicas: int) -> bool:
        """Whether each replica's rank at ``shard`` leads, since one replica alone has the master:
        it keeps a copy, from which its replica gathers.
        """
        return shard == self.shard and self.replica is not None and replicas > 1


class Home(NamedTuple):
    """The one place of the replicate and shard axes where a parameter is owned."""

    replica: int
    shard: int


def home_of(parameter: LogicalParameter) -> Home | None:
    """Where a parameter is owned; None: each replica has it.

    Raises PlanError for an owner that the planner has yet to choose.
    """
    replica, shard = (parameter.storage.on(axis) for axis in (Axis.REPLICATE, Axis.SHARD))
    if not (isinstance(replica, Owned) and isinstance(shard, Owned)):
        return None
    if replica.index is None or shard.index is None:
        raise PlanError(f"nobody has been chosen to own {parameter.name}")
    return Home(replica.index, shard.index)


def segments_of(
    parameter: LogicalParameter, sizes: Mapping[Axis, int], tp_rank: int
) -> tuple[Segment, ...]:
    """Segments of a tp rank's piece (the whole, where nothing is cut) in the order of elements:
    they tile the piece, none is empty. Shards without rows have no segment.
    """
    piece = parameter.piece(tp_rank)
    if piece.numel == 0:
        return ()
    replica = parameter.storage.on(Axis.REPLICATE)
    row = replica.index if isinstance(replica, Owned) else None
    on_shard = parameter.storage.on(Axis.SHARD)
    if isinstance(on_shard, Owned):
        assert on_shard.index is not None  # a plan has chosen all owners
        return (Segment(0, piece.numel, on_shard.index, row),)
    assert isinstance(on_shard, Shard)  # a plan stores nothing on all shards
    rows, ranks = piece.shape[0], sizes[Axis.SHARD]
    width = piece.numel // rows
    bounds = (on_shard.interval(rank, extent=rows, ranks=ranks) for rank in range(ranks))
    return tuple(
        Segment(start * width, stop * width, rank, row)
        for rank, (start, stop) in enumerate(bounds)
        if stop > start
    )


def storage_problem(parameter: LogicalParameter, sizes: Mapping[Axis, int]) -> str | None:
    """Why no rank could hold a parameter as its placements say; None where all is well."""
    for word, placement in (("stored", parameter.storage), ("updated", parameter.update)):
        for axis, on_axis in placement.axes:
            ranks = sizes.get(axis, 1)
            if isinstance(on_axis, Owned) and not (
                on_axis.index is not None and on_axis.index < ranks
            ):
                who = "nobody" if on_axis.index is None else f"rank {on_axis.index}"
                return f"is {word} by {who} of the {ranks} ranks on the {axis} axis"
            if isinstance(on_axis, Partial):
                return f"is {word} in summands on the {axis} axis"
    return _shard_problem(parameter, sizes)


def _shard_problem(parameter: LogicalParameter, sizes: Mapping[Axis, int]) -> str | None:
    shape, tp = parameter.shape, sizes[Axis.TP]
    on_tp, on_shard = parameter.storage.on(Axis.TP), parameter.storage.on(Axis.SHARD)
    if isinstance(on_tp, Shard):
        bounds = on_tp.bounds or ()
        fits = on_tp.dim in range(len(shape)) and len(bounds) == tp + 1
        if not fits or bounds[-1] != shape[on_tp.dim]:
            return (
                f"is cut along dim {on_tp.dim} at {list(bounds)}, which does not make {tp} pieces"
                " (one per tp rank) of it"
            )
    replica = parameter.storage.on(Axis.REPLICATE)
    if isinstance(on_shard, Shard) and isinstance(replica, Replicate):
        if on_shard.dim != 0 or not shape:
            return f"is cut along dim {on_shard.dim} over the shards: slices are of dim 0"
        for rank in range(tp):
            try:
                on_shard.interval(0, extent=parameter.piece_shape(rank)[0], ranks=sizes[Axis.SHARD])
            except ValueError as error:
                return str(error)
    elif not (isinstance(on_shard, Owned) and isinstance(replica, Owned)):
        return "must have one owner, or be cut over the shards of each replica"
    return None


# --- whose copy counts ---------------------------------------------------------------------------


def speaks(placement: Placement, place: Mapping[Axis, int]) -> bool:
    """Whether the rank at ``place`` is the first of those that have the same elements: what it has
    is what a sum over all ranks counts.
    """
    alike = (axis for axis in Axis if isinstance(placement.on(axis), Replicate))
    return all(place.get(axis, 0) == 0 for axis in alike)


class Writers(NamedTuple):
    """The ranks that share the writing of elements that all of them have."""

    index: int  # of this rank among them
    count: int


EVERYBODY = Writers(0, 1)  # everybody lists all that they have, as a load wants it


def writers(
    placement: Placement, sizes: Mapping[Axis, int], place: Mapping[Axis, int]
) -> Writers | None:
    """Who writes what the rank at ``place`` has to a checkpoint; None: not this rank.

    Replicas share the work, since each is a node with storage of its own; of tp ranks with the
    same elements the first writes all.
    """
    for axis in MODEL_AXES:
        if isinstance(placement.on(axis), Replicate) and place.get(axis, 0):
            return None
    if isinstance(placement.on(Axis.REPLICATE), Replicate):
        return Writers(place.get(Axis.REPLICATE, 0), sizes.get(Axis.REPLICATE, 1))
    return Writers(0, 1)


def one_works(placement: Placement, sizes: Mapping[Axis, int]) -> bool:
    """Whether one rank of a replica works on the whole of a parameter that is updated so."""
    inside = (axis for axis in (Axis.SHARD, *MODEL_AXES) if sizes.get(axis, 1) > 1)
    return not any(isinstance(placement.on(axis), Replicate) for axis in inside)


# --- tensor parallelism --------------------------------------------------------------------------


def cut_names(parameters: Iterable[LogicalParameter]) -> frozenset[str]:
    """Names of the parameters of which tp ranks have different pieces."""
    return frozenset(p.name for p in parameters if isinstance(p.compute.on(Axis.TP), Shard))


def summed_over_tp(parameters: Iterable[LogicalParameter]) -> tuple[LogicalParameter, ...]:
    """Those that are whole on every tp rank while each one's gradient is a summand."""
    return tuple(p for p in parameters if isinstance(p.gradient.on(Axis.TP), Partial))
