"""Whole-matrix updates wherever the matrix lies: on its owner, in tp pieces, or in even slices.

Owns the state of all matrices that this rank holds a part of, and the three steps of their update
with the moves of bytes between them (see [Note: three steps of a matrix update] in
``optim/optimizer.py``). Invariant: each whole matrix goes through ``directions`` once per step on
each rank that works on it: its owner; its tp owner where tensor parallelism cuts it; each rank with
a slice of it under ``matrix_update='gather'``. Tested by the equivalence tests and
``tests/distributed/test_matrix_update.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamuon.collectives import Transport
from megamuon.matrices import Layout, LogicalParameter, Route
from megamuon.optim.optimizer import Item, MatrixOptimizer, Whole
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.buffers import FlatBuffer, place
from megamuon.runtime.exchange import PieceExchange, cut_piece
from megamuon.runtime.group_tables import column_table
from megamuon.runtime.layer_group import LayerGroup, LocalSegment

Updated = Callable[[Item], None]


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """Optimizer state of one matrix on this rank."""

    piece: dict[str, Tensor]  # beside the local segment
    whole: dict[str, Tensor]  # of the whole matrix; empty where another rank works on it


class MatrixUpdate:
    """Updates the matrices of a model with one matrix optimizer."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        plan: OwnershipPlan,
        optimizer: MatrixOptimizer,
        *,
        exchange: PieceExchange,
        transport: Transport,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self.exchange = exchange
        self.transport = transport
        self._gathers = {
            group.index: gather
            for group in groups
            if (gather := _SliceGather(group, plan, exchange.tp_rank, dtype, device)).parameters
        }
        self.state: dict[str, HeldState] = {}
        for group in groups:
            for segment in group.local:
                if segment.window is not None and segment.parameter.route is Route.MATRIX:
                    self.state[segment.parameter.name] = self._initial(segment, dtype, device)

    def _initial(
        self, segment: LocalSegment, dtype: torch.dtype, device: torch.device
    ) -> HeldState:
        parameter = segment.parameter
        piece = self.optimizer.init_piece(segment.shaped(segment.master))
        cut_here = parameter.cut is not None and parameter.layout is Layout.OWNER
        if cut_here and self.exchange.owner(parameter) != self.exchange.tp_rank:
            return HeldState(piece=piece, whole={})
        return HeldState(
            piece=piece, whole=self.optimizer.init_whole(parameter.shape, dtype, device)
        )

    @property
    def gathers(self) -> bool:
        """Whether any matrix lies in slices."""
        return bool(self._gathers)

    def item_state(self, name: str) -> dict[str, Tensor]:
        """The state that an item of this matrix sees: what is beside its piece, and the whole's."""
        held = self.state[name]
        return held.piece | held.whole

    def __call__(
        self,
        group: LayerGroup,
        items: Mapping[str, tuple[LocalSegment, Item]],
        touched: Sequence[LogicalParameter],
        updated: Updated,
        later: list[Item] | None = None,
    ) -> None:
        """Update the matrices of ``group``: ``items`` are this rank's segments of them, ``touched``
        all of its matrices that take part in this step, equal on all ranks. Items that are whole
        are put into ``later`` instead if it is given: nobody waits for them, and one call for all
        groups can batch more equal shapes.
        """
        whole, cut = [], []
        for parameter in touched:
            if parameter.layout is Layout.OWNER and parameter.name in items:
                (whole if parameter.cut is None else cut).append(parameter)
        if whole and later is not None:
            later.extend(items[p.name][1] for p in whole)
        elif whole:
            self.optimizer.update([items[p.name][1] for p in whole], updated)
        if cut:
            self._update_cut(cut, items, updated)
        sliced = [p for p in touched if p.layout is Layout.EVEN]
        if sliced:
            self._update_sliced(self._gathers[group.index], sliced, items, updated)

    def _update_cut(
        self,
        parameters: Sequence[LogicalParameter],
        items: Mapping[str, tuple[LocalSegment, Item]],
        updated: Updated,
    ) -> None:
        inputs = [self.optimizer.prepare(items[p.name][1]).contiguous() for p in parameters]
        like = inputs[0]
        wholes = self.exchange.to_owners(parameters, inputs)
        mine = [p for p in parameters if p.name in wholes]
        directions = self._directions(mine, wholes)
        pieces = self.exchange.from_owners(
            parameters, {p.name: d for p, d in zip(mine, directions, strict=True)}, like
        )
        for parameter, piece in zip(parameters, pieces, strict=True):
            item = items[parameter.name][1]
            self.optimizer.apply(item, piece)
            updated(item)

    def _directions(
        self, parameters: Sequence[LogicalParameter], wholes: Mapping[str, Tensor]
    ) -> list[Tensor]:
        if not parameters:
            return []
        return self.optimizer.directions(
            [
                Whole(
                    p.name, wholes[p.name], self.state[p.name].whole if p.name in self.state else {}
                )
                for p in parameters
            ]
        )

    def _update_sliced(
        self,
        gather: _SliceGather,
        parameters: Sequence[LogicalParameter],
        items: Mapping[str, tuple[LocalSegment, Item]],
        updated: Updated,
    ) -> None:
        """Line B: slices of the inputs to every rank of the row, the work on each of them."""
        names = {p.name for p in parameters}
        inputs = {n: self.optimizer.prepare(item) for n, (_, item) in items.items() if n in names}
        pieces = gather(self.transport, parameters, inputs, {n: items[n][0] for n in inputs})
        cut = [p for p in parameters if p.cut is not None]
        wholes = {p.name: pieces[p.name] for p in parameters}
        if cut:
            wholes |= self.exchange.everywhere(cut, [pieces[p.name] for p in cut])
        # A rank without a slice of a matrix has no use for its direction.
        held = [p for p in parameters if p.name in inputs]
        for parameter, direction in zip(held, self._directions(held, wholes), strict=True):
            segment, item = items[parameter.name]
            piece = cut_piece(direction, parameter, segment.tp_rank)
            first, count = segment.rows
            self.optimizer.apply(item, piece[first : first + count])
            updated(item)


class _SliceGather:
    """The gather of one group's sliced matrices, in the master dtype."""

    def __init__(
        self,
        group: LayerGroup,
        plan: OwnershipPlan,
        tp_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parameters = [
            p for p in group.trainable if p.route is Route.MATRIX and p.layout is Layout.EVEN
        ]
        self._tp_rank = tp_rank
        layout = place(self.parameters, dtype.itemsize, tp_rank)
        self._table = column_table(plan, self.parameters, layout.offsets, tp_rank)
        self._buffer = FlatBuffer(layout, dtype, device)
        self._buffer.release()

    def __call__(
        self,
        transport: Transport,
        parameters: Sequence[LogicalParameter],
        inputs: Mapping[str, Tensor],
        segments: Mapping[str, LocalSegment],
    ) -> dict[str, Tensor]:
        """The pieces of ``parameters`` on every rank of the row, from the slices in ``inputs``."""
        self._buffer.revive()
        self._buffer.raw.zero_()  # a matrix that no rank touched sends zeros that nobody reads
        for name, slice_ in inputs.items():
            segment = segments[name]
            self._buffer.raw_piece(name, segment.start, segment.stop).copy_(slice_.reshape(-1))
        work = transport.all_gather_v(self._buffer.raw, self._table, operation="matrix_gather")
        work.wait()
        pieces = {
            p.name: self._buffer.raw_view(p.name, p.piece_shape(self._tp_rank)).clone()
            for p in parameters
        }
        self._buffer.release()
        return pieces
