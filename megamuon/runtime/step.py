"""The optimizer step on owners: norm, clip, update, publish.

Owns the one collective of a step (the norm scalar with its riders), the state of everything that is
trained element by element, and the order of updates. Invariants: each element counts once in the
norm whatever the layout; a parameter that no rank touched is left alone (no decay, no momentum), as
in PyTorch; a non-finite gradient skips the step on all ranks alike and names the parameter; groups
are updated in the recorded forward order and published in the same order. Tested by
``tests/distributed/test_step.py`` and the equivalence tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import named
from megamuon.collectives.traffic import Traffic
from megamuon.matrices import Layout, LogicalParameter, Route
from megamuon.mesh import Mesh
from megamuon.optim.optimizer import Item, OwnerOptimizer
from megamuon.runtime.layer_group import LayerGroup, LocalSegment
from megamuon.runtime.matrix_update import MatrixUpdate
from megamuon.runtime.publish import Publication


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did; equal on all ranks."""

    gradient_norm: float  # of the averaged gradients, before clipping
    skipped: bool
    nonfinite: tuple[str, ...]  # parameters whose gradient is not finite
    untouched: tuple[str, ...]  # trainable parameters that no rank used since the last step
    zeros: int | None = None  # zero elements of the averaged gradients, where asked for


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
        self._place = {p.name: place for place, p in enumerate(self.trainable)}
        # What the norm counts: nothing here asks each parameter again in every step.
        self._counted = [
            (segment, self._group_of[segment.parameter.name], self._place[segment.parameter.name])
            for segment in self.segments()
            if segment.window is not None and self.counts(segment.parameter)
        ]
        self._decayed = {p.name for p in self.trainable if decays(p)}
        self.state: dict[str, dict[str, Tensor]] = {}  # of what is trained element by element
        for segment in self.segments():
            if segment.window is not None and segment.parameter.route is not Route.MATRIX:
                master = segment.shaped(segment.master)
                self.state[segment.parameter.name] = elementwise.init_state(master)

    def segments(self) -> list[LocalSegment]:
        """All local segments, in the order of the groups."""
        return [segment for group in self.groups for segment in group.local]

    def __call__(
        self,
        lr_of: Callable[[LogicalParameter], float],
        wd: float,
        *,
        order: Sequence[int],
        version: int,
    ) -> StepResult:
        """Clip, then update every touched local segment in place; clears windows and touched
        bits.

        ``order``: indices of the groups as the forward pass uses them. ``version``: the number of
        this update, which published weights carry.
        """
        norm, touched, nonfinite, zeros = self._norm()
        names = {p.name for p, bit in zip(self.trainable, touched, strict=True) if bit}
        untouched = tuple(p.name for p in self.trainable if p.name not in names)
        skipped = bool(nonfinite) or not math.isfinite(norm)
        if not skipped:
            self._clip(norm)
            self._update([self.groups[i] for i in order], names, lr_of, wd, version)
        for group in self.groups:
            group.window_empty = True
            group.touched.clear()
        return StepResult(
            gradient_norm=norm,
            skipped=skipped,
            nonfinite=nonfinite,
            untouched=untouched,
            zeros=zeros,
        )

    def counts(self, parameter: LogicalParameter) -> bool:
        """Whether this rank's segment of a parameter is the one that sums count: slices that every
        row keeps count in row 0, what every tp rank keeps counts on tp rank 0.
        """
        first_row = parameter.layout is Layout.OWNER or self.mesh.row == 0
        return first_row and (parameter.cut is not None or self.mesh.tp_rank == 0)

    def _norm(self) -> tuple[float, list[bool], tuple[str, ...], int | None]:
        """One all-reduce: the squared norm, a zero count (if asked), the riders' values, and a
        touched entry per parameter. Again where late gradients had to be reduced first.

        A touched entry sums one per rank that used the parameter; the owner adds twice the world
        size where the reduced gradient is not finite, which no count of ranks can reach.
        """
        world = dist.get_world_size(self.group) if self.group is not None else 1
        device = self.groups[0].master.device
        entries = [0.0] * len(self.trainable)  # Python's numbers: a tensor element costs 5 us
        for group in self.groups:
            for name in group.touched:
                entries[self._place[name]] += 1
        # A window that no reduction has written since the last step holds an old gradient.
        local = [(s.window, place) for s, group, place in self._counted if not group.window_empty]
        windows = [window for window, _ in local]
        total, zeros = 0.0, 0
        if windows:
            # In FP64: squares of finite FP32 numbers do not overflow, and the clipping factor does
            # not depend on how the layout cuts the sum.
            norms = torch._foreach_norm(windows, dtype=torch.float64)
            squares = torch.stack(norms).cpu().square().tolist()
            for (_, place), square in zip(local, squares, strict=True):
                if math.isfinite(square):
                    total += square
                else:
                    entries[place] += 2 * world
        if self.count_zeros and windows:
            zeros = int(torch.stack([(window == 0).sum() for window in windows]).sum())
        late, other_order = self.riders.values() if self.riders is not None else (0, 0)
        if self.mesh.rank:
            other_order = 0  # what rank 0 says counts
        if self.group is not None:
            head = (total, zeros, late, other_order)
            vector = torch.tensor([*head, *entries], dtype=torch.float64, device=device)
            with named("gradient norm"):
                dist.all_reduce(vector, group=self.group)
            self.traffic.sent("norm", "world", vector.numel() * vector.element_size())
            total, zeros, late, other_order, *entries = vector.tolist()
        if self.riders is not None and self.riders.settle(int(late), bool(other_order)):
            return self._norm()
        nonfinite = tuple(
            p.name for p, entry in zip(self.trainable, entries, strict=True) if entry >= 2 * world
        )
        norm = float("nan") if nonfinite else math.sqrt(total)
        touched = [entry > 0 for entry in entries]
        return norm, touched, nonfinite, int(zeros) if self.count_zeros else None

    def _clip(self, norm: float) -> None:
        if self.clip <= 0:
            return
        factor = self.clip / (norm + 1e-6)
        if factor < 1:
            windows = [g.window for g in self.groups if g.window.numel() and not g.window_empty]
            if windows:
                torch._foreach_mul_(windows, factor)

    # --- updates ---------------------------------------------------------------------------------

    def _update(
        self,
        groups: Sequence[LayerGroup],
        touched: set[str],
        lr_of: Callable[[LogicalParameter], float],
        wd: float,
        version: int,
    ) -> None:
        if self.publication is not None:
            order = [p.name for group in groups for p in _update_order(group, touched)]
            self.publication.begin(order, version)
        pending: list[Item] = []
        whole: list[Item] = []
        for group in groups:
            items = self._items(group, touched, lr_of, wd)
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
        touched: set[str],
        lr_of: Callable[[LogicalParameter], float],
        wd: float,
    ) -> dict[str, tuple[LocalSegment, Item]]:
        items: dict[str, tuple[LocalSegment, Item]] = {}
        for segment in group.local:
            parameter = segment.parameter
            if segment.window is None or parameter.name not in touched:
                continue
            items[parameter.name] = (
                segment,
                Item(
                    name=parameter.name,
                    parameter=segment.master_view,
                    gradient=segment.window_view,
                    state=self.item_state(parameter),
                    lr=lr_of(parameter),
                    wd=wd if parameter.name in self._decayed else 0.0,
                    logical_shape=parameter.shape,
                ),
            )
        return items

    def item_state(self, parameter: LogicalParameter) -> dict[str, Tensor]:
        """Optimizer state beside this rank's segment of a parameter."""
        if parameter.route is Route.MATRIX and self.matrices is not None:
            return self.matrices.item_state(parameter.name)
        return self.state[parameter.name]


def _update_order(group: LayerGroup, touched: set[str]) -> list[LogicalParameter]:
    """The parameters of a group in the order of their updates: element by element first, then
    whole matrices, then matrices in tp pieces.
    """
    members = [p for p in group.trainable if p.name in touched and p.layout is Layout.OWNER]
    flat = [p for p in members if p.route is not Route.MATRIX]
    whole = [p for p in members if p.route is Route.MATRIX and p.cut is None]
    return [*flat, *whole, *(p for p in members if p.route is Route.MATRIX and p.cut is not None)]
