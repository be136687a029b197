"""The reduction over a grid of ranks (HSDP): inside each replica, then along the rail.

Owns ``TwoStageReducer`` and its tables. Stage 1 sums the gradients of a replica onto the shard that
keeps them; stage 2 sums what the ranks of that rail hold onto the owner's replica, or onto every
replica where all replicas keep it.  Invariant: one order of additions, whatever the transport and
the timing. Inside a replica k = 0 .. K-1, added in the output's dtype and rounded to the wire
dtype; then, for an owner in replica o, the replicas o+1, o+2, ..., o (mod R), added in the output's
dtype and rounded to the wire dtype before each further hop, but not after the last addition, which
is the owner's; then one division, by what the caller says. A piece that all replicas keep is summed
as if replica 0 owned it, element by element, so its value depends neither on how it is cut nor on
the replica. One replica is the one-axis sum, to the bit. Tested by
``tests/distributed/test_two_stage.py`` (against sums in one process), tables by
``tests/collectives/test_staged_work.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import SegmentTable, Transport, Work, store
from megamuon.collectives.native import reduce_views
from megamuon.collectives.staged_work import STAGE_1, STAGE_2, STAGE_2_SHARE, StagedWork, stage
from megamuon.collectives.traffic import Traffic


@dataclass(frozen=True)
class ReplicaSegment:
    """``numel`` elements at ``start`` of what a rail holds after stage 1 (its segments packed in
    table order). ``replica`` is the owner's replica; None: every replica keeps them.
    """

    start: int
    numel: int
    replica: int | None


@dataclass(frozen=True)
class TwoStageTable:
    """``shards``: which shard of a replica sums what (its ranks are shards); ``replicas[c]``: the
    pieces of shard c, in order and without gaps.
    """

    shards: SegmentTable
    replicas: tuple[tuple[ReplicaSegment, ...], ...]

    def __post_init__(self) -> None:
        if len(self.replicas) != self.shards.world:
            raise ValueError(
                f"pieces of {len(self.replicas)} shards for a table of {self.shards.world} shards"
            )
        for shard, pieces in enumerate(self.replicas):
            end = 0
            for piece in pieces:
                if piece.start != end or piece.numel < 0 or (piece.replica or 0) < 0:
                    raise ValueError(
                        f"shard {shard}: {piece} does not follow the piece that ends at {end}"
                    )
                end += piece.numel
            if end != self.shards.sizes[shard]:
                raise ValueError(
                    f"shard {shard}: pieces of {end} elements in all, but the rail holds"
                    f" {self.shards.sizes[shard]}"
                )

    def pieces(self, shard: int, replica: int) -> tuple[ReplicaSegment, ...]:
        """What the rank in ``replica`` and ``shard`` keeps, in the order of its output."""
        return tuple(piece for piece in self.replicas[shard] if piece.replica in (replica, None))

    def numel_of(self, shard: int, replica: int) -> int:
        """Elements of that rank's output."""
        return sum(piece.numel for piece in self.pieces(shard, replica))


class TwoStageReducer:
    """Sums over R x K ranks, by a divisor, onto owners anywhere in the grid.

    ``transport`` runs along the replica (shard axis), stage 2 on ``replicate_group`` (replicate
    axis, its ranks are the replicas; None for one replica), which must be another group than the
    transport's. All ranks call ``reduce`` in one frozen order.
    """

    def __init__(
        self,
        transport: Transport,
        replicate_group: dist.ProcessGroup | None,
        *,
        shard: int,
        replica: int,
        replicas: int,
        shards: int,
        wire_dtype: torch.dtype,
        traffic: Traffic | None = None,
    ) -> None:
        place = (transport.rank, transport.world)
        if place != (shard, shards):
            raise ValueError(
                f"the transport is rank {place[0]} of {place[1]}, not shard {shard} of {shards}"
            )
        held = (0, 1) if replicate_group is None else _place(replicate_group)
        if held != (replica, replicas):
            raise ValueError(
                f"the rail's group is rank {held[0]} of {held[1]}, not replica {replica} of"
                f" {replicas}"
            )
        self.transport, self.replicate_group = transport, replicate_group
        self.shard, self.replica, self.replicas, self.shards = shard, replica, replicas, shards
        self.wire_dtype, self.traffic = wire_dtype, traffic
        self._queue: deque[StagedWork] = deque()

    def reduce(
        self, unsharded: Tensor, table: TwoStageTable, sharded: Tensor, *, first: bool, divisor: int
    ) -> StagedWork:
        """Sum of ``unsharded (numel,)`` over all ranks by ``divisor``: stored in ``sharded`` if
        ``first``, else added.

        ``sharded`` holds this rank's pieces (``table.pieces``) back to back; sums are taken in its
        dtype. Raises ValueError for an output of another size and for a replica outside the grid.
        """
        pieces = table.replicas[self.shard]
        wanted = table.numel_of(self.shard, self.replica)
        if sharded.numel() != wanted:
            raise ValueError(f"an output of {sharded.numel()} elements for pieces of {wanted}")
        if any(piece.replica is not None and piece.replica >= self.replicas for piece in pieces):
            raise ValueError(
                f"a piece of shard {self.shard} names a replica outside {self.replicas}"
            )
        with stage(STAGE_1):
            if self.replicas == 1:
                alone = self.transport.reduce_scatter_v(
                    unsharded, table.shards, sharded, first=first, divisor=divisor
                )
                return StagedWork(alone, (), self._queue)
            staged = sharded.new_empty(table.shards.sizes[self.shard])
            work = self.transport.reduce_scatter_v(
                unsharded, table.shards, staged, first=True, divisor=1
            )
        later: Sequence[tuple[str, Callable[[], Work]]] = ()
        if staged.numel():
            kind = _NativeRail if self.transport.native(unsharded) else _GlooRail
            later = kind(self, pieces, staged, _Target(sharded, first, divisor)).stages()
        return StagedWork(work, later, self._queue)

    def count(self, nbytes: int) -> None:
        """This rank sends ``nbytes`` along the rail."""
        if self.traffic is not None and nbytes:
            self.traffic.sent("reduce", "replicate", nbytes)


@dataclass(frozen=True)
class _Target:
    """Where finished sums go."""

    sharded: Tensor
    first: bool
    divisor: int

    def take(self, total: Tensor) -> None:
        """The one division, and the output."""
        store(total.div_(self.divisor), self.sharded, first=self.first)


class _GlooRail:
    """Stage 2 as one uneven exchange of replica sums, added up locally in the canonical order, and
    one of finished sums where all replicas keep some.

    Each replica adds up its own pieces and a share of those that all replicas keep. The finished
    sums travel in the output's dtype: rounded to a 16-bit wire they would lose what one replica
    keeps.
    """

    def __init__(
        self,
        reducer: TwoStageReducer,
        pieces: Sequence[ReplicaSegment],
        staged: Tensor,
        target: _Target,
    ) -> None:
        self.reducer, self.pieces, self.target = reducer, pieces, target
        self.staged: Tensor | None = staged
        replicas = range(reducer.replicas)
        self.owned = [
            [(p.start, p.numel) for p in pieces if p.replica == replica] for replica in replicas
        ]
        common = [p for p in pieces if p.replica is None]
        self.shared = [
            [_share(p, replica, reducer.replicas) for p in common] for replica in replicas
        ]
        sharded = target.sharded
        self.total = sharded.new_empty(0)
        self.shares: list[Tensor] = [sharded.new_empty(_length(cut)) for cut in self.shared]

    def stages(self) -> list[tuple[str, Callable[[], Work]]]:
        """What follows stage 1."""
        stages = [(STAGE_2, self.exchange)]
        if any(_length(cut) for cut in self.shared):
            stages.append((STAGE_2_SHARE, self.share))
        return stages

    def exchange(self) -> Work:
        """Send every replica the replica sums that it adds up."""
        reducer, staged = self.reducer, self.staged
        assert staged is not None  # started once
        cuts = [own + share for own, share in zip(self.owned, self.shared, strict=True)]
        sizes = [_length(cut) for cut in cuts]
        views = [staged[start : start + numel] for cut in cuts for start, numel in cut]
        sent = torch.cat([view.to(reducer.wire_dtype) for view in views])
        self.staged = None
        mine = sizes[reducer.replica]
        received = sent.new_empty(reducer.replicas * mine)
        handle = dist.all_to_all_single(
            received,
            sent,
            [mine] * reducer.replicas,
            sizes,
            group=reducer.replicate_group,
            async_op=True,
        )
        reducer.count((sent.numel() - mine) * sent.element_size())

        def finish() -> None:
            parts = received.view(reducer.replicas, mine)
            own = _length(self.owned[reducer.replica])
            dtype = self.target.sharded.dtype
            self.total = chain_sum(parts[:, :own], reducer.replica, dtype)
            self.shares[reducer.replica] = chain_sum(parts[:, own:], 0, dtype)
            if not any(share.numel() for share in self.shares):
                self.target.take(self.total)

        return Work(handles=[handle], finish=finish, keep=(sent, received), name="reduction")

    def share(self) -> Work:
        """Send every other replica the sums that this one has finished."""
        reducer, own = self.reducer, self.shares[self.reducer.replica]
        here = reducer.replica
        sizes = [0 if replica == here else part.numel() for replica, part in enumerate(self.shares)]
        sent = own.repeat(reducer.replicas - 1)
        received = own.new_empty(sum(sizes))
        handle = dist.all_to_all_single(
            received,
            sent,
            sizes,
            [0 if replica == here else own.numel() for replica in range(reducer.replicas)],
            group=reducer.replicate_group,
            async_op=True,
        )
        reducer.count(sent.numel() * sent.element_size())

        def finish() -> None:
            shares = list(received.split(sizes))
            shares[here] = own
            self.target.take(self._assemble(shares))

        return Work(handles=[handle], finish=finish, keep=(sent, received), name="reduction")

    def _assemble(self, shares: Sequence[Tensor]) -> Tensor:
        """Pieces in the order of the output, from the owner's sums and all replicas' shares."""
        replicas = self.reducer.replicas
        parts: list[Tensor] = []
        taken, used = 0, [0] * replicas
        for piece in self.pieces:
            if piece.replica == self.reducer.replica:
                parts.append(self.total[taken : taken + piece.numel])
                taken += piece.numel
            elif piece.replica is None:
                for replica in range(replicas):
                    _, numel = _share(piece, replica, replicas)
                    parts.append(shares[replica][used[replica] : used[replica] + numel])
                    used[replica] += numel
        return torch.cat(parts)


class _NativeRail:
    """Stage 2 on NCCL: one launch of reduces onto the owners' replicas and one all-reduce of what
    all replicas keep, both in the wire dtype. NCCL chooses the order of additions and rounds in its
    own way, on one axis as well, so nothing is kept here that one replica would lose. It needs
    several GPUs to run.
    """

    def __init__(
        self,
        reducer: TwoStageReducer,
        pieces: Sequence[ReplicaSegment],
        staged: Tensor,
        target: _Target,
    ) -> None:
        self.reducer, self.pieces, self.target = reducer, pieces, target
        self.staged: Tensor | None = staged

    def stages(self) -> list[tuple[str, Callable[[], Work]]]:
        """What follows stage 1."""
        return [(STAGE_2, self.start)]

    def start(self) -> Work:
        """All ranks of the rail launch the reduces, then the all-reduce."""
        reducer, group = self.reducer, self.reducer.replicate_group
        assert self.staged is not None and group is not None  # started once, on several replicas
        wire, self.staged = self.staged.to(reducer.wire_dtype), None
        views = [wire[piece.start : piece.start + piece.numel] for piece in self.pieces]
        pairs = [
            (view, p.replica, p) for view, p in zip(views, self.pieces, strict=True) if p.numel
        ]
        handles = reduce_views(
            group, [(view, replica) for view, replica, _ in pairs if replica is not None]
        )
        common = [view for view, replica, _ in pairs if replica is None]
        packed = torch.cat(common) if common else wire.new_empty(0)
        if common:
            handles = [*handles, dist.all_reduce(packed, group=group, async_op=True)]
        self._count(packed.numel() * packed.element_size(), wire.element_size())

        def finish() -> None:
            start, parts = 0, []
            for view, replica, piece in pairs:
                if replica is None:
                    parts.append(packed[start : start + piece.numel])
                    start += piece.numel
                elif replica == reducer.replica:
                    parts.append(view)
            if parts:
                total = torch.cat(parts).to(self.target.sharded.dtype)
                self.target.take(total)

        return Work(handles=handles, finish=finish, keep=(wire, packed), name="reduction")

    def _count(self, common_bytes: int, itemsize: int) -> None:
        """An all-reduce is a reduction and a gather of a share per replica."""
        reducer = self.reducer
        others = sum(p.numel for p in self.pieces if p.replica not in (reducer.replica, None))
        reducer.count(others * itemsize)
        cuts = [
            _share(p, reducer.replica, reducer.replicas)[1]
            for p in self.pieces
            if p.replica is None
        ]
        own = sum(cuts) * itemsize
        reducer.count(common_bytes - own + own * (reducer.replicas - 1))


def chain_sum(parts: Tensor, owner: int, dtype: torch.dtype) -> Tensor:
    """Sum of ``parts (replicas, numel)``, one replica sum each, in the order of a chain that ends
    at ``owner``; ``dtype`` adds, the parts' dtype is what a hop carries.
    """
    replicas = len(parts)
    order = [(owner + 1 + hop) % replicas for hop in range(replicas)]
    total = parts[order[0]].to(dtype, copy=True)
    for hop, replica in enumerate(order[1:]):
        if hop:
            total = total.to(parts.dtype).to(dtype)
        total.add_(parts[replica])
    return total


def _share(piece: ReplicaSegment, replica: int, replicas: int) -> tuple[int, int]:
    """Start and length of the part of an all-replica piece that ``replica`` adds up, as torch.chunk
    cuts.
    """
    size = -(-piece.numel // replicas)
    start, stop = min(replica * size, piece.numel), min((replica + 1) * size, piece.numel)
    return piece.start + start, stop - start


def _length(cut: Sequence[tuple[int, int]]) -> int:
    return sum(numel for _, numel in cut)


def _place(group: dist.ProcessGroup) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)
