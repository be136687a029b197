"""The reduction over a grid of ranks (HSDP): inside each row, then along the column.

Owns ``TwoStageReducer`` and its tables. Stage 1 sums the gradients of a row onto the column that
keeps them; stage 2 sums what the rows of that column hold onto the owner's row, or onto every row
where all rows keep it.  Invariant: one order of additions, whatever the transport and the timing.
Inside a row k = 0 .. K-1, added in the window's dtype and rounded to the wire dtype; then, for an
owner in row o, the rows o+1, o+2, ..., o (mod R), added in the window's dtype and rounded to the
wire dtype before each further hop, but not after the last addition, which is the owner's; then one
division by R*K. A piece that all rows keep is summed as if row 0 owned it, element by element, so
its value depends neither on how it is cut nor on the row. One row is the one-axis mean, to the bit.
Tested by ``tests/distributed/test_two_stage.py`` (against sums in one process), tables by
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
class RowSegment:
    """``numel`` elements at ``start`` of what a column holds after stage 1 (its segments packed in
    table order). ``row`` is the owner's row; None: every row keeps them.
    """

    start: int
    numel: int
    row: int | None


@dataclass(frozen=True)
class TwoStageTable:
    """``columns``: which column of a row sums what (its ranks are columns); ``rows[c]``: the pieces
    of column c, in order and without gaps.
    """

    columns: SegmentTable
    rows: tuple[tuple[RowSegment, ...], ...]

    def __post_init__(self) -> None:
        if len(self.rows) != self.columns.world:
            raise ValueError(
                f"pieces of {len(self.rows)} columns for a table of {self.columns.world} columns"
            )
        for column, pieces in enumerate(self.rows):
            end = 0
            for piece in pieces:
                if piece.start != end or piece.numel < 0 or (piece.row or 0) < 0:
                    raise ValueError(
                        f"column {column}: {piece} does not follow the piece that ends at {end}"
                    )
                end += piece.numel
            if end != self.columns.sizes[column]:
                raise ValueError(
                    f"column {column}: pieces of {end} elements in all, but the column holds"
                    f" {self.columns.sizes[column]}"
                )

    def pieces(self, column: int, row: int) -> tuple[RowSegment, ...]:
        """What the rank in ``row`` and ``column`` keeps, in the order of its window."""
        return tuple(piece for piece in self.rows[column] if piece.row in (row, None))

    def numel_of(self, column: int, row: int) -> int:
        """Elements of that rank's window."""
        return sum(piece.numel for piece in self.pieces(column, row))


class TwoStageReducer:
    """Means over R x K ranks onto owners anywhere in the grid.

    ``transport`` runs along the row (shard axis), stage 2 on ``column_group`` (replicate axis, its
    ranks are the rows; None for one row), which must be another group than the transport's. All
    ranks call ``reduce`` in one frozen order.
    """

    def __init__(
        self,
        transport: Transport,
        column_group: dist.ProcessGroup | None,
        *,
        column: int,
        row: int,
        rows: int,
        columns: int,
        wire_dtype: torch.dtype,
        traffic: Traffic | None = None,
    ) -> None:
        place = (transport.rank, transport.world)
        if place != (column, columns):
            raise ValueError(
                f"the transport is rank {place[0]} of {place[1]}, not column {column} of {columns}"
            )
        held = (0, 1) if column_group is None else _place(column_group)
        if held != (row, rows):
            raise ValueError(
                f"the column's group is rank {held[0]} of {held[1]}, not row {row} of {rows}"
            )
        self.transport, self.column_group = transport, column_group
        self.column, self.row, self.rows, self.columns = column, row, rows, columns
        self.wire_dtype, self.traffic = wire_dtype, traffic
        self._queue: deque[StagedWork] = deque()

    def reduce(
        self, slots: Tensor, table: TwoStageTable, window: Tensor, *, first: bool
    ) -> StagedWork:
        """Mean of ``slots (numel,)`` over all ranks: stored in ``window`` if ``first``, else added.

        ``window`` holds this rank's pieces (``table.pieces``) back to back; sums are taken in its
        dtype. Raises ValueError for a window of another size and for a row outside the grid.
        """
        pieces = table.rows[self.column]
        wanted = table.numel_of(self.column, self.row)
        if window.numel() != wanted:
            raise ValueError(f"a window of {window.numel()} elements for pieces of {wanted}")
        if any(piece.row is not None and piece.row >= self.rows for piece in pieces):
            raise ValueError(f"a piece of column {self.column} names a row outside {self.rows}")
        with stage(STAGE_1):
            if self.rows == 1:
                alone = self.transport.reduce_scatter_v(
                    slots, table.columns, window, first=first, divisor=self.columns
                )
                return StagedWork(alone, (), self._queue)
            staged = window.new_empty(table.columns.sizes[self.column])
            work = self.transport.reduce_scatter_v(
                slots, table.columns, staged, first=True, divisor=1
            )
        later: Sequence[tuple[str, Callable[[], Work]]] = ()
        if staged.numel():
            kind = _NativeColumn if self.transport.native(slots) else _GlooColumn
            later = kind(self, pieces, staged, window, first).stages()
        return StagedWork(work, later, self._queue)

    def count(self, nbytes: int) -> None:
        """This rank sends ``nbytes`` along the column."""
        if self.traffic is not None and nbytes:
            self.traffic.sent("reduce", "replicate", nbytes)

    def finish(self, total: Tensor, window: Tensor, *, first: bool) -> None:
        """The one division, and the window."""
        store(total.div_(self.rows * self.columns), window, first=first)


class _GlooColumn:
    """Stage 2 as one uneven exchange of row sums, added up locally in the canonical order, and one
    of finished sums where all rows keep some.

    Each row adds up its own pieces and a share of those that all rows keep. The finished sums
    travel in the window's dtype: rounded to a 16-bit wire they would lose what one row keeps.
    """

    def __init__(
        self,
        reducer: TwoStageReducer,
        pieces: Sequence[RowSegment],
        staged: Tensor,
        window: Tensor,
        first: bool,
    ) -> None:
        self.reducer, self.pieces, self.window, self.first = reducer, pieces, window, first
        self.staged: Tensor | None = staged
        rows = range(reducer.rows)
        self.owned = [[(p.start, p.numel) for p in pieces if p.row == row] for row in rows]
        common = [p for p in pieces if p.row is None]
        self.shared = [[_share(p, row, reducer.rows) for p in common] for row in rows]
        self.total = window.new_empty(0)
        self.shares: list[Tensor] = [window.new_empty(_length(cut)) for cut in self.shared]

    def stages(self) -> list[tuple[str, Callable[[], Work]]]:
        """What follows stage 1."""
        stages = [(STAGE_2, self.exchange)]
        if any(_length(cut) for cut in self.shared):
            stages.append((STAGE_2_SHARE, self.share))
        return stages

    def exchange(self) -> Work:
        """Send every row the row sums that it adds up."""
        reducer, staged = self.reducer, self.staged
        assert staged is not None  # started once
        cuts = [own + share for own, share in zip(self.owned, self.shared, strict=True)]
        sizes = [_length(cut) for cut in cuts]
        views = [staged[start : start + numel] for cut in cuts for start, numel in cut]
        sent = torch.cat([view.to(reducer.wire_dtype) for view in views])
        self.staged = None
        mine = sizes[reducer.row]
        received = sent.new_empty(reducer.rows * mine)
        handle = dist.all_to_all_single(
            received,
            sent,
            [mine] * reducer.rows,
            sizes,
            group=reducer.column_group,
            async_op=True,
        )
        reducer.count((sent.numel() - mine) * sent.element_size())

        def finish() -> None:
            parts = received.view(reducer.rows, mine)
            own = _length(self.owned[reducer.row])
            dtype = self.window.dtype
            self.total = chain_sum(parts[:, :own], reducer.row, dtype)
            self.shares[reducer.row] = chain_sum(parts[:, own:], 0, dtype)
            if not any(share.numel() for share in self.shares):
                reducer.finish(self.total, self.window, first=self.first)

        return Work(handles=[handle], finish=finish, keep=(sent, received), name="reduction")

    def share(self) -> Work:
        """Send every other row the sums that this one has finished."""
        reducer, own = self.reducer, self.shares[self.reducer.row]
        here = reducer.row
        sizes = [0 if row == here else part.numel() for row, part in enumerate(self.shares)]
        sent = own.repeat(reducer.rows - 1)
        received = own.new_empty(sum(sizes))
        handle = dist.all_to_all_single(
            received,
            sent,
            sizes,
            [0 if row == here else own.numel() for row in range(reducer.rows)],
            group=reducer.column_group,
            async_op=True,
        )
        reducer.count(sent.numel() * sent.element_size())

        def finish() -> None:
            shares = list(received.split(sizes))
            shares[here] = own
            reducer.finish(self._assemble(shares), self.window, first=self.first)

        return Work(handles=[handle], finish=finish, keep=(sent, received), name="reduction")

    def _assemble(self, shares: Sequence[Tensor]) -> Tensor:
        """Pieces in window order, from the owner's sums and all rows' shares."""
        rows = self.reducer.rows
        parts: list[Tensor] = []
        taken, used = 0, [0] * rows
        for piece in self.pieces:
            if piece.row == self.reducer.row:
                parts.append(self.total[taken : taken + piece.numel])
                taken += piece.numel
            elif piece.row is None:
                for row in range(rows):
                    _, numel = _share(piece, row, rows)
                    parts.append(shares[row][used[row] : used[row] + numel])
                    used[row] += numel
        return torch.cat(parts)


class _NativeColumn:
    """Stage 2 on NCCL: one launch of reduces onto the owners' rows and one all-reduce of what all
    rows keep, both in the wire dtype. NCCL chooses the order of additions and rounds in its own
    way, on one axis as well, so nothing is kept here that one row would lose. It needs several
    GPUs to run.
    """

    def __init__(
        self,
        reducer: TwoStageReducer,
        pieces: Sequence[RowSegment],
        staged: Tensor,
        window: Tensor,
        first: bool,
    ) -> None:
        self.reducer, self.pieces, self.window, self.first = reducer, pieces, window, first
        self.staged: Tensor | None = staged

    def stages(self) -> list[tuple[str, Callable[[], Work]]]:
        """What follows stage 1."""
        return [(STAGE_2, self.start)]

    def start(self) -> Work:
        """All ranks of the column launch the reduces, then the all-reduce."""
        reducer, group = self.reducer, self.reducer.column_group
        assert self.staged is not None and group is not None  # started once, on several rows
        wire, self.staged = self.staged.to(reducer.wire_dtype), None
        views = [wire[piece.start : piece.start + piece.numel] for piece in self.pieces]
        pairs = [(view, p.row, p) for view, p in zip(views, self.pieces, strict=True) if p.numel]
        handles = reduce_views(group, [(view, row) for view, row, _ in pairs if row is not None])
        common = [view for view, row, _ in pairs if row is None]
        packed = torch.cat(common) if common else wire.new_empty(0)
        if common:
            handles = [*handles, dist.all_reduce(packed, group=group, async_op=True)]
        self._count(packed.numel() * packed.element_size(), wire.element_size())

        def finish() -> None:
            start, parts = 0, []
            for view, row, piece in pairs:
                if row is None:
                    parts.append(packed[start : start + piece.numel])
                    start += piece.numel
                elif row == reducer.row:
                    parts.append(view)
            if parts:
                total = torch.cat(parts).to(self.window.dtype)
                reducer.finish(total, self.window, first=self.first)

        return Work(handles=handles, finish=finish, keep=(wire, packed), name="reduction")

    def _count(self, common_bytes: int, itemsize: int) -> None:
        """An all-reduce is a reduction and a gather of a share per row."""
        reducer = self.reducer
        others = sum(p.numel for p in self.pieces if p.row not in (reducer.row, None))
        reducer.count(others * itemsize)
        cuts = [_share(p, reducer.row, reducer.rows)[1] for p in self.pieces if p.row is None]
        own = sum(cuts) * itemsize
        reducer.count(common_bytes - own + own * (reducer.rows - 1))


def chain_sum(parts: Tensor, owner: int, dtype: torch.dtype) -> Tensor:
    """Sum of ``parts (rows, numel)``, one row sum each, in the order of a chain that ends at
    ``owner``; ``dtype`` adds, the parts' dtype is what a hop carries.
    """
    rows = len(parts)
    order = [(owner + 1 + hop) % rows for hop in range(rows)]
    total = parts[order[0]].to(dtype, copy=True)
    for hop, row in enumerate(order[1:]):
        if hop:
            total = total.to(parts.dtype).to(dtype)
        total.add_(parts[row])
    return total


def _share(piece: RowSegment, row: int, rows: int) -> tuple[int, int]:
    """Start and length of the part of an all-row piece that ``row`` adds up, as torch.chunk
    cuts.
    """
    size = -(-piece.numel // rows)
    start, stop = min(row * size, piece.numel), min((row + 1) * size, piece.numel)
    return piece.start + start, stop - start


def _length(cut: Sequence[tuple[int, int]]) -> int:
    return sum(numel for _, numel in cut)


def _place(group: dist.ProcessGroup) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)
