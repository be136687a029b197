"""The forward half of a pass: gathers ahead of their use, and the order that is recorded.

Owns ``ForwardPass``, which the engine extends by the backward half: the gathers themselves, the
forward order, what is kept, and the end of a pass. Invariants: every rank issues the gathers of a
pass in the frozen order ([Note: frozen order] in ``order.py``), completes it whatever it used, and
leaves the pass with the same groups gathered; a recomputed forward takes no part. Tested by
``tests/distributed/test_runtime_rules.py`` and ``tests/distributed/test_runtime_fuzz.py``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from megamuon.collectives import Transport, Work
from megamuon.collectives.call_check import CallCheck
from megamuon.runtime.buffers import FlatBuffer
from megamuon.runtime.frozen import UNREAD
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.order import Cursor, follows, merged_order, turns_of
from megamuon.runtime.publication import Publication
from megamuon.runtime.rounds import Round, Rounds
from megamuon.runtime.schedule import Schedule


def backward_running() -> bool:
    """Whether autograd is executing a graph on this thread: a forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Leases(Protocol):
    """Which ranges of the symmetric pool are in use."""

    def free(self, group: LayerGroup) -> bool:
        """Whether a gather of ``group`` would find its range free."""

    def transfer(self) -> AbstractContextManager[None]:
        """Around one collective, which may displace what is in use meanwhile."""


class Agreement(Protocol):
    """What the ranks of a runtime settle among themselves; every call is a collective."""

    def rank_zeros(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Rank 0's integers, on every rank."""

    def largest(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The largest integer of all ranks at each place."""


class ForwardPass(abc.ABC):
    """Gathers of one model's groups, and its forward passes."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        transport: Transport,
        *,
        schedule: Schedule,
        zero_stage: int,
        kept: Iterable[int],
        agreement: Agreement,
        rounds: Rounds | None = None,
        publication: Publication | None = None,
        check: CallCheck | None = None,
    ) -> None:
        """``rounds``: of this rank's replica, None where it is alone in it. ``check``: of
        gathers.
        """
        self.groups = tuple(groups)
        self.schedule = schedule
        self.transport = transport
        self.publication = publication
        self.leases: Leases | None = None  # of the symmetric pool, once it is open
        self.zero_stage = zero_stage
        self.kept = self.always_kept = frozenset(kept)
        self.version = 0  # applied updates
        self._agreement = agreement
        self._rounds = rounds if zero_stage == 3 else None
        self._check = check
        self.freeze(tuple(range(len(self.groups))))
        # --- this forward pass ---
        self._in_forward = False
        self._used: dict[int, None] = {}  # in the order of first use
        self._reused: set[int] = set()
        # --- the recorded order ---
        self._recorded = False  # a first order has been agreed on
        self._frozen = {g: g.frozen_uses for g in self.groups if g.frozen_uses is not None}
        self._latest: tuple[tuple[int, ...], ...] = ()  # orders of the last two training passes

    def freeze(self, order: tuple[int, ...]) -> None:
        """Take the order of the groups, the same on all ranks."""
        self.forward_order = self._cursor(order)

    def _cursor(self, order: Sequence[int]) -> Cursor:
        return Cursor(order, turns_of(order, [group.key.module for group in self.groups]))

    # --- what the backward half adds -------------------------------------------------------------

    def settle_passes(self) -> None:
        """Complete the orders of a pass that an exception ended, so that this rank's collectives
        are those of its peers again.
        """
        if self._in_forward and not backward_running():
            self._end_forward()

    @abc.abstractmethod
    def need_backward(self, group: LayerGroup) -> None:
        """The backward of ``group`` is about to read its weights."""

    @abc.abstractmethod
    def _start_due(self, index: int) -> None:
        """Start what must come before the gather of group ``index``."""

    # --- a pass ----------------------------------------------------------------------------------

    def root_enter(self) -> None:
        """The model's forward starts: drop stale weights, start the gather order anew."""
        if backward_running():
            return
        self.settle_passes()
        self.forward_order.reset()
        for group in self.groups:
            if group.version not in (-1, self.version):
                group.forget_weights()
        self._in_forward = True

    def need(self, group: LayerGroup) -> None:
        """A module of ``group`` is about to compute: its weights are in place when this returns."""
        if backward_running():
            self.need_backward(group)
            return
        if not self._in_forward:  # a module by itself: all ranks must call it alike
            self._issue((group.index,))
            group.enter()
            return
        if group.index in self._used:
            self._reused.add(group.index)
        self._used[group.index] = None
        self._issue(self.forward_order.through(group.index))
        if group.version != self.version:
            self._gather_again(group)
        group.enter()
        for following in self.forward_order.following(group.index, self.schedule.prefetch_depth):
            if not (self._published(following) and self._has_room(following)):
                break
            self._issue(self.forward_order.through(following))

    def _gather_again(self, group: LayerGroup) -> None:
        """``group`` was used and released earlier in this pass: see [Note: gathered again]."""
        self._issue(self.forward_order.rest())
        if self._rounds is None:
            self._issue((group.index,))
            return
        said = self._rounds.exchange(over=False, wanted=(group.index,), reused=self._reused)
        self._take_part(said, wanted=group.index)

    def _take_part(self, said: Round, *, wanted: int | None = None) -> None:
        """Gather what some rank of the replica wants; only ``wanted`` is for this one."""
        for index in said.wanted:
            group = self.groups[index]
            held = group.version == self.version
            self.gather(group)
            if not held and index != wanted:
                group.release_weights()

    def leave(self, group: LayerGroup, *, returns: bool) -> None:
        """A module of ``group`` has computed. ``returns``: a gradient that reaches its outputs will
        say so (``enter_backward``), or none ever will, so until then nobody reads the weights.
        """
        if backward_running():
            return
        stays = self.zero_stage < 3 and (self._in_forward or torch.is_grad_enabled())
        if stays or group.index in self.kept:
            group.entered = group.entered and not returns
        else:
            group.release_weights()

    def root_leave(self, *, lost: bool = False) -> None:
        """The model's forward ends, or an exception ends it: complete the gather order, release,
        record the order. ``lost``: a peer is gone, and nobody is there to complete it with.
        """
        if backward_running() or not self._in_forward:
            return
        if lost:
            self._in_forward = False
        else:
            self._end_forward()

    def _end_forward(self) -> None:
        self._in_forward = False
        used, self._used = tuple(self._used), {}
        reused, self._reused = self._reused, set()
        training = torch.is_grad_enabled()
        self._pass_over(self.forward_order.rest(), keep=training and self.zero_stage < 3)
        if self.zero_stage < 3:
            reused = set()  # everything is kept
        said = Round(over=True, wanted=(), reused=frozenset(reused))
        while self._rounds is not None:
            said = self._rounds.exchange(over=True, reused=reused)
            self._take_part(said)
            if said.over:
                break
        self._agree_on_frozen(training)
        for group in self.groups:
            group.wait_gathered()
            stays = training and (self.zero_stage < 3 or group.index in self.kept)
            if group.unread or not stays:
                group.release_weights()
        self.kept = self.always_kept | said.reused
        self._record(used, training)

    def _agree_on_frozen(self, training: bool) -> None:
        """Once: see [Note: groups that do not train].  A collective up to the first training
        pass.
        """
        if not self._frozen:
            return
        mine = (int(training), *(uses.shown() for uses in self._frozen.values()))
        trained, *shown = self._agreement.largest(mine)
        if trained:
            for group, largest in zip(self._frozen, shown, strict=True):
                group.frozen_uses, group.unread = None, largest == UNREAD
            self._frozen.clear()
            self.freeze(self.forward_order.order)

    def _record(self, used: tuple[int, ...], training: bool) -> None:
        """Freeze the first order at once; keep later ones to compare."""
        if not self._recorded:
            self._recorded = True
            agreed = self._agreement.rank_zeros(merged_order(used, self.forward_order.order))
            self.freeze(agreed)
        elif training:
            self._latest = (*self._latest[-1:], used)

    def other_order(self) -> bool:
        """Whether this rank has used the groups twice running in an order that contradicts the
        frozen one.
        """
        latest = self._latest
        same = len(latest) == 2 and latest[0] == latest[1]
        return same and not follows(latest[1], self.forward_order.order)

    def take_latest_order(self) -> None:
        """Freeze rank 0's latest order.  A collective."""
        used = self._latest[-1] if self._latest else ()
        self.freeze(self._agreement.rank_zeros(merged_order(used, self.forward_order.order)))

    # --- gathers ----------------------------------------------------------------------------------

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
            if group.version != self.version:
                self._start_due(index)
                self.gather(group)

    def _pass_over(self, indices: Sequence[int], *, keep: bool) -> None:
        """Issue what this rank did not need; without ``keep`` hold no more than two at a time."""
        last: LayerGroup | None = None
        for index in indices:
            group = self.groups[index]
            needless = group.version != self.version and index not in self.kept
            self._issue((index,))
            if last is not None:
                last.release_weights()
            last = group if needless and not keep else None

    def gather(self, group: LayerGroup) -> None:
        """Start the gather of a group's present weights, once its leaders have them."""
        if self.publication is not None:
            self.publication.wait(group)
        group.wait_gathered()  # an earlier gather that nobody waited for uses the same memory
        with self._transfer():
            self._start_gather(group)

    def _transfer(self) -> AbstractContextManager[None]:
        return nullcontext() if self.leases is None else self.leases.transfer()

    def _start_gather(self, group: LayerGroup) -> None:
        group.weights.revive()
        raw = group.weights.raw
        compare = self._check.announce(group.index) if self._check is not None else None
        if group.sent is None:
            group.write_sources()
            work = self.transport.all_gather_v(raw, group.gather_table)
        else:
            work = self._gather_narrow(group, group.sent)
        group.gathering = work if compare is None else _compared(compare, work)
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


def _compared(compare: Callable[[], None], work: Work) -> Work:
    """``work`` whose wait first compares whose call it is."""

    def finish() -> None:
        compare()
        work.wait()

    return Work(finish=finish, name=work.name)
