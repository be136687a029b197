"""When bytes move: gathers, reductions and releases of the layer groups.

Owns the life of every group through a forward and a backward pass. Invariants: gathers and
reductions each follow one frozen order on all ranks (see [Note: frozen order] in ``order.py``); a
group that computes is gathered; nothing that autograd may still read is released; a recomputed
forward neither prefetches, records, nor releases. Tested by
``tests/distributed/test_runtime_rules.py`` and the equivalence tests.

[Note: what may be released when]

ZeRO-3 releases a group after its forward and gathers it again for its backward; ZeRO-2 keeps it in
between; ZeRO-1 keeps it for life and gathers it once per update, into the same memory. A group that
several modules use (tied weights), and the group of loose root parameters, is *kept* from forward
to backward at any stage: it is needed at both ends of the pass, where a second gather would have to
overtake all others. After a forward without gradients everything is released, but at ZeRO-1.

In the backward pass a group is released when all of its trainable parameters have their gradients:
every operation that read them has run. A group with frozen members has no such sign for those, and
waits for the gradients of its module's inputs.

A buffer in the symmetric pool shares its range with buffers that were never alive together with it
in the recorded pass. Where a later pass goes another way, ``leases`` makes room when such a buffer
comes alive; a prefetch without room is left until its group is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from megamuon.collectives import StagedWork, Transport, TwoStageTable, Work
from megamuon.runtime.buffers import FlatBuffer
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.order import Cursor, recorded_order
from megamuon.runtime.publish import Publication

OUTSTANDING = 2  # reductions in flight; each keeps its slots or its send buffer alive


def backward_running() -> bool:
    """Whether autograd is executing a graph on this thread: a forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Reducer(Protocol):
    """Mean of a group's slots over all data-parallel ranks, into the windows of their holders."""

    def __call__(
        self, slots: Tensor, table: TwoStageTable, window: Tensor, *, first: bool
    ) -> StagedWork: ...


class Leases(Protocol):
    """Which ranges of the symmetric pool are in use."""

    def free(self, group: LayerGroup) -> bool:
        """Whether a gather of ``group`` would find its range free."""


class Engine:
    """Schedules all groups of one model."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        transport: Transport,
        *,
        reduce: Reducer,
        zero_stage: int,
        kept: set[int],
        agree: Callable[[tuple[int, ...]], tuple[int, ...]],
        sent_dtype: torch.dtype | None = None,
        publication: Publication | None = None,
        sum_over_tp: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.transport = transport
        self.publication = publication
        self.leases: Leases | None = None  # of the symmetric pool, once it is open
        self.micro_batch_done: Callable[[], None] | None = None  # called at the end of a backward
        # True: slots stay alive until their reduction is over, as one that reads them in place
        # wants it, whatever this transport needs. A recording must see that.
        self.hold_slots = False
        if sent_dtype is not None:
            for group in self.groups:
                if sent_dtype != group.weights.raw.dtype:
                    group.send_in(sent_dtype)
        self._reduce_slots = reduce
        self._sum_over_tp = sum_over_tp
        self.zero_stage = zero_stage
        self.kept = set(kept)
        self.version = 0  # applied updates
        self.accumulate_only = False  # True: this micro-batch keeps its gradients on the rank
        self.accumulated = False  # some micro-batch has done so and nothing was reduced since
        self.copied_bytes = 0  # gradient bytes that had to be copied into their slots
        self.born_bytes = 0  # gradient bytes that were written there
        self._agree = agree  # rank 0's integers, on every rank
        self._used: list[int] | None = []  # order of use, until it is frozen
        self._freeze(tuple(range(len(self.groups))))
        self._in_backward = False
        self._task = -1
        self._ready: set[int] = set()
        self._reduced: set[int] = set()
        self._inputs_done: set[int] = set()
        self._outstanding: deque[LayerGroup] = deque()

    def _freeze(self, order: tuple[int, ...]) -> None:
        backward = tuple(reversed(order))
        self.forward_order = Cursor(order)
        self.backward_order = Cursor(tuple(g for g in backward if g not in self.kept))
        self.reduce_order = Cursor(tuple(g for g in backward if self.groups[g].trainable))

    # --- forward ---------------------------------------------------------------------------------

    def root_enter(self) -> None:
        """The model's forward starts: drop stale weights, start the gather order anew."""
        if backward_running():
            return
        if self._in_backward:  # the last backward pass raised before its end
            self._forget_backward()
        self.forward_order.reset()
        for group in self.groups:
            if group.version not in (-1, self.version):
                group.forget_weights()
            elif self.zero_stage == 3 and group.index not in self.kept:
                group.entered = False  # still set only after a forward that raised

    def need(self, group: LayerGroup) -> None:
        """A module of ``group`` is about to compute: its weights are in place when this returns."""
        if backward_running():
            self.need_backward(group)
            return
        self._issue(self.forward_order.through(group.index))
        self._issue((group.index,))  # used again after its release, or without the root's forward
        if self._used is not None:
            self._used.append(group.index)
        group.enter()
        following = self.forward_order.following(group.index)
        if following is not None and self._published(following) and self._has_room(following):
            self._issue(self.forward_order.through(following))

    def leave(self, group: LayerGroup) -> None:
        """A module of ``group`` has computed."""
        if backward_running() or group.index in self.kept:
            return
        if self.zero_stage == 3 or not torch.is_grad_enabled():
            group.release_weights()

    def root_leave(self) -> None:
        """The model's forward ends: complete the gather order, release, freeze the order once."""
        if backward_running():
            return
        self._issue(self.forward_order.rest())
        for group in self.groups:
            group.wait_gathered()
            keep = torch.is_grad_enabled() and (self.zero_stage < 3 or group.index in self.kept)
            if not keep:
                group.release_weights()
        if self._used is not None:
            self._freeze_recorded(self._used)
            self._used = None

    def _freeze_recorded(self, used: Sequence[int]) -> None:
        """Take rank 0's order for good; what it used more than once is kept from now on."""
        count = len(self.groups)
        reused = tuple(int(used.count(index) > 1) for index in range(count))
        agreed = self._agree(recorded_order(used, count) + reused)
        self.kept |= {index for index in range(count) if agreed[count + index]}
        self._freeze(agreed[:count])

    def _published(self, index: int) -> bool:
        """Whether a prefetch of this group would not have to wait for its publish. Ranks may
        answer differently: that moves a gather in time, never in the order of its communicator.
        """
        return self.publication is None or self.publication.arrived(self.groups[index])

    def _has_room(self, index: int) -> bool:
        """Whether a prefetch of this group would disturb nothing in the pool. Ranks may answer
        differently here too.
        """
        return self.leases is None or self.leases.free(self.groups[index])

    def _issue(self, indices: Sequence[int]) -> None:
        for index in indices:
            group = self.groups[index]
            if group.version == self.version:
                continue
            self.gather(group)

    def gather(self, group: LayerGroup) -> None:
        """Start the gather of a group's present weights, once its leaders have them."""
        if self.publication is not None:
            self.publication.wait(group)
        group.wait_gathered()  # an earlier gather that nobody waited for uses the same memory
        group.weights.revive()
        raw = group.weights.raw
        if group.sent is None:
            group.write_sources()
            group.gathering = self.transport.all_gather_v(raw, group.gather_table)
        else:
            group.gathering = self._gather_narrow(group, group.sent)
        group.version = self.version

    def _gather_narrow(self, group: LayerGroup, sent: FlatBuffer) -> Work:
        """Gather in the dtype that is sent and widen on arrival, this rank's own segments too: all
        ranks must compute with the same numbers.
        """
        sent.revive()
        group.write_sources(sent.raw)
        work = self.transport.all_gather_v(sent.raw, group.gather_table)

        def finish() -> None:
            work.wait()
            group.weights.raw.copy_(sent.raw)
            sent.release()

        return Work(finish=finish, name="gather")

    # --- backward --------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if self._in_backward:
            if task != self._task:
                raise RuntimeError(
                    "a backward pass started inside another one (reentrant activation"
                    " checkpointing): pass use_reentrant=False to torch.utils.checkpoint"
                )
            return
        self._in_backward = True
        self._task = task
        self.backward_order.reset()
        self.reduce_order.reset()
        self.finish_reductions()
        Variable._execution_engine.queue_callback(self._end_backward)

    def need_backward(self, group: LayerGroup) -> None:
        """The backward of ``group`` is about to read its weights."""
        self._begin_backward()
        self._reach(group)
        if group.version == -1:
            self._issue((group.index,))
        group.enter()

    def _reach(self, group: LayerGroup) -> None:
        """Move the gather order up to ``group``; kept groups are not in it."""
        if group.index not in self.kept:
            self._issue(self.backward_order.through(group.index))

    def enter_backward(self, group: LayerGroup) -> None:
        """A gradient has reached an output of ``group``'s module: gather, prefetch the next."""
        self.need_backward(group)
        if group.index in self.kept:
            return
        following = self.backward_order.following(group.index)
        if following is not None and self._has_room(following):
            self._issue(self.backward_order.through(following))

    def inputs_done(self, group: LayerGroup) -> None:
        """The gradients of a module's inputs are complete: its weights are no longer read."""
        if group.index in self.kept:
            return
        self._inputs_done.add(group.index)
        if group.index in self._ready | self._reduced or not group.trainable:
            group.release_weights()

    def gradient(self, group: LayerGroup, name: str, parameter: nn.Parameter) -> None:
        """``parameter`` has its gradient of this pass: in its slot already, or in ``.grad``."""
        self._begin_backward()
        # A reduced group is a released one: the gather order must have passed it first, or the
        # sweep would gather it again on this rank alone.
        self._reach(group)
        slot = group.slots[name]
        born = slot.written
        if parameter.grad is not None:
            self.copied_bytes += slot.gradient.numel() * slot.gradient.element_size()
            slot.store(parameter.grad)
            parameter.grad = None
        elif born:
            self.born_bytes += slot.gradient.numel() * slot.gradient.element_size()
        group.fired.add(name)
        if len(group.fired) == len(group.trainable):
            self._ready.add(group.index)
            self._release_unread(group)  # its reduction may have to wait for others
            for index in self.reduce_order.ready(self._ready):
                self._reduce(self.groups[index])

    def _release_unread(self, group: LayerGroup) -> None:
        """All gradients of ``group`` are there: drop its weights, unless frozen ones are read."""
        if not group.has_frozen or group.index in self._inputs_done:
            group.release_weights()

    def _reduce(self, group: LayerGroup) -> None:
        self._reduced.add(group.index)
        self._release_unread(group)
        group.touched.update(name for name, slot in group.slots.items() if slot.written)
        if self.accumulate_only:
            self._accumulate(group)
            return
        source = self._gradients_to_send(group)
        while len(self._outstanding) >= OUTSTANDING:
            self.finish_oldest_reduction()
        if self.publication is not None:  # several rows: the first stages are over by now
            for earlier in self._outstanding:
                if earlier.reducing is not None:
                    earlier.reducing.advance()
        group.reducing = self._reduce_slots(
            source, group.reduce_table, group.window, first=group.window_empty
        )
        group.clear_slots()
        if not (group.reducing.borrows or self.hold_slots):
            group.release_gradients()
        self._outstanding.append(group)

    def _accumulate(self, group: LayerGroup) -> None:
        """Keep this micro-batch's gradients: in slots that are wide enough, else in an FP32 sum."""
        if group.gradients.raw.dtype.itemsize >= 4:
            return  # the slots stay alive and `written`: the next micro-batch adds to them
        self._fold(group)
        group.clear_slots()
        group.gradients.release()

    def _fold(self, group: LayerGroup) -> None:
        first, group.accumulated = group.accumulated is None, group.sums.raw
        group.sums.revive()
        if first:
            group.sums.raw.zero_()
        if any(slot.written for slot in group.slots.values()):
            group.gradients.revive()  # they may have been set aside
        for name, slot in group.slots.items():
            if slot.written:
                start = group.gradients.layout.offsets[name]
                part = group.accumulated[start : start + slot.gradient.numel()]
                part.view_as(slot.gradient).add_(slot.gradient)

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
            self._sum_over_tp(self._accumulated_partials(group, source))
        return source

    @staticmethod
    def _accumulated_partials(group: LayerGroup, source: Tensor) -> list[Tensor]:
        offsets = group.gradients.layout.offsets
        return [
            source[offsets[p.name] : offsets[p.name] + p.piece_numel(group.tp_rank)]
            for p in group.trainable
            if p.tp_partial
        ]

    def _end_backward(self) -> None:
        """The sweep: complete both orders, so that no rank misses a collective; release all."""
        self._issue(self.backward_order.rest())
        for index in self.reduce_order.rest():
            self._reduce(self.groups[index])
        for group in self.groups:
            group.release_weights()
        self.accumulated = self.accumulate_only
        self._forget_backward()
        if self.micro_batch_done is not None:
            self.micro_batch_done()

    def _forget_backward(self) -> None:
        for group in self.groups:
            group.fired.clear()
        self._ready.clear()
        self._reduced.clear()
        self._inputs_done.clear()
        self._in_backward = False
        self._task = -1

    # --- step ------------------------------------------------------------------------------------

    def finish_oldest_reduction(self) -> bool:
        """Wait for the reduction that was launched first; False: none is in flight."""
        if self._outstanding:
            self._outstanding.popleft().finish_reduction()
            return True
        return False

    def finish_reductions(self) -> None:
        """Wait for every reduction in flight."""
        while self.finish_oldest_reduction():
            pass

    def reduce_accumulated(self) -> None:
        """Reduce what micro-batches under ``accumulate_only`` left behind, in the frozen order."""
        self.accumulate_only = False
        for index in self.reduce_order.order:
            self._reduce(self.groups[index])
        self._reduced.clear()
        self.accumulated = False
