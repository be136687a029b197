"""The ``per_owner`` transport: one broadcast or reduce per owner of a layer group.

Owns the ``per_owner`` transport: a broadcast per source rank and a reduce per destination rank, all
asynchronous. It is what a straightforward implementation does, and the baseline that grouped calls
and our own operators are compared with. Invariant: calls are issued in rank order on every rank.
Tested by ``tests/distributed/test_transports.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import (
    GatherTable,
    ReduceTable,
    TableSegment,
    Transport,
    Work,
    mean_into,
    pack,
    unpack,
)


class PerOwnerTransport(Transport):
    """Each owner of a layer in a call of its own."""

    name = "per_owner"

    def all_gather_v(
        self, buffer: Tensor, table: GatherTable, *, operation: str = "gather"
    ) -> Work:
        """See Transport.  One contiguous segment is broadcast in place; several are packed."""
        if self.world == 1:
            return Work(name="gather")
        self.count_gather(buffer, table, operation)
        handles, kept, unpackings = [], [], []
        for rank, size in enumerate(table.sizes):
            if not size:
                continue
            segments = table.of(rank)
            if len(segments) == 1 or rank == self.rank:
                message = pack(buffer, segments, buffer.dtype)
            else:
                message = buffer.new_empty(size)
            source = self.peer(self.gather_group, rank)
            handles.append(dist.broadcast(message, source, group=self.gather_group, async_op=True))
            kept.append(message)
            if rank != self.rank and len(segments) > 1:
                unpackings.append((message, segments))

        def finish() -> None:
            for message, segments in unpackings:
                unpack(message, buffer, segments)

        return Work(handles=handles, finish=finish, keep=tuple(kept), name="gather")

    def reduce_scatter_v(
        self,
        unsharded: Tensor,
        table: ReduceTable,
        sharded: Tensor,
        *,
        first: bool,
        divisor: int,
    ) -> Work:
        """See Transport. A 16-bit wire is gathered to the owner and summed there, so that it adds
        in FP32.
        """
        if self.world == 1:
            return self.reduce_alone(unsharded, table, sharded, first=first, divisor=divisor)
        self.count_reduction(table)
        handles, kept = [], []
        finish: Callable[[], None] | None = None
        for rank, size in enumerate(table.sizes):
            if not size:
                continue
            handle, parts = self._to_owner(unsharded, table.of(rank), rank)
            handles.append(handle)
            kept.extend(parts)
            if rank == self.rank:
                finish = self._finisher(parts, sharded, divisor, first)
        return Work(handles=handles, finish=finish, keep=tuple(kept), name="reduction")

    def _to_owner(
        self, unsharded: Tensor, segments: tuple[TableSegment, ...], rank: int
    ) -> tuple[dist.Work, list[Tensor]]:
        destination = self.peer(self.reduce_group, rank)
        # A reduce writes into its input on the destination: hand it a copy.
        message = pack(unsharded, segments, self.wire_dtype, alias=False)
        if self.wire_dtype.itemsize >= 4 or self.native(unsharded):
            handle = dist.reduce(message, destination, group=self.reduce_group, async_op=True)
            return handle, [message]
        parts = None
        if rank == self.rank:
            parts = list(torch.empty(self.world, message.numel(), dtype=message.dtype).unbind())
        handle = dist.gather(
            message, parts, dst=destination, group=self.reduce_group, async_op=True
        )
        return handle, parts if parts is not None else [message]

    def _finisher(
        self, parts: list[Tensor], sharded: Tensor, divisor: int, first: bool
    ) -> Callable[[], None]:
        return lambda: mean_into(parts, sharded, divisor, first=first)
