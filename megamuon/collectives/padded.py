"""The ``padded`` transport: equal-size calls, every owner's part padded to the largest.

Owns the ``padded`` transport, the full (padded) variant of MatrixFSDP's ablation: what owner
layouts cost where a library offers only equal-size collectives. Padding travels and is counted. A
reduction adds in rank order on Gloo (one equal all-to-all and a local sum), so its result equals
``grouped`` bit for bit; on NCCL it is a reduce-scatter.  Tested by
``tests/distributed/test_p2p.py``.
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
    store,
    unpack,
)


class PaddedTransport(Transport):
    """All-gathers and reduce-scatters of equal, padded shares."""

    name = "padded"

    def all_gather_v(
        self, buffer: Tensor, table: GatherTable, *, operation: str = "gather"
    ) -> Work:
        """See Transport."""
        share = max(table.sizes, default=0)
        if self.world == 1 or not share:
            return Work(name="gather")
        self.count(operation, share * buffer.element_size() * (self.world - 1))
        sent = buffer.new_zeros(share)
        sent[: table.sizes[self.rank]] = pack(buffer, table.of(self.rank), buffer.dtype)
        received = buffer.new_empty(self.world * share)
        handle = _all_gather(received, sent, self.gather_group)

        def finish() -> None:
            for rank, part in enumerate(received.view(self.world, share).unbind()):
                if rank != self.rank:
                    unpack(part, buffer, table.of(rank))

        return Work(handles=[handle], finish=finish, keep=(sent, received), name="gather")

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
        share = max(table.sizes, default=0)
        if not share:
            return Work(name="reduction")
        self.count("reduce", share * self.wire_dtype.itemsize * (self.world - 1))
        mine = table.sizes[self.rank]
        sent = torch.zeros(self.world, share, dtype=self.wire_dtype, device=unsharded.device)
        for rank, size in enumerate(table.sizes):
            sent[rank, :size] = pack(unsharded, table.of(rank), self.wire_dtype)
        if self.native(unsharded):
            return self._reduce_natively(sent.view(-1), mine, sharded, divisor, first)
        received = torch.empty_like(sent)
        handle = dist.all_to_all_single(
            received.view(-1), sent.view(-1), group=self.reduce_group, async_op=True
        )

        def finish() -> None:
            if mine:
                mean_into(received[:, :mine].unbind(), sharded, divisor, first=first)

        return Work(handles=[handle], finish=finish, keep=(sent, received), name="reduction")

    def _reduce_natively(
        self, sent: Tensor, mine: int, sharded: Tensor, divisor: int, first: bool
    ) -> Work:
        """NCCL's reduce-scatter, which averages by itself where the divisor is the number of
        ranks.
        """
        average = divisor == self.world
        operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        received = sent.new_empty(sent.numel() // self.world)
        handle = _reduce_scatter(received, sent, operation, self.reduce_group)

        def finish() -> None:
            if mine:
                total = received[:mine]
                if not average:
                    total = total.to(sharded.dtype).div_(divisor)
                store(total, sharded, first=first)

        return Work(handles=[handle], finish=finish, keep=(sent, received), name="reduction")


def _all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """By either of its names: newer torch warns of the older one, older torch lacks the newer."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(received, sent, group=group, async_op=True)


def _reduce_scatter(
    received: Tensor,
    sent: Tensor,
    operation: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None,
) -> dist.Work:
    """As ``_all_gather``."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(received, sent, op=operation, group=group, async_op=True)
