"""The optimizer step on owners: norm, clip, update, publish.

Owns who rides with the norm, the state of everything that is trained element by element, and the
order of updates; what all steps have is in ``step_parts``. Invariants: each element counts once in
the norm whatever the layout; groups are updated in the recorded forward order and published in the
same order. Tested by ``tests/distributed/test_step.py`` and the equivalence tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.traffic import Traffic
from megamuon.matrices import LogicalParameter, Route
from megamuon.mesh import Mesh
from megamuon.optim.optimizer import Item, OwnerOptimizer
from megamuon.ownership.holdings import speaks
from megamuon.runtime.layer_group import LayerGroup, LocalSegment
from megamuon.runtime.matrix_update import MatrixUpdate
from megamuon.runtime.publication import Publication
from megamuon.runtime.step_parts import (
    GradientNorm,
    LocalGradient,
    NormReduction,
    RateOf,
    Rates,
    StepResult,
    clip_,
)

NOBODY = (0, 0)  # where nobody rides


class Riders(Protocol):
    """Who else tells all ranks something with the norm; the engine does."""

    def values(self) -> tuple[int, int]:
        """This rank's: whether it has gradients that came too late for their reduction, and whether
        another order of the groups is due (what rank 0 says counts).
        """

    def settle(self, late: int, other_order: bool) -> bool:
        """Act on what all ranks said; True: gradients were reduced, and the norm has changed."""


class OwnerStep:
    """Optimizer state and updates of this rank's segments."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        elementwise: OwnerOptimizer,
        *,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        clip: float,
        decays: Callable[[LogicalParameter], bool],
        count_zeros: bool = False,
        matrices: MatrixUpdate | None = None,
        publication: Publication | None = None,
        traffic: Traffic | None = None,
        riders: Riders | None = None,
    ) -> None:
        self.riders = riders
        self.groups = tuple(groups)
        self.elementwise = elementwise
        self.mesh = mesh
        self.group = group
        self.clip = clip
        self.decays = decays
        self.count_zeros = count_zeros
        self.matrices = matrices
        self.publication = publication
        self.traffic = traffic or Traffic()
        self.trainable = [p for g in self.groups for p in g.trainable]
        self._group_of = {p.name: g for g in self.groups for p in g.parameters}
        self._names = tuple(p.name for p in self.trainable)
        self._reduce_norm = NormReduction(
            self._names,
            group=group,
            device=mesh.device,
            traffic=self.traffic,
            count_zeros=count_zeros,
        )
        # What the norm counts: nothing here asks each parameter again in every step.
        self._counted = [
            (
                segment,
                self._group_of[segment.parameter.name],
                self._reduce_norm.place[segment.parameter.name],
            )
            for segment in self.segments()
            if segment.sharded_gradient is not None and self.counts(segment.parameter)
        ]
        self._decayed = frozenset(p.name for p in self.trainable if decays(p))
        self.state: dict[str, dict[str, Tensor]] = {}  # of what is trained element by element
        for segment in self.segments():
            if segment.sharded_gradient is not None and segment.parameter.route is not Route.MATRIX:
                master = segment.shaped(segment.master)
                self.state[segment.parameter.name] = elementwise.init_state(master)

    def segments(self) -> list[LocalSegment]:
        """All local segments, in the order of the groups."""
        return [segment for group in self.groups for segment in group.local]

    def __call__(
        self,
        lr_of: RateOf,
        wd: float,
        *,
        order: Sequence[int],
        version: int,
    ) -> StepResult:
        """Clip, then update every touched local segment in place; clears gradients and touched
        bits.

        ``order``: indices of the groups as the forward pass uses them. ``version``: the number of
        this update, which published weights carry.
        """
        found = self._norm()
        if not found.skipped:
            self._clip(found.norm)
            rates = Rates(lr_of=lr_of, wd=wd, decayed=self._decayed)
            self._update([self.groups[i] for i in order], found.touched, rates, version)
        for group in self.groups:
            group.sharded_empty = True
            group.touched.clear()
        return found.result(self._names)

    def counts(self, parameter: LogicalParameter) -> bool:
        """Whether this rank's segment of a parameter is the one that sums count: slices that every
        replica keeps count in replica 0, what every tp rank keeps counts on tp rank 0.
        """
        return speaks(parameter.storage, self.mesh.coordinates)

    def _norm(self) -> GradientNorm:
        """The norm over all ranks; again where late gradients had to be reduced first."""
        while True:
            # What no reduction has written since the last step holds an old gradient.
            local = [
                LocalGradient(segment.sharded_gradient, place)
                for segment, group, place in self._counted
                if not group.sharded_empty
            ]
            used = [name for group in self.groups for name in group.touched]
            if self.riders is None:
                return self._reduce_norm(local, used, NOBODY)
            late, other_order = self.riders.values()
            # What rank 0 says of the order counts.
            found = self._reduce_norm(local, used, (late, 0 if self.mesh.rank else other_order))
            late, other_order = found.riders
            if not self.riders.settle(late, bool(other_order)):
                return found

    def _clip(self, norm: float) -> None:
        sharded = [
            g.sharded_gradient
            for g in self.groups
            if g.sharded_gradient.numel() and not g.sharded_empty
        ]
        clip_(sharded, norm, self.clip)

    # --- updates ---------------------------------------------------------------------------------

    def _update(
        self,
        groups: Sequence[LayerGroup],
        touched: Set[str],
        rates: Rates,
        version: int,
    ) -> None:
        if self.publication is not None:
            moved = self.matrices.moved if self.matrices is not None else frozenset()
            order = [p.name for group in groups for p in _update_order(group, touched, moved)]
            self.publication.begin(order, version)
        pending: list[Item] = []
        whole: list[Item] = []
        for group in groups:
            items = self._items(group, touched, rates)
            flat = [item for s, item in items.values() if s.parameter.route is not Route.MATRIX]
            if self.publication is None:
                pending.extend(flat)  # one call for all groups: fewer and longer kernels
            elif flat:
                self.elementwise.update(flat, self._updated)
            if self.matrices is not None:
                self.matrices(
                    group,
                    {
                        n: pair
                        for n, pair in items.items()
                        if pair[0].parameter.route is Route.MATRIX
                    },
                    [p for p in group.trainable if p.route is Route.MATRIX and p.name in touched],
                    self._updated,
                    whole if self.publication is None else None,
                )
        if pending:
            self.elementwise.update(pending)
        if whole and self.matrices is not None:
            self.matrices.optimizer.update(whole)
        if self.publication is not None:
            self.publication.end()

    def _updated(self, item: Item) -> None:
        if self.publication is not None:
            self.publication.updated(item.name)

    def _items(
        self,
        group: LayerGroup,
        touched: Set[str],
        rates: Rates,
    ) -> dict[str, tuple[LocalSegment, Item]]:
        items: dict[str, tuple[LocalSegment, Item]] = {}
        for segment in group.local:
            parameter = segment.parameter
            if segment.sharded_gradient is None or parameter.name not in touched:
                continue
            items[parameter.name] = (
                segment,
                rates.item(
                    parameter,
                    master=segment.master_view,
                    gradient=segment.sharded_view,
                    state=self.item_state(parameter),
                ),
            )
        return items

    def item_state(self, parameter: LogicalParameter) -> dict[str, Tensor]:
        """Optimizer state beside this rank's segment of a parameter."""
        if parameter.route is Route.MATRIX and self.matrices is not None:
            return self.matrices.item_state(parameter.name)
        return self.state[parameter.name]

    def state_beside(self, parameter: LogicalParameter) -> dict[str, Tensor]:
        """What of it lies beside this rank's segment: all but the state of whole matrices."""
        if parameter.route is Route.MATRIX and self.matrices is not None:
            return self.matrices.pieces[parameter.name]
        return self.state[parameter.name]


def _update_order(group: LayerGroup, touched: Set[str], moved: Set[str]) -> list[LogicalParameter]:
    """The parameters of a group in the order of their updates: element by element first, then
    matrices that are whole where they lie, then those ``moved`` for their update.
    """
    members = [p for p in group.trainable if p.name in touched]
    flat = [p for p in members if p.route is not Route.MATRIX]
    matrices = [p for p in members if p.route is Route.MATRIX]
    return [*flat, *sorted(matrices, key=lambda p: p.name in moved)]
