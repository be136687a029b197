"""The tables of a layer group: which rank sends and which rank sums what of its flat buffers.

Owns the way from a plan's segments to the tables that transports and reducers take; pure.
Invariant: equal plans give equal tables on every rank. Tested by
``tests/runtime/test_layer_group.py`` and the equivalence tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megamuon.collectives import RowSegment, SegmentTable, TableSegment, TwoStageTable
from megamuon.matrices import Layout, LogicalParameter
from megamuon.ownership.plan import OwnershipPlan, Segment


def holder(
    plan: OwnershipPlan, parameter: LogicalParameter, segment: Segment
) -> tuple[int, int | None]:
    """Column and row of the rank that holds a segment; row None: one rank in each row."""
    if parameter.layout is Layout.OWNER:
        return plan.topology.column_of(segment.rank), plan.topology.row_of(segment.rank)
    return segment.rank, None


def column_table(
    plan: OwnershipPlan,
    parameters: Sequence[LogicalParameter],
    offsets: Mapping[str, int],
    tp_rank: int,
) -> SegmentTable:
    """Which column of a row holds what of a flat buffer: a gather's sources."""
    return SegmentTable.build(
        plan.topology.columns,
        [
            TableSegment(
                rank=holder(plan, parameter, segment)[0],
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
    """A reduction's destinations: columns first, then rows inside each column's packed buffer."""
    pieces: list[list[tuple[int, int, int | None]]] = [[] for _ in range(plan.topology.columns)]
    for parameter in parameters:
        for segment in plan.segments(parameter.name, tp_rank):
            column, row = holder(plan, parameter, segment)
            offset = offsets[parameter.name] + segment.start
            pieces[column].append((offset, segment.stop - segment.start, row))
    rows: list[tuple[RowSegment, ...]] = []
    for held in pieces:
        packed: list[RowSegment] = []
        at = 0
        for _, numel, row in sorted(held, key=lambda piece: piece[0]):
            packed.append(RowSegment(start=at, numel=numel, row=row))
            at += numel
        rows.append(tuple(packed))
    return TwoStageTable(columns=column_table(plan, parameters, offsets, tp_rank), rows=tuple(rows))
