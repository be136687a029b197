"""Pieces of matrices along the tp axis: to the rank that works on the whole, and back.

Owns the three moves of a matrix that tensor parallelism cuts: pieces to the tp owner, directions
from it, pieces to everybody. Invariant: what is put together has the logical shape, whatever the
cut, and the calls are made in one order on all tp ranks. Tested by
``tests/distributed/test_exchange.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import named
from megamuon.collectives.traffic import Traffic
from megamuon.matrices import LogicalParameter

Owner = Callable[[LogicalParameter], int]  # tp rank that works on the whole


class PieceExchange:
    """Moves pieces along one tp group; on a single tp rank every piece is a whole."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        tp: int,
        tp_rank: int,
        owner: Owner,
        traffic: Traffic,
    ) -> None:
        self.group = group
        self.tp = tp
        self.tp_rank = tp_rank
        self.owner = owner
        self.traffic = traffic

    def to_owners(
        self, parameters: Sequence[LogicalParameter], pieces: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """This rank's ``pieces`` to the tp owners; the whole matrices that this rank works on."""
        sent = [
            [piece for p, piece in zip(parameters, pieces, strict=True) if self.owner(p) == rank]
            for rank in range(self.tp)
        ]
        mine = [p for p in parameters if self.owner(p) == self.tp_rank]
        sizes = [sum(p.piece_numel(rank) for p in mine) for rank in range(self.tp)]
        received = self._swap(sent, sizes, pieces[0], "tp_gather")
        return _together(mine, received)

    def from_owners(
        self,
        parameters: Sequence[LogicalParameter],
        wholes: dict[str, Tensor],
        like: Tensor,
    ) -> list[Tensor]:
        """Whole matrices from their tp owners; this rank's piece of each of ``parameters``."""
        mine = [p for p in parameters if self.owner(p) == self.tp_rank]
        sent = [[cut_piece(wholes[p.name], p, rank) for p in mine] for rank in range(self.tp)]
        by_owner = [[p for p in parameters if self.owner(p) == rank] for rank in range(self.tp)]
        sizes = [sum(p.piece_numel(self.tp_rank) for p in held) for held in by_owner]
        received = self._swap(sent, sizes, like, "tp_scatter")
        found: dict[str, Tensor] = {}
        for held, packed in zip(by_owner, received, strict=True):
            parts = packed.split([p.piece_numel(self.tp_rank) for p in held])
            for parameter, part in zip(held, parts, strict=True):
                found[parameter.name] = part.view(parameter.piece_shape(self.tp_rank))
        return [found[parameter.name] for parameter in parameters]

    def everywhere(
        self, parameters: Sequence[LogicalParameter], pieces: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """The whole of each of ``parameters`` on every tp rank."""
        sizes = [sum(p.piece_numel(rank) for p in parameters) for rank in range(self.tp)]
        received = self._swap([list(pieces)] * self.tp, sizes, pieces[0], "tp_gather")
        return _together(parameters, received)

    def _swap(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: Tensor, name: str
    ) -> list[Tensor]:
        """``sent[t]`` to rank t; from each rank a flat tensor of ``sizes[t]`` elements."""
        packed = [
            torch.cat([t.reshape(-1) for t in parts]) if parts else like.new_empty(0)
            for parts in sent
        ]
        if self.group is None:
            return packed
        away = sum(p.numel() for rank, p in enumerate(packed) if rank != self.tp_rank)
        self.traffic.sent(name, "tp", away * like.element_size())
        received = like.new_empty(sum(sizes))
        with named(f"{name} between the tp ranks"):
            dist.all_to_all_single(
                received,
                torch.cat(packed),
                list(sizes),
                [p.numel() for p in packed],
                group=self.group,
            )
        return list(received.split(list(sizes)))


def _together(
    parameters: Sequence[LogicalParameter], received: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Whole matrices from the packed pieces of each tp rank."""
    wholes = {p.name: received[0].new_empty(p.shape) for p in parameters}
    for rank, packed in enumerate(received):
        parts = packed.split([p.piece_numel(rank) for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            place = cut_piece(wholes[parameter.name], parameter, rank)
            place.copy_(part.view(parameter.piece_shape(rank)))
    return wholes


def cut_piece(whole: Tensor, parameter: LogicalParameter, tp_rank: int) -> Tensor:
    """The view of a whole tensor that is a tp rank's piece."""
    if parameter.cut is None:
        return whole
    low, high = parameter.cut.bounds[tp_rank], parameter.cut.bounds[tp_rank + 1]
    return whole.narrow(parameter.cut.dim, low, high - low)


def sum_in_order(
    parts: Sequence[Tensor], group: dist.ProcessGroup | None, traffic: Traffic | None = None
) -> None:
    """Replace tensors by their sums over ``group``, taken in rank order, so that all ranks get the
    same bits whatever the library's own algorithm does.
    """
    if group is None or not parts:
        return
    packed = torch.cat([part.reshape(-1) for part in parts])
    world = dist.get_world_size(group)
    if traffic is not None:
        traffic.sent("tp_gradient", "tp", (world - 1) * packed.numel() * packed.element_size())
    everyone = [torch.empty_like(packed) for _ in range(world)]
    with named("tp_gradient between the tp ranks"):
        dist.all_gather(everyone, packed, group=group)
    total = everyone[0].to(torch.promote_types(packed.dtype, torch.float32), copy=True)
    for other in everyone[1:]:
        total.add_(other)
    for part, summed in zip(parts, total.split([p.numel() for p in parts]), strict=True):
        part.copy_(summed.view_as(part))
