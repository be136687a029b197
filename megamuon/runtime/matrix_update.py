"""Whole-matrix updates wherever the matrix lies: on its owner, in tp pieces, or in even slices.

Owns the state of all matrices that this rank holds a part of or works on, and the three steps of
their update with the compiled moves between them (see [Note: three steps of a matrix update] in
``optim/optimizer.py``). Invariants: nothing here asks how a matrix lies, the moves say it all; each
whole matrix goes through ``directions`` once per step on each rank that works on it. Tested by the
equivalence tests and ``tests/distributed/test_matrix_update.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megamuon.matrices import LogicalParameter, Route
from megamuon.optim.optimizer import Item, MatrixOptimizer, Whole
from megamuon.ownership.update_plan import UpdatePlan
from megamuon.runtime.exchange import Exchange
from megamuon.runtime.layer_group import LayerGroup, LocalSegment

Updated = Callable[[Item], None]


class MatrixUpdate:
    """Updates the matrices of a model with one matrix optimizer."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        plans: Sequence[UpdatePlan],
        optimizer: MatrixOptimizer,
        *,
        exchange: Exchange,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``plans``: the moves of each group's matrices."""
        self.optimizer = optimizer
        self.exchange = exchange
        self.pieces: dict[str, dict[str, Tensor]] = {}  # state beside this rank's segments
        self.wholes: dict[str, dict[str, Tensor]] = {}  # of the whole matrices it works on
        self.plans = tuple(plans)
        self.moved = frozenset().union(*(plan.moved for plan in plans))  # not whole where stored
        place = exchange.place
        self._there = [[move.at(place) for move in plan.there] for plan in plans]
        self._back = [[move.at(place) for move in plan.back] for plan in plans]
        self._spoken: set[str] = set()
        for group, update in zip(groups, plans, strict=True):
            for segment in group.local:
                if segment.sharded_gradient is not None and segment.parameter.route is Route.MATRIX:
                    piece = optimizer.init_piece(segment.shaped(segment.master))
                    self.pieces[segment.parameter.name] = piece
            workers = update.workers(place)
            for matrix in update.matrices:
                if matrix.name in workers:
                    self.wholes[matrix.name] = optimizer.init_whole(matrix.shape, dtype, device)
                    if update.speaks(matrix.name, place):
                        self._spoken.add(matrix.name)

    def item_state(self, name: str) -> dict[str, Tensor]:
        """The state that an item of this matrix sees: what is beside its piece, and the whole's."""
        return self.pieces[name] | self.wholes.get(name, {})

    def whole_state(self, *, everywhere: bool) -> dict[str, dict[str, Tensor]]:
        """State of whole matrices by name: of each that this rank works on, or else of those that
        no rank before it works on.
        """
        return {n: held for n, held in self.wholes.items() if everywhere or n in self._spoken}

    def tensors(self) -> list[Tensor]:
        """All state of this rank."""
        return [t for held in (self.pieces, self.wholes) for s in held.values() for t in s.values()]

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
        held = [items[p.name][1] for p in touched if p.name in items]
        whole = [item for item in held if item.name not in self.moved]
        if whole and later is not None:
            later.extend(whole)
        elif whole:
            self.optimizer.update(whole, updated)
        names = [p.name for p in touched if p.name in self.moved]
        pieces = [item for item in held if item.name in self.moved]
        inputs = {item.name: self.optimizer.prepare(item) for item in pieces}
        wholes = self.exchange.run(
            self._there[group.index], inputs, names, operation="matrix_gather"
        )
        mine = [name for name in names if name in self.wholes]
        directions = dict(zip(mine, self._directions(mine, wholes), strict=True))
        parts = self.exchange.run(
            self._back[group.index], directions, names, operation="matrix_scatter"
        )
        for item in pieces:
            self.optimizer.apply(item, parts[item.name])
            updated(item)

    def _directions(self, names: Sequence[str], wholes: Mapping[str, Tensor]) -> list[Tensor]:
        if not names:
            return []
        return self.optimizer.directions(
            [Whole(name, wholes[name], self.wholes[name]) for name in names]
        )
