"""Coalesced broadcasts and reduces of NCCL, in place on the group's buffers.

Owns what both torch.distributed transports do on GPUs. Invariant: the calls of one group are issued
between ``_start_coalescing`` and ``_end_coalescing`` in table order, so every rank launches the
same sequence. It needs several GPUs to run; the CPU suite covers the transports' Gloo paths.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import GatherTable, ReduceTable, Transport, Work


def coalesced_broadcasts(transport: Transport, buffer: Tensor, table: GatherTable) -> Work:
    """One broadcast per segment, grouped into one launch; in place."""
    group = transport.gather_group
    with dist._coalescing_manager(group, buffer.device, async_ops=True) as manager:
        for segment in table.segments:
            view = buffer[segment.offset : segment.offset + segment.numel]
            dist.broadcast(view, transport.peer(group, segment.rank), group=group, async_op=True)
    return Work(handles=manager.works, name="gather")


def coalesced_reduces(
    transport: Transport, slots: Tensor, table: ReduceTable, window: Tensor, *, first: bool
) -> Work:
    """One averaging reduce per segment, grouped; FP32 reduction of BF16 slots is cast at send."""
    group = transport.reduce_group
    wire = slots if slots.dtype == transport.wire_dtype else slots.to(transport.wire_dtype)
    with dist._coalescing_manager(group, slots.device, async_ops=True) as manager:
        for segment in table.segments:
            view = wire[segment.offset : segment.offset + segment.numel]
            dist.reduce(
                view,
                transport.peer(group, segment.rank),
                op=dist.ReduceOp.AVG,
                group=group,
                async_op=True,
            )

    def finish() -> None:
        mine = table.of(transport.rank)
        if mine:
            total = torch.cat([wire[s.offset : s.offset + s.numel] for s in mine])
            if first:
                window.copy_(total)
            else:
                window.add_(total)

    return Work(
        handles=manager.works, finish=finish, keep=(wire,), borrows=wire is slots, name="reduction"
    )
