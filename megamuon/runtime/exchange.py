"""Execution of compiled moves: pieces of matrices come together along an axis, and go back.

Owns the one executor of ``ownership/update_plan.py``, over one communicator per axis, and the sum
of gradients over the tp ranks. Invariants: which calls a rank makes, and in which order, follows
from the moves and the names it is asked to move alone, so the ranks of a group make the same ones;
what comes together has the logical shape, whatever the cut. Tested by
``tests/distributed/test_exchange.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives import (
    SegmentTable,
    TableSegment,
    Transport,
    TransportSettings,
    build_transport,
)
from megamuon.collectives.base import named
from megamuon.collectives.traffic import Traffic
from megamuon.mesh import Mesh
from megamuon.ownership.update_plan import Hop, Journey, LocalMove, MoveKind, compile_moves
from megamuon.placements import Axis, Piece, Placement


class Exchange:
    """Runs moves as the rank at ``place``, over a transport for each axis of several ranks."""

    def __init__(
        self,
        transports: Mapping[Axis, Transport],
        *,
        sizes: Mapping[Axis, int],
        place: Mapping[Axis, int],
        device: torch.device,
    ) -> None:
        self.sizes = sizes
        self.place = place
        self._transports = transports
        self._device = device

    def run(
        self,
        moves: Sequence[LocalMove],
        tensors: Mapping[str, Tensor],
        names: Collection[str],
        *,
        operation: str,
    ) -> dict[str, Tensor]:
        """Take ``names`` through ``moves``: from what this rank has of them in ``tensors`` to what
        it has at the end, which may be views of what it had. Counted as ``operation``.

        All ranks of a group ask for the same names. Raises CollectiveError naming operation and
        axis where a peer was lost.
        """
        held = dict(tensors)
        for move in moves:
            hops = [hop for name, hop in move.hops.items() if name in names]
            if move.kind is MoveKind.LOCAL:
                after = [_kept(hop, held.get(hop.name)) for hop in hops]
            else:
                after = self._sent(move, hops, held, operation) if hops else []
            for hop, tensor in zip(hops, after, strict=True):
                held.pop(hop.name, None)
                if tensor is not None:
                    held[hop.name] = tensor
        return held

    def whole(
        self, name: str, shape: tuple[int, ...], placement: Placement, piece: Tensor
    ) -> Tensor:
        """A tensor that lies as ``placement`` says, whole on every rank of the axes that cut it;
        ``piece`` is what this rank has. A collective over these ranks, counted as a gather.
        """
        journey = Journey(name=name, shape=shape, source=placement, target=Placement())
        moves = compile_moves([journey], self.sizes, piece.dtype)
        local = [move.at(self.place) for move in moves]
        return self.run(local, {name: piece}, (name,), operation="gather")[name]

    def _sent(
        self, move: LocalMove, hops: Sequence[Hop], held: Mapping[str, Tensor], operation: str
    ) -> list[Tensor | None]:
        """What this rank has of each tensor after one call along the axis."""
        transport = self._transports[move.axis]
        ranks = range(transport.world)
        # Elements from each rank, hop by hop.
        sizes = [[_numel(hop.receives[rank]) for hop in hops] for rank in ranks]
        totals = [sum(each) for each in sizes]
        with named(f"{operation} along {move.axis}"):
            if move.kind is MoveKind.GATHER:
                # Everybody gets the same: by the transport's own way to send one buffer to all.
                sent = self._packed(move, hops, held, transport.rank)
                packed = _gathered(transport, sent, totals, operation)
            else:
                packed = _swapped(
                    transport,
                    [self._packed(move, hops, held, rank) for rank in ranks],
                    totals,
                    operation,
                )
        parts = [flat.split(each) for flat, each in zip(packed, sizes, strict=True)]
        return [
            _together(hop, [from_rank[index] for from_rank in parts])
            for index, hop in enumerate(hops)
        ]

    def _packed(
        self, move: LocalMove, hops: Sequence[Hop], held: Mapping[str, Tensor], to: int
    ) -> Tensor:
        """What this rank sends to a rank of the axis, one part after another."""
        parts = [
            _cut(held[hop.name], hop.before, part).reshape(-1)
            for hop in hops
            if (part := hop.sends[to]) is not None
        ]
        empty = torch.empty(0, dtype=move.dtype, device=self._device)
        return torch.cat(parts) if parts else empty


def build_exchange(
    mesh: Mesh, transports: Mapping[Axis, Transport], device: torch.device
) -> Exchange:
    """What runs compiled moves on this rank."""
    return Exchange(
        transports,
        sizes=mesh.sizes,
        place=mesh.coordinates,
        device=device,
    )


def moves_along(
    axis: Axis, group: dist.ProcessGroup | None, traffic: Traffic
) -> dict[Axis, Transport]:
    """The transport of moves along an axis other than shard; none where a rank is alone there."""
    if group is None:
        return {}
    settings = TransportSettings(
        gather_group=group,
        reduce_group=None,
        wire_dtype=torch.float32,  # of reductions, which moves have none of
        traffic=traffic,
        axis=axis,
    )
    return {axis: build_transport("grouped", settings)}


def _gathered(
    transport: Transport, sent: Tensor, sizes: Sequence[int], operation: str
) -> tuple[Tensor, ...]:
    """``sent`` to every rank; from each rank a flat tensor of ``sizes[r]`` elements."""
    starts = [0, *accumulate(sizes)]
    segments = [
        TableSegment(rank=rank, offset=starts[rank], numel=size) for rank, size in enumerate(sizes)
    ]
    buffer = sent.new_empty(starts[-1])
    buffer[starts[transport.rank] : starts[transport.rank + 1]].copy_(sent)
    table = SegmentTable.build(len(sizes), segments)
    transport.all_gather_v(buffer, table, operation=operation).wait()
    return buffer.split(list(sizes))


def _swapped(
    transport: Transport, sent: Sequence[Tensor], sizes: Sequence[int], operation: str
) -> tuple[Tensor, ...]:
    """``sent[r]`` to rank r; from each rank a flat tensor of ``sizes[r]`` elements."""
    counts = [part.numel() for part in sent]
    received = sent[0].new_empty(sum(sizes))
    away = sum(counts) - counts[transport.rank]
    transport.count(operation, away * received.element_size())
    dist.all_to_all_single(
        received, torch.cat(list(sent)), list(sizes), counts, group=transport.gather_group
    )
    return received.split(list(sizes))


def _numel(piece: Piece | None) -> int:
    return 0 if piece is None else piece.numel


def _cut(tensor: Tensor, held: Piece | None, part: Piece) -> Tensor:
    """The view of ``part`` in a tensor that is ``held`` of the whole."""
    assert held is not None
    for dim, size in enumerate(part.shape):
        tensor = tensor.narrow(dim, part.offset[dim] - held.offset[dim], size)
    return tensor


def _kept(hop: Hop, tensor: Tensor | None) -> Tensor | None:
    """What is left of a tensor that this rank may have had all of."""
    if tensor is None or not _numel(hop.after):
        return None
    assert hop.after is not None
    return _cut(tensor, hop.before, hop.after)


def _together(hop: Hop, parts: Sequence[Tensor]) -> Tensor | None:
    """What a rank has after a move, from the flat ``parts`` of each rank of the axis."""
    if hop.after is None or not hop.after.numel:
        return None
    pieces = [(p, part) for p, part in zip(hop.receives, parts, strict=True) if p is not None]
    if len(pieces) == 1:
        return pieces[0][1].view(hop.after.shape)
    whole = parts[0].new_empty(hop.after.shape)
    for piece, part in pieces:
        _cut(whole, hop.after, piece).copy_(part.view(piece.shape))
    return whole


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
