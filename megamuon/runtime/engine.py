"""The schedule of gathers, reductions and releases of layer groups in a training step.

Owns the life of every group through a forward and a backward pass. Invariants: gathers and
reductions each follow one frozen order on all ranks (see [Note: frozen order] in ``order.py``); no
rank waits for a collective while a peer that must join it waits for one that this rank has not
issued; a group that computes is gathered; nothing that autograd may still read is released; a
recomputed forward neither prefetches, records, nor releases. Tested by
``tests/distributed/test_runtime_rules.py``, ``tests/distributed/test_runtime_fuzz.py`` and the
equivalence tests.

[Note: what may be released when]

ZeRO-3 releases a group after its forward and gathers it again for its backward; ZeRO-2 keeps it in
between; ZeRO-1 keeps it for life and gathers it once per update, into the same memory. A group that
several modules use (tied weights), and the group of loose root parameters, is *kept* from forward
to backward at any stage: it is needed at both ends of the pass, where a second gather would have to
overtake all others. So is one that the last pass used twice (``[Note: gathered again]`` in
``rounds.py``). After a forward without gradients everything is released, but at ZeRO-1.

In the backward pass a group is *complete* when all those of its trainable parameters that will get
a gradient have it: autograd is asked at the start which these are, so that a member that nobody
uses holds back neither its group's reduction nor those that follow. Where all are trainable and got
one, every operation that read the weights has run, and they are released. A group with frozen or
silent members has no such sign for those, and waits for the gradients of the inputs of all its uses
that are alive (``Use``). What has no sign at all is released at the end of the pass.

A buffer in the symmetric pool shares its range with buffers that were never alive together with it
in the recorded pass. Where a later pass goes another way, ``leases`` makes room when such a buffer
comes alive; a prefetch without room is left until its group is needed.

[Note: who waits for whom]

Gathers and reductions travel on communicators of their own, and at ZeRO-3 a backward pass waits on
both. Each has one order on all ranks, but that is not enough: a rank that waits for a reduction
which a peer will only start at the end of its pass, while that peer waits for a gather which this
rank has not issued, waits for ever. It takes one rank that skips a layer in a deep model. So the
two orders are read as one. With places counted from the last layer down, the reduction at place p
comes before the gather at p + lag and behind the one before that: what a rank does anyhow that
prefetches lag - 1 layers (``Schedule.lag``). Groups of one module, which differ in
their dtype alone, share a place. A rank that has no use for the next one in that order
issues it all the same, the reduction of a group whose gradients are not all there included. So
whatever a rank waits for, it has issued all that comes before; then the first collective that is
not over has been issued by every rank, and ends. Later stages of a reduction start with the
reductions that follow it, at the latest, and nobody waits for them earlier
(``Reductions.free_unsharded``).

A reduction that had to start before all gradients of its group were there sends what there is. What
comes later stays where it was written, joins the next reduction of the group, or is reduced before
the update: the norm's exchange tells all ranks whether there is any (``values``, ``settle``). A
model that all ranks run in the recorded order never needs that.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from megamuon.collectives import Transport
from megamuon.runtime.forward_pass import ForwardPass, backward_running
from megamuon.runtime.frozen import unexpected
from megamuon.runtime.layer_group import LayerGroup, Use
from megamuon.runtime.order import Cursor
from megamuon.runtime.reductions import Reductions


class _Sweep:
    """The end of one backward pass, held by autograd's task alone: it is gone when the task is."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run

    def __call__(self) -> None:
        self.run()


class Engine(ForwardPass):
    """Schedules all groups of one model."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        transport: Transport,
        *,
        reductions: Reductions,
        **of_the_forward: Any,
    ) -> None:
        """``of_the_forward``: what ``ForwardPass`` takes."""
        self.reductions = reductions
        self.micro_batch_done: Callable[[], None] | None = None  # called at the end of a backward
        self.accumulate_only = False  # True: this micro-batch keeps its gradients on the rank
        self.accumulated = False  # some micro-batch has done so and nothing was reduced since
        self.copied_bytes = 0  # gradient bytes that had to be copied into the groups' buffers
        self.born_bytes = 0  # gradient bytes that were written there
        self._order_due = False  # all ranks take rank 0's latest order after this step
        # --- this backward pass ---
        self._in_backward = False
        self._task = -1
        self._sweep: weakref.ref[_Sweep] | None = None
        self._ahead: frozenset[int] = frozenset()  # gathered before all others in this backward
        self._gather_places: list[int] = []  # of ``backward_order``, ascending; -1 for those
        self._ready: set[int] = set()  # all gradients are there
        self._silent: set[int] = set()  # none will come
        super().__init__(groups, transport, schedule=reductions.schedule, **of_the_forward)

    def freeze(self, order: tuple[int, ...]) -> None:
        """See ForwardPass: the backward orders follow."""
        super().freeze(order)
        backward = tuple(g for g in reversed(order) if not self.groups[g].unread)
        self.backward_order = self._cursor(backward)
        self.reduce_order = Cursor(tuple(g for g in backward if self.groups[g].trainable))
        self._place = dict(zip(backward, self.backward_order.turns, strict=True))

    def settle_passes(self) -> None:
        """See ForwardPass: a backward pass first."""
        if self._in_backward and not backward_running():
            self._complete_failed_backward()
        super().settle_passes()

    # --- backward --------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if self._in_backward and task != self._task:
            if self._sweep is not None and self._sweep() is not None:
                raise RuntimeError(
                    "a backward pass started inside another one (reentrant activation"
                    " checkpointing): pass use_reentrant=False to torch.utils.checkpoint"
                )
            self._complete_failed_backward()
        if self._in_backward:
            return
        self._in_backward = True
        self._task = task
        if self._in_forward:  # autograd inside the model's forward: its gathers come first
            self._issue(self.forward_order.rest())
        # What is gathered now is the same on all ranks: a pass ends in the same state everywhere.
        # Kept groups that an evaluation has released go first, since they are needed first.
        missing = [g for g in self._place if self.groups[g].version != self.version]
        self._ahead = self.kept.intersection(missing)
        order = sorted(missing, key=lambda g: g not in self._ahead)
        self.backward_order = self._cursor(order)
        self._gather_places = [-1 if g in self._ahead else self._place[g] for g in order]
        self.reduce_order.reset()
        self.reductions.finish()
        for group in self.groups:
            group.expect()
        self._silent.update(group.index for group in self.groups if not group.expected)
        sweep = _Sweep(self._end_backward)
        self._sweep = weakref.ref(sweep)
        Variable._execution_engine.queue_callback(sweep)

    def need_backward(self, group: LayerGroup) -> None:
        """The backward of ``group`` is about to read its weights."""
        self._begin_backward()
        self._reach(group)
        if group.version != self.version:
            if group.unread:
                raise unexpected(group.name)
            raise RuntimeError(
                f"group {group.name or 'of loose parameters'!r} was released in this backward pass,"
                " and an operation reads its weights again: use them through the module's forward"
            )
        group.enter()

    def _reach(self, group: LayerGroup) -> None:
        """Move the gather order up to ``group``; what the forward pass kept is not in it."""
        if group.index in self.backward_order:
            self._issue(self.backward_order.through(group.index))

    def _start_due(self, index: int) -> None:
        """Start the reductions that come before the gather of group ``index``, complete or not:
        see [Note: who waits for whom].
        """
        if not self._in_backward or self.accumulate_only or index in self._ahead:
            return
        if index not in self._place:  # autograd runs inside a forward pass
            return
        due, order = self._place[index] - self.schedule.lag, self.reduce_order
        while order.next < len(order.order) and self._place[order.order[order.next]] <= due:
            group = self.groups[order.order[order.next]]
            order.next += 1
            self._reduce(group)

    def enter_backward(
        self, group: LayerGroup, use: Use | None = None, *, reads: bool = True
    ) -> None:
        """A gradient has reached an output of ``group``'s module: gather, prefetch the next.

        ``reads``: whether that module's backward reads the weights.
        """
        self._begin_backward()
        self._reach(group)
        if group.unread and reads and group.version != self.version:
            raise unexpected(group.name)
        if group.version != self.version or use in group.uses_over:
            return  # an output that is an input passed through hears of its gradient too late
        if reads:
            group.enter()
            if use is not None:
                group.uses_running.add(use)
        if group.index not in self.backward_order:
            return
        for following in self.backward_order.following(group.index, self.schedule.prefetch_depth):
            if not self._has_room(following):
                break
            self._issue(self.backward_order.through(following))

    def use_over(self, group: LayerGroup, use: Use) -> None:
        """The gradients of the inputs of one use of ``group`` are complete: that use reads its
        weights no more.
        """
        group.uses_over.add(use)
        self._release_unread(group)
        if use in group.uses_running:
            group.uses_running.discard(use)
            if not group.uses_running:
                group.entered = False  # another use of it says when it starts

    def gradient(self, group: LayerGroup, name: str, parameter: nn.Parameter) -> None:
        """``parameter`` has its gradient of this pass: in the group's buffer already, or in
        ``.grad``.
        """
        self._begin_backward()
        # A reduced group is a released one: the gather order must have passed it first, or the
        # sweep would gather it again on this rank alone.
        self._reach(group)
        unsharded = group.unsharded[name]
        born = unsharded.written
        if parameter.grad is not None:
            self.copied_bytes += unsharded.gradient.numel() * unsharded.gradient.element_size()
            unsharded.store(parameter.grad)
            parameter.grad = None
        elif born:
            self.born_bytes += unsharded.gradient.numel() * unsharded.gradient.element_size()
        group.fired.add(name)
        if group.complete:
            self._ready.add(group.index)
            self._release_unread(group)  # its reduction may have to wait for others
            for index in self.reduce_order.ready(self._ready, self._silent):
                self._reduce(self.groups[index])

    def _release_unread(self, group: LayerGroup) -> None:
        """Drop the weights of ``group`` if no operation of this pass can still read them."""
        # A member that gets no gradient in this pass gives no sign either.
        silent = group.has_frozen or len(group.expected) < len(group.trainable)
        if group.complete and (not silent or group.all_uses_over):
            group.release_weights()

    def _reduce(self, group: LayerGroup) -> None:
        group.reduced = self._in_backward
        self._release_unread(group)
        if self._in_backward and not self.accumulate_only:
            limit = self._place[group.index] + self.schedule.lag
            earlier = bisect_left(self._gather_places, limit)
            if earlier:
                self._issue(self.backward_order.through(self.backward_order.order[earlier - 1]))
        with self._transfer():
            self.reductions.start(group, keep=self.accumulate_only)

    def _end_backward(self) -> None:
        """The sweep: complete both orders, so that no rank misses a collective; release all."""
        self._pass_over(self.backward_order.rest(), keep=False)
        for index in self.reduce_order.rest():
            self._reduce(self.groups[index])
        for group in self.groups:
            group.release_weights()
        self.accumulated = self.accumulate_only
        self._forget_backward()
        if self.micro_batch_done is not None:
            self.micro_batch_done()

    def _complete_failed_backward(self) -> None:
        """A backward pass raised before its end: nothing reads weights, the orders go on."""
        for group in self.groups:
            group.release_weights()
        self._end_backward()

    def _forget_backward(self) -> None:
        for group in self.groups:
            group.fired.clear()
            group.expected = frozenset(group.unsharded)
            for use in group.uses:
                use.forget()
            group.uses_over.clear()
            group.uses_running.clear()
            group.reduced = False
        self._ready.clear()
        self._silent.clear()
        self._in_backward = False
        self._task = -1

    # --- step ------------------------------------------------------------------------------------

    def finish_reductions(self) -> None:
        """Wait for every reduction in flight."""
        self.reductions.finish()

    def reduce_accumulated(self) -> None:
        """Reduce what micro-batches under ``accumulate_only`` left behind, in the frozen order."""
        self.accumulate_only = False
        for index in self.reduce_order.order:
            self._reduce(self.groups[index])
        self.accumulated = False

    def values(self) -> tuple[int, int]:
        """What this rank adds to the exchange of the norm: whether gradients came too late for
        their reduction, and whether it has used the groups twice in another order.
        """
        return int(any(group.late for group in self.groups)), int(self.other_order())

    def settle(self, late: int, other_order: bool) -> bool:
        """Act on the sums of ``values``; True: gradients were reduced, the norm is another one.

        ``late``: ranks with late gradients. ``other_order``: rank 0 has used another order.
        """
        self._order_due = other_order
        if late:
            mine = tuple(int(group.late) for group in self.groups)
            anywhere = self._agreement.largest(mine)
            for index in self.reduce_order.order:
                if anywhere[index]:
                    self._reduce(self.groups[index])
            self.reductions.finish()
        return bool(late)

    def step_over(self) -> None:
        """The update is done: take rank 0's latest order where it is due. A collective then."""
        if self._order_due:
            self._order_due = False
            self.take_latest_order()
