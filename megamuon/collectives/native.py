"""Coalesced broadcasts and reduces of NCCL, in place on the group's buffers.

Owns what both torch.distributed transports do on GPUs. Invariant: the calls of one group are issued
between ``_start_coalescing`` and ``_end_coalescing`` in table order, so every rank launches the
same sequence. It needs several GPUs to run; the CPU suite covers the transports' Gloo paths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import GatherTable, ReduceTable, Transport, Work, store


def coalesced_broadcasts(transport: Transport, buffer: Tensor, table: GatherTable) -> Work:
    """One broadcast per segment, grouped into one launch; in place."""
    group = transport.gather_group
    with dist._coalescing_manager(group, buffer.device, async_ops=True) as manager:
        for segment in table.segments:
            view = buffer[segment.offset : segment.offset + segment.numel]
            dist.broadcast(view, transport.peer(group, segment.rank), group=group, async_op=True)
    return Work(handles=manager.works, name="gather")


def reduce_views(
    group: dist.ProcessGroup,
    views: Sequence[tuple[Tensor, int]],
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[dist.Work]:
    """Reduce each ``(view, rank of the group)`` onto its rank, in place, in one launch."""
    if not views:
        return []
    with dist._coalescing_manager(group, views[0][0].device, async_ops=True) as manager:
        for view, rank in views:
            root = dist.get_global_rank(group, rank)
            dist.reduce(view, root, op=operation, group=group, async_op=True)
    return manager.works


def coalesced_reduces(
    transport: Transport,
    unsharded: Tensor,
    table: ReduceTable,
    sharded: Tensor,
    *,
    first: bool,
    divisor: int,
) -> Work:
    """One reduce per segment, grouped; FP32 reduction of BF16 unsharded gradients is cast at send.

    NCCL averages by itself where the divisor is the number of ranks.
    """
    wire = (
        unsharded if unsharded.dtype == transport.wire_dtype else unsharded.to(transport.wire_dtype)
    )
    average = divisor == transport.world
    handles = reduce_views(
        transport.reduce_group,
        [(wire[s.offset : s.offset + s.numel], s.rank) for s in table.segments],
        dist.ReduceOp.AVG if average else dist.ReduceOp.SUM,
    )

    def finish() -> None:
        mine = table.of(transport.rank)
        if mine:
            total = torch.cat([wire[s.offset : s.offset + s.numel] for s in mine])
            if not average:
                total = total.to(sharded.dtype).div_(divisor)
            store(total, sharded, first=first)

    return Work(
        handles=handles, finish=finish, keep=(wire,), borrows=wire is unsharded, name="reduction"
    )
