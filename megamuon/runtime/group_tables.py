"""The tables of a layer group: which rank sends and which rank sums what of its flat buffers.

Owns the way from a plan's segments to the tables that transports and reducers take; pure.
Invariant: equal plans give equal tables on every rank. Tested by
``tests/runtime/test_layer_group.py`` and the equivalence tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megamuon.collectives import ReplicaSegment, SegmentTable, TableSegment, TwoStageTable
from megamuon.matrices import LogicalParameter
from megamuon.ownership.plan import OwnershipPlan


def shard_table(
    plan: OwnershipPlan,
    parameters: Sequence[LogicalParameter],
    offsets: Mapping[str, int],
    tp_rank: int,
) -> SegmentTable:
    """Which shard of a replica holds what of a flat buffer: a gather's sources."""
    return SegmentTable.build(
        plan.topology.shards,
        [
            TableSegment(
                rank=segment.shard,
                offset=offsets[parameter.name] + segment.start,
                numel=segment.stop - segment.start,
            )
            for parameter in parameters
            for segment in plan.segments(parameter.name, tp_rank)
        ],
    )


def two_stage_table(
    plan: OwnershipPlan,
    parameters: Sequence[LogicalParameter],
    offsets: Mapping[str, int],
    tp_rank: int,
) -> TwoStageTable:
    """A reduction's destinations: shards first, then replicas inside each rail's packed buffer."""
    pieces: list[list[tuple[int, int, int | None]]] = [[] for _ in range(plan.topology.shards)]
    for parameter in parameters:
        for segment in plan.segments(parameter.name, tp_rank):
            offset = offsets[parameter.name] + segment.start
            numel = segment.stop - segment.start
            pieces[segment.shard].append((offset, numel, segment.replica))
    replicas: list[tuple[ReplicaSegment, ...]] = []
    for held in pieces:
        packed: list[ReplicaSegment] = []
        at = 0
        for _, numel, replica in sorted(held, key=lambda piece: piece[0]):
            packed.append(ReplicaSegment(start=at, numel=numel, replica=replica))
            at += numel
        replicas.append(tuple(packed))
    return TwoStageTable(
        shards=shard_table(plan, parameters, offsets, tp_rank), replicas=tuple(replicas)
    )
