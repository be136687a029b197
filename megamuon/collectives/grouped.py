"""The ``grouped`` transport: one call of the collectives library per layer group.

Owns the ``grouped`` transport. On Gloo a gather and a reduction are each one uneven
``all_to_all_single`` (Gloo has no uneven all-gather, and its own reductions change their order of
additions with the buffer's layout), the reduction with a local sum in rank order. On NCCL they are
one coalesced group of broadcasts or reduces on the buffer itself. Invariant: one launch per call,
asynchronous on both. Tested by ``tests/distributed/test_transports.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import (
    GatherTable,
    ReduceTable,
    Transport,
    Work,
    mean_into,
    pack,
    unpack,
)
from megamuon.collectives.native import coalesced_broadcasts, coalesced_reduces


class GroupedTransport(Transport):
    """All owners of a layer in one grouped call."""

    name = "grouped"

    def all_gather_v(
        self, buffer: Tensor, table: GatherTable, *, operation: str = "gather"
    ) -> Work:
        """See Transport."""
        if self.world == 1:
            return Work(name="gather")
        self.count_gather(buffer, table, operation)
        if self.native(buffer):
            return coalesced_broadcasts(self, buffer, table)
        sizes = table.sizes
        mine = pack(buffer, table.of(self.rank), buffer.dtype)
        peers = self.world - 1
        sent = mine.repeat(peers)
        received = buffer.new_empty(sum(sizes) - sizes[self.rank])
        handle = dist.all_to_all_single(
            received,
            sent,
            [0 if rank == self.rank else size for rank, size in enumerate(sizes)],
            [0 if rank == self.rank else sizes[self.rank] for rank in range(self.world)],
            group=self.gather_group,
            async_op=True,
        )
        others = [segment for segment in table.segments if segment.rank != self.rank]
        return Work(
            handles=[handle],
            finish=lambda: unpack(received, buffer, others),
            keep=(sent, received),
            name="gather",
        )

    def reduce_scatter_v(
        self,
        unsharded: Tensor,
        table: ReduceTable,
        sharded: Tensor,
        *,
        first: bool,
        divisor: int,
    ) -> Work:
        """See Transport."""
        if self.world == 1:
            return self.reduce_alone(unsharded, table, sharded, first=first, divisor=divisor)
        self.count_reduction(table)
        if self.native(unsharded):
            return coalesced_reduces(self, unsharded, table, sharded, first=first, divisor=divisor)
        sizes = table.sizes
        mine = sizes[self.rank]
        sent = pack(unsharded, table.segments, self.wire_dtype, alias=False)
        received = torch.empty(self.world * mine, dtype=self.wire_dtype, device=unsharded.device)
        handle = dist.all_to_all_single(
            received,
            sent,
            [mine] * self.world,
            list(sizes),
            group=self.reduce_group,
            async_op=True,
        )

        def finish() -> None:
            if mine:
                mean_into(received.view(self.world, mine).unbind(), sharded, divisor, first=first)

        return Work(handles=[handle], finish=finish, keep=(sent, received), name="reduction")
