"""The interface of a transport: segment tables in, asynchronous work out.

Owns the tables (frozen integers, made from the plan), the ``Work`` handle, the packing of segments
and the fixed-order sum that every transport without native variable-length reduction shares.
Invariant: all calls are made in one frozen order on every rank, and a transport never looks at
anything but the tables, so it cannot take a rank-local decision. Tested by
``tests/collectives/test_tables.py`` and ``tests/distributed/test_transports.py`` (against sums in
one process).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.operator_settings import OperatorGrid
from megamuon.collectives.traffic import Traffic

if TYPE_CHECKING:
    from megamuon.collectives.operators import Fabric, PooledGroup
    from megamuon.collectives.staged_work import StagedWork
    from megamuon.collectives.two_stage import TwoStageTable


@dataclass(frozen=True, kw_only=True)
class TableSegment:
    """``numel`` elements at ``offset`` of a group's flat buffer, held by ``rank`` (a rank of the
    group).
    """

    rank: int
    offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class SegmentTable:
    """Who holds what of one flat buffer; segments in order of rank, then offset, neighbours
    merged.
    """

    world: int
    segments: tuple[TableSegment, ...]

    @staticmethod
    def build(world: int, segments: Sequence[TableSegment]) -> SegmentTable:
        """Sort, merge neighbours of one rank and check that no two segments overlap."""
        merged: list[TableSegment] = []
        for segment in sorted(segments, key=lambda s: (s.rank, s.offset)):
            if not 0 <= segment.rank < world:
                raise ValueError(f"segment {segment} names a rank outside 0..{world - 1}")
            last = merged[-1] if merged else None
            if last and last.rank == segment.rank and last.offset + last.numel == segment.offset:
                merged[-1] = TableSegment(
                    rank=last.rank, offset=last.offset, numel=last.numel + segment.numel
                )
            elif segment.numel:
                merged.append(segment)
        end = 0
        for segment in sorted(merged, key=lambda s: s.offset):
            if segment.offset < end:
                raise ValueError(f"segment {segment} overlaps the one that ends at {end}")
            end = segment.offset + segment.numel
        return SegmentTable(world=world, segments=tuple(merged))

    @cached_property
    def _by_rank(self) -> dict[int, tuple[TableSegment, ...]]:
        """Every collective asks, and a table of even slices has a segment on each rank."""
        return {rank: tuple(held) for rank, held in groupby(self.segments, lambda s: s.rank)}

    def of(self, rank: int) -> tuple[TableSegment, ...]:
        """The segments that ``rank`` holds."""
        return self._by_rank.get(rank, ())

    def numel_of(self, rank: int) -> int:
        """How many elements ``rank`` holds."""
        return sum(s.numel for s in self.of(rank))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements per rank, in rank order."""
        return tuple(self.numel_of(rank) for rank in range(self.world))


# A gather sends each segment from its rank to everybody; a reduction sums each segment onto its
# rank.
GatherTable = SegmentTable
ReduceTable = SegmentTable


@dataclass(kw_only=True)
class Work:
    """A collective in flight. ``wait()`` blocks until its result is in place; it may be called
    again.
    """

    handles: list[dist.Work] = field(default_factory=list)
    finish: Callable[[], None] | None = None
    keep: tuple[Tensor, ...] = ()  # buffers that must outlive the transfer
    borrows: bool = False  # the transfer still reads the caller's buffer: keep it until wait()
    name: str = "collective"
    failure: str = ""  # what the first wait() said where a peer was lost; later ones say it again

    def wait(self) -> None:
        """Wait, then unpack or sum. Raises CollectiveError naming the operation where a peer was
        lost.
        """
        if self.failure:
            raise CollectiveError(self.failure)
        try:
            while self.handles:  # once each: Gloo's point-to-point handles hang in a second wait
                self.handles.pop(0).wait()
        except RuntimeError as error:
            self.failure = f"{self.name} failed: {error}"
            raise CollectiveError(self.failure) from error
        if self.finish is not None:
            self.finish()
        self.handles, self.finish, self.keep = [], None, ()

    def done(self) -> bool:
        """Whether ``wait()`` would return at once, but for unpacking."""
        return all(handle.is_completed() for handle in self.handles)


class CollectiveError(RuntimeError):
    """A collective did not finish: a peer died, or the ranks disagree."""


@contextmanager
def named(operation: str) -> Iterator[None]:
    """Name a blocking operation in whatever a backend raises.  Raises CollectiveError."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{operation} failed: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TransportSettings:
    """What any transport is built from.

    ``gather_group`` and ``reduce_group`` are different process groups over the same ranks: gathers
    and reductions have one frozen order each, but how the two interleave may differ from rank to
    rank (a rank that skipped a branch reduces late), so they must not share a communicator.
    ``wire_dtype`` is what a reduction sends; sums are taken in the dtype of the sharded gradient.
    ``traffic`` counts what this rank sends along ``axis``: the bytes that the table asks for, in
    the dtype they travel in, whatever the library's own algorithm moves. ``grid``: for a transport
    that makes operators of its own over the whole grid.
    """

    gather_group: dist.ProcessGroup | None
    reduce_group: dist.ProcessGroup | None
    wire_dtype: torch.dtype
    traffic: Traffic | None = None
    axis: str = "shard"
    grid: OperatorGrid | None = None


class Reducer(Protocol):
    """Sums over all ranks of a grid, divided; see ``TwoStageReducer``."""

    def reduce(
        self, unsharded: Tensor, table: TwoStageTable, sharded: Tensor, *, first: bool, divisor: int
    ) -> StagedWork:
        """Sum of ``unsharded`` over all ranks by ``divisor``, onto who keeps it."""


class Transport(abc.ABC):
    """AllGatherV and ReduceScatterV over one shard axis.

    A transport may also have a ``fabric``: operators over the whole grid, which reduce and publish,
    and a symmetric pool that whoever uses the transport opens, hands its buffers to (``pooled``)
    and plans. ``notes`` is what to tell the user about it, in order; it may grow.
    """

    name = "transport"
    fabric: Fabric | None = None

    def __init__(self, settings: TransportSettings) -> None:
        self.gather_group = settings.gather_group
        self.reduce_group = settings.reduce_group
        self.wire_dtype = settings.wire_dtype
        self.traffic = settings.traffic
        self.axis = settings.axis
        self.notes: list[str] = []
        group = self.gather_group
        self.world = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    @abc.abstractmethod
    def all_gather_v(
        self, buffer: Tensor, table: GatherTable, *, operation: str = "gather"
    ) -> Work:
        """Send each segment of ``buffer (numel,)`` from its rank to the same offset on every rank,
        in place; counted as ``operation``, one of ``traffic.OPERATIONS``.
        """

    @abc.abstractmethod
    def reduce_scatter_v(
        self,
        unsharded: Tensor,
        table: ReduceTable,
        sharded: Tensor,
        *,
        first: bool,
        divisor: int,
    ) -> Work:
        """Sum of ``unsharded (numel,)`` over the ranks by ``divisor``, each segment to its rank.

        ``sharded`` holds this rank's segments one after another in table order; the result is
        stored there if ``first``, else added. ``unsharded`` may be reused at once, or after
        ``wait()`` where the work ``borrows`` it.
        """

    def reduce_alone(
        self, unsharded: Tensor, table: ReduceTable, sharded: Tensor, *, first: bool, divisor: int
    ) -> Work:
        """``reduce_scatter_v`` on one rank: nothing travels, but the wire dtype still rounds."""
        mean_into([pack(unsharded, table.of(0), self.wire_dtype)], sharded, divisor, first=first)
        return Work(name="reduction")

    def count(self, operation: str, nbytes: int) -> None:
        """This rank sends ``nbytes`` along the transport's axis."""
        if self.traffic is not None and nbytes:
            self.traffic.sent(operation, self.axis, nbytes)

    def count_gather(self, buffer: Tensor, table: GatherTable, operation: str) -> None:
        """A gather sends this rank's segments to each other member."""
        own = table.sizes[self.rank] * buffer.element_size()
        self.count(operation, own * (self.world - 1))

    def count_reduction(self, table: ReduceTable) -> None:
        """A reduction sends each other member its segments, in the wire dtype."""
        others = sum(table.sizes) - table.sizes[self.rank]
        self.count("reduce", others * self.wire_dtype.itemsize)

    @staticmethod
    def native(buffer: Tensor) -> bool:
        """Whether NCCL moves this buffer (it does on GPUs; Gloo serves CPU ranks)."""
        return buffer.device.type == "cuda"

    def over_grid(self, reducer: Reducer) -> Reducer:
        """What reduces over the whole grid: ``reducer``, which works on this transport, or what
        takes what it can from it.
        """
        return reducer

    def pooled(self, group: PooledGroup) -> str:
        """The pool of ``fabric`` is open and ``group`` lies in it: all ranks say so, in one order.
        Why its gathers do not work there all the same, "" if they do.
        """
        return f"the transport {self.name} has no pool"

    def check_schedules(self, tables: Sequence[SegmentTable]) -> None:  # noqa: B027
        """Prove, before training, that all ranks would make the same calls for ``tables``; a
        collective.  Most transports leave that to the plan's digest.
        """

    def check(self) -> None:  # noqa: B027
        """Raise CollectiveError if a transfer has failed and nobody was told. Most fail in
        ``Work.wait``; kernels that give up on a GPU cannot.
        """

    def close(self) -> None:  # noqa: B027  (a transport may have nothing to free)
        """Free what the transport made itself; the process groups belong to whoever made them."""

    def peer(self, group: dist.ProcessGroup, rank: int) -> int:
        """The global rank of a rank of ``group``."""
        return dist.get_global_rank(group, rank)


def pack(
    buffer: Tensor, segments: Sequence[TableSegment], dtype: torch.dtype, *, alias: bool = True
) -> Tensor:
    """The segments one after another in ``dtype``; with ``alias`` a view where one segment needs no
    cast.
    """
    if len(segments) == 1 and alias:
        only = segments[0]
        return buffer[only.offset : only.offset + only.numel].to(dtype)
    if not segments:
        return buffer.new_empty(0, dtype=dtype)
    return torch.cat([buffer[s.offset : s.offset + s.numel].to(dtype) for s in segments])


def unpack(packed: Tensor, buffer: Tensor, segments: Sequence[TableSegment]) -> None:
    """Write ``packed`` back to the segments' places in ``buffer``."""
    start = 0
    for segment in segments:
        buffer[segment.offset : segment.offset + segment.numel].copy_(
            packed[start : start + segment.numel]
        )
        start += segment.numel


def mean_into(parts: Sequence[Tensor], sharded: Tensor, divisor: int, *, first: bool) -> None:
    """``sharded (+)= sum(parts) / divisor``, summed in rank order in the sharded gradient's dtype.

    The fixed order makes the sum reproducible bit for bit, whatever the transport's own algorithm
    would do.
    """
    total = parts[0].to(sharded.dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    total.div_(divisor)
    store(total, sharded, first=first)


def store(total: Tensor, sharded: Tensor, *, first: bool) -> None:
    """Put a finished reduction into its sharded gradient: stored if ``first``, else added."""
    if first:
        sharded.copy_(total)
    else:
        sharded.add_(total)
