"""The ``ready`` transport: gathers and reductions by the operators, in the pool's memory.

Owns the choice between an operator and its fallback, call by call, the operators' tables, and the
traffic count. Invariants: the choice depends on where the *group's* buffers lie, which is planned
alike on all ranks, never on what this rank holds of them; a reduction adds in the order that
``two_stage.py`` states, so both give the same bits. Source: DMuon-2, section 5. Tested by
``tests/distributed/test_ready.py`` (against sums in one process and the grouped transport).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megamuon.collectives.base import (
    CollectiveError,
    GatherTable,
    ReduceTable,
    Transport,
    TransportSettings,
    Work,
)
from megamuon.collectives.operators import Fabric, PooledGroup, TableRefused, Ticket
from megamuon.collectives.staged_work import STAGE_1, STAGE_2_SHARE, StagedWork, stage
from megamuon.collectives.two_stage import TwoStageReducer, TwoStageTable


class ReadyTransport(Transport):
    """AllGatherV inside the replica: pooled buffers by the operator, all others by ``fallback``."""

    name = "ready"

    def __init__(self, fallback: Transport, fabric: Fabric) -> None:
        super().__init__(
            TransportSettings(
                gather_group=fallback.gather_group,
                reduce_group=fallback.reduce_group,
                wire_dtype=fallback.wire_dtype,
                traffic=fallback.traffic,
                axis=fallback.axis,
            )
        )
        self.fallback, self.fabric = fallback, fabric
        self._operator = fabric.operators.gather
        self._reducer: ReadyReducer | None = None
        self._tables: dict[tuple[int, int], tuple[GatherTable, int | TableRefused]] = {}
        self._names: dict[int, str] = {}  # of groups, by the identity of their tables

    def all_gather_v(
        self, buffer: Tensor, table: GatherTable, *, operation: str = "gather"
    ) -> Work:
        """See Transport."""
        base = self.fabric.offset_of(buffer)
        number = None if base is None else self._table(table, buffer.element_size())
        if base is None or not isinstance(number, int):
            return self.fallback.all_gather_v(buffer, table, operation=operation)
        self.count_gather(buffer, table, operation)
        ticket = self._operator.all_gather(number, base)
        return Work(handles=[Ticket(self._operator, ticket)], name="gather")

    def reduce_scatter_v(
        self,
        unsharded: Tensor,
        table: ReduceTable,
        sharded: Tensor,
        *,
        first: bool,
        divisor: int,
    ) -> Work:
        """A plain reduction along the replica; pooled gradients go through ReadyReducer instead."""
        return self.fallback.reduce_scatter_v(
            unsharded, table, sharded, first=first, divisor=divisor
        )

    def check_schedules(self, tables: list[GatherTable]) -> None:
        """See Transport."""
        self.fallback.check_schedules(tables)

    def close(self) -> None:
        """Close the fallback and the fabric; a collective."""
        self.fallback.close()
        self.fabric.close()

    def over_grid(self, reducer: TwoStageReducer) -> ReadyReducer:
        """See Transport: pooled gradients go by the operator."""
        self._reducer = ReadyReducer(reducer, self.fabric)
        return self._reducer

    def pooled(self, group: PooledGroup) -> str:
        """See Transport: freezes the operators' tables, so that no pass has to."""
        self._names[id(group.gather_table)] = group.name
        number = self._table(group.gather_table, group.gather_itemsize)
        if group.window is not None and self._reducer is not None:
            self._reducer.pool(
                group.reduce_table,
                group.window,
                group.slot_dtypes,
                group.window_dtype,
                name=group.name,
            )
        return "" if isinstance(number, int) else str(number)

    def check(self) -> None:
        """Raise CollectiveError if an operator has failed and no call has said so."""
        self.fabric.check()

    def _table(self, table: GatherTable, itemsize: int) -> int | TableRefused:
        """The operator's number of a table; tables live as long as their groups, so by identity.
        Refused or not, it is the same on all ranks, because the table is.
        """
        key = (id(table), itemsize)
        if key not in self._tables:
            self._tables[key] = (table, self._freeze(table, itemsize))
        return self._tables[key][1]

    def _freeze(self, table: GatherTable, itemsize: int) -> int | TableRefused:
        segments = table.segments
        places = [self.fabric.nodes.place(0, s.rank) for s in segments]
        try:
            return self._operator.all_gather_table(
                nodes=[node for node, _ in places],
                columns=[shard for _, shard in places],
                offsets=[s.offset * itemsize for s in segments],
                nbytes=[s.numel * itemsize for s in segments],
                name=self._names.get(id(table), f"gather {len(self._tables)}"),
            )
        except TableRefused as refused:
            return refused


@dataclass(frozen=True)
class OwnedPiece:
    """``numel`` elements at ``offset`` of a group's gradients, summed at (replica, shard),
    ``start`` elements into what that rank keeps of the group.
    """

    replica: int
    shard: int
    offset: int
    numel: int
    start: int


def owned_pieces(table: TwoStageTable) -> Iterator[OwnedPiece]:
    """What a reduction sums where, segment by segment; pieces that all replicas keep at replica
    0.
    """
    for shard, pieces in enumerate(table.replicas):
        held = iter(table.shards.of(shard))
        segment = next(held, None)
        used = 0  # elements of the segment that are taken
        filled: dict[int, int] = {}  # per replica: elements that it keeps so far
        replicas = {piece.replica for piece in pieces}
        for piece in pieces:
            replica = piece.replica or 0
            left = piece.numel
            while left and segment is not None:
                taken = min(left, segment.numel - used)
                yield OwnedPiece(
                    replica, shard, segment.offset + used, taken, filled.get(replica, 0)
                )
                filled[replica] = filled.get(replica, 0) + taken
                left, used = left - taken, used + taken
                if used == segment.numel:
                    segment, used = next(held, None), 0
        if None in replicas and len(replicas) > 1:
            raise ValueError(
                f"shard {shard} mixes pieces of one replica with pieces that all replicas keep:"
                " what they keep differs from replica to replica, which takes the grouped reduction"
            )


class _Reduction(StagedWork):
    """A reduction by the operator. ``advance`` never blocks: the operator's own stages need no
    help; what all replicas keep is shared when the sums are there, in the order of the calls.
    """

    def advance(self) -> None:
        """Start the share if the sums are there."""
        while self._later and self._queue[0] is self and self._work.done():
            self._start_next()


@dataclass(frozen=True)
class _Pooled:
    """What of a group lies in the pool of every rank."""

    table: TwoStageTable  # keeps it alive, and its identity with it
    sharded: int  # where the reduced gradient lies: bytes from the start of the pool
    dtypes: frozenset[torch.dtype]  # of the unsharded gradients that lie in the pool
    name: str  # of the group


class ReadyReducer:
    """Sums over R x K ranks, by a divisor, onto owners anywhere: pooled gradients by the operator,
    others by ``fallback``.
    """

    def __init__(self, fallback: TwoStageReducer, fabric: Fabric) -> None:
        self.fallback, self.fabric = fallback, fabric
        self._operator = fabric.operators.reduce
        self._share = fabric.operators.share
        self._pooled: dict[int, _Pooled] = {}  # by identity of the table
        self._tables: dict[tuple[int, torch.dtype, torch.dtype], int] = {}
        self._shares: dict[tuple[int, torch.dtype], int] = {}
        self._queue: deque[StagedWork] = deque()

    def pool(
        self,
        table: TwoStageTable,
        sharded: int,
        dtypes: Iterable[torch.dtype],
        window_dtype: torch.dtype,
        *,
        name: str = "",
    ) -> None:
        """From now on unsharded gradients of ``dtypes`` of the group of ``table`` lie in the pool,
        its sharded gradient (of ``window_dtype``) at byte ``sharded`` of every rank's; errors call
        the group ``name``. The operators' tables are frozen now, so that no pass has to. All ranks
        call this for the same groups in the same order. Raises ValueError for a table that the
        operator cannot reduce.
        """
        for _ in owned_pieces(table):
            pass
        self._pooled[id(table)] = _Pooled(table, sharded, frozenset(dtypes), name)
        for dtype in sorted(self._pooled[id(table)].dtypes, key=str):
            self._table(table, dtype, window_dtype)
        if self._shares_of(table):
            self._share_table(table, window_dtype)

    def reduce(
        self, unsharded: Tensor, table: TwoStageTable, sharded: Tensor, *, first: bool, divisor: int
    ) -> StagedWork:
        """See TwoStageReducer.reduce. ``unsharded`` stays borrowed until the work is over. Raises
        CollectiveError where it lies in the pool of all ranks but elsewhere on this one.
        """
        held = self._pooled.get(id(table))
        if held is None or unsharded.dtype not in held.dtypes:
            return self.fallback.reduce(unsharded, table, sharded, first=first, divisor=divisor)
        base, at = self.fabric.offset_of(unsharded), held.sharded
        if base is None:
            raise CollectiveError("gradients of a pooled group are not in the pool of this rank")
        self._count(table, sharded)
        number = self._table(table, unsharded.dtype, sharded.dtype)
        with stage(STAGE_1):
            ticket = self._operator.reduce_scatter(number, base, at, first=first, divisor=divisor)
        work = Work(handles=[Ticket(self._operator, ticket)], borrows=True, name="reduction")
        later: list[tuple[str, Callable[[], Work]]] = []
        if self._shares_of(table):
            later.append((STAGE_2_SHARE, lambda: self._share_work(table, at, sharded.dtype)))
        return _Reduction(work, later, self._queue)

    def _table(self, table: TwoStageTable, unsharded: torch.dtype, sharded: torch.dtype) -> int:
        key = (id(table), unsharded, sharded)
        if key not in self._tables:
            pieces = [piece for piece in owned_pieces(table) if piece.numel]
            places = [self.fabric.nodes.place(p.replica, p.shard) for p in pieces]
            self._tables[key] = self._operator.reduce_scatter_table(
                nodes=[node for node, _ in places],
                columns=[shard for _, shard in places],
                offsets=[p.offset for p in pieces],
                numels=[p.numel for p in pieces],
                windows=[p.start for p in pieces],
                slot_dtype=unsharded,
                wire_dtype=self.fallback.wire_dtype,
                window_dtype=sharded,
                name=self._name(table, f"reduction {len(self._tables)}"),
            )
        return self._tables[key]

    def _name(self, table: TwoStageTable, otherwise: str) -> str:
        held = self._pooled.get(id(table))
        return held.name if held is not None and held.name else otherwise

    def _share_work(self, table: TwoStageTable, at: int, dtype: torch.dtype) -> Work:
        """Replica 0's sharded gradient, which holds the finished sums, to every replica."""
        assert self._share is not None
        ticket = self._share.all_gather(self._share_table(table, dtype), at)
        return Work(handles=[Ticket(self._share, ticket)], name="reduction")

    def _shares_of(self, table: TwoStageTable) -> bool:
        return self._share is not None and _kept_by_all_replicas(table)

    def _share_table(self, table: TwoStageTable, dtype: torch.dtype) -> int:
        assert self._share is not None
        key = (id(table), dtype)
        if key not in self._shares:
            nbytes = table.shards.sizes[self.fabric.shard] * dtype.itemsize
            self._shares[key] = self._share.all_gather_table(
                nodes=[0],
                columns=[0],
                offsets=[0],
                nbytes=[nbytes],
                name=self._name(table, f"share {len(self._shares)}"),
            )
        return self._shares[key]

    def _count(self, table: TwoStageTable, sharded: Tensor) -> None:
        """What the operator sends: contributions inside the replica, partial sums along the
        rail.
        """
        fallback = self.fallback
        fallback.transport.count_reduction(table.shards)
        if fallback.replicas == 1:
            return
        pieces = table.replicas[fallback.shard]
        kept_here = sum(p.numel for p in pieces if (p.replica or 0) == fallback.replica)
        fallback.count(
            (table.shards.sizes[fallback.shard] - kept_here) * fallback.wire_dtype.itemsize
        )
        if fallback.replica == 0:
            shared = sum(p.numel for p in pieces if p.replica is None)
            fallback.count(shared * (fallback.replicas - 1) * sharded.element_size())


def _kept_by_all_replicas(table: TwoStageTable) -> bool:
    return any(piece.replica is None for pieces in table.replicas for piece in pieces)
