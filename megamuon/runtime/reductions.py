"""Reductions of layer groups: from unsharded gradients to the sharded ones of who keeps them.

Owns what happens to a group's gradients once its backward pass is over: the sum of several
micro-batches, zeros for what nobody wrote, the launch of the reduction, and the reductions in
flight. Invariant: every rank starts the same groups in the same order, whatever its gradients
are; what an unfinished reduction may still read is not written. Tested by
``tests/distributed/test_runtime_rules.py``, ``tests/distributed/test_runtime_fuzz.py`` and the
equivalence tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from megamuon.collectives import StagedWork, TwoStageTable
from megamuon.collectives.call_check import CallCheck
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.schedule import Schedule


class Reducer(Protocol):
    """Sum of a group's gradients over all places by ``divisor``, onto who keeps each."""

    def __call__(
        self, unsharded: Tensor, table: TwoStageTable, sharded: Tensor, *, first: bool, divisor: int
    ) -> StagedWork: ...


class _Started:
    """A group's reduction in flight (``schedule.Started``)."""

    def __init__(
        self,
        group: LayerGroup,
        work: StagedWork,
        compare: Callable[[], None] | None,
        started: list[_Started],
        *,
        across: bool,
    ) -> None:
        self.group, self.work, self.across = group, work, across
        self._compare, self._started = compare, started

    def wait_inside(self) -> None:
        """See Started."""
        self.work.wait_first()

    def start_across(self) -> None:
        """See Started."""
        self.work.advance()

    def finish(self) -> None:
        """See Started."""
        self._started.remove(self)
        if self._compare is not None:
            self._compare()
        self.group.finish_reduction()


class Reductions:
    """The reductions of one model's groups."""

    def __init__(
        self,
        reduce: Reducer,
        *,
        schedule: Schedule,
        several_replicas: bool,
        divisor: int,
        sum_over_tp: Callable[[Sequence[Tensor]], None] | None = None,
        check: CallCheck | None = None,
    ) -> None:
        """``divisor``: of every gradient's sum, the one division there is: the number of ranks with
        samples of their own.
        """
        self.reduce_unsharded = reduce
        # True: gradients stay alive until their reduction is over, as one that reads them in place
        # wants it, whatever this transport needs. A recording of the pool must see that.
        self.hold_unsharded = False
        self._several_replicas = several_replicas
        self._divisor = divisor
        self._sum_over_tp = sum_over_tp
        self._check = check
        self.schedule = schedule
        self.started: list[_Started] = []  # what is in flight, oldest first
        self._next: tuple[LayerGroup, Tensor] | None = None  # whose turn it is, and what it sends

    def start(self, group: LayerGroup, *, keep: bool = False) -> None:
        """Reduce the gradients of ``group``, or with ``keep`` leave them on this rank, for the next
        micro-batch to add to. The schedule says which older reductions come first.
        """
        group.touched.update(
            name for name, unsharded in group.unsharded.items() if unsharded.written
        )
        if keep:
            self._keep(group)
            return
        self._next = group, self._gradients_to_send(group)
        self.schedule.reduce(self)

    def launch(self) -> None:
        """See Flight."""
        assert self._next is not None  # ``start`` has set it, and a schedule launches once
        (group, source), self._next = self._next, None
        compare = self._check.announce(group.index) if self._check is not None else None
        group.reducing = self.reduce_unsharded(
            source,
            group.reduce_table,
            group.sharded_gradient,
            first=group.sharded_empty,
            divisor=self._divisor,
        )
        group.clear_unsharded()
        if not (group.reducing.borrows or self.hold_unsharded):
            group.release_gradients()
        several = self._several_replicas
        self.started.append(_Started(group, group.reducing, compare, self.started, across=several))

    def before_write(self, group: LayerGroup) -> None:
        """A gradient of ``group`` is about to be written: give the buffer memory, and wait until
        the reduction that this gradient comes too late for has read it.
        """
        if group.reducing is not None:
            self.free_unsharded(group)
        group.late = group.late or group.reduced
        group.gradients.revive()

    def free_unsharded(self, group: LayerGroup) -> None:
        """Wait until the reduction of ``group`` that is in flight reads its buffer no more. That is
        its first stage: the others need calls that peers may make only after further gathers.
        """
        for earlier in self.started:
            earlier.work.free_unsharded()
            earlier.group.release_gradients()
            if earlier.group is group:
                break

    def finish(self) -> None:
        """Wait for every reduction in flight."""
        while self.started:
            self.started[0].finish()

    # --- what a reduction sends ------------------------------------------------------------------

    def _keep(self, group: LayerGroup) -> None:
        """Keep this micro-batch's gradients: as they lie if wide enough, else in an FP32 sum."""
        if group.gradients.raw.dtype.itemsize >= 4:
            return  # they stay alive and `written`: the next micro-batch adds to them
        self._fold(group)
        group.clear_unsharded()
        group.gradients.release()

    def _fold(self, group: LayerGroup) -> None:
        """Add the unsharded gradients to the FP32 sum of the micro-batches."""
        first, group.accumulated = group.accumulated is None, group.sums.raw
        group.sums.revive()
        if first:
            group.sums.raw.zero_()
        if any(unsharded.written for unsharded in group.unsharded.values()):
            group.gradients.revive()  # they may have been set aside
        for name, unsharded in group.unsharded.items():
            if unsharded.written:
                start = group.gradients.layout.offsets[name]
                part = group.accumulated[start : start + unsharded.gradient.numel()]
                part.view_as(unsharded.gradient).add_(unsharded.gradient)

    def _gradients_to_send(self, group: LayerGroup) -> Tensor:
        if group.accumulated is None:
            group.zero_unwritten()
            if self._sum_over_tp is not None:
                self._sum_over_tp(group.partial_gradients())
            return group.gradients.raw
        self._fold(group)
        group.gradients.release()
        source, group.accumulated = group.accumulated, None
        if self._sum_over_tp is not None:
            self._sum_over_tp(_accumulated_partials(group, source))
        return source


def _accumulated_partials(group: LayerGroup, source: Tensor) -> list[Tensor]:
    offsets = group.gradients.layout.offsets
    return [
        source[offsets[p.name] : offsets[p.name] + p.piece_numel(group.tp_rank)]
        for p in group.partial
    ]
