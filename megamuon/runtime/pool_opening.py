"""Recording of buffers for the symmetric pool, and moving layer groups into it.

Owns ``PoolRecording`` (watches all buffers, and makes the plan that all ranks agree on),
``open_pool`` (moves buffers, parameters and gradients into the memory of the pool) and
``OpenPool`` (which ranges are in use). Invariants: a pooled buffer never changes its address; no
two live buffers overlap; making room never issues, drops or reorders a collective, so ranks may do
it differently. Tested by ``tests/distributed/test_pool.py`` and ``tests/runtime/test_pool.py``.

[Note: room in the pool]

The plan lets buffers share memory that were never alive together in rank 0's recorded micro-batch.
Ranks and later passes may differ: a skipped branch leaves a gathered group that nobody enters, and
gradients that wait for a group that never becomes ready. So before a buffer comes alive, whatever
overlaps it makes room: a reduction or a gather in flight is waited for, weights that nobody has
entered and gradients that wait are set aside on the heap until they are used. Weights in use
cannot move, because autograd has saved views of them; but a collective that needs their range
returns before autograd goes on. So they leave it for the length of that collective, and what it
brought is set aside (``transfer``). All of that costs time and changes no result. What remains is a
backward that writes gradients into a range whose weights it reads at the same time: an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.agreement import exchange_pool, integers_of_rank_zero
from megamuon.runtime.engine import Engine
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.pool import (
    Key,
    Lease,
    PoolConflictError,
    PoolPlan,
    Recorder,
    decode,
    encode,
    plan_pool,
)

RECEIVED_ALL = -1  # in place of the first parameter that received no gradient


class Memory(Protocol):
    """Memory that lies at the same offsets on all ranks; ``SymmetricMemory`` is one."""

    nbytes: int

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A view ``(numel,)`` of this rank's memory from byte ``offset`` on."""


# --- recording -----------------------------------------------------------------------------------


class PoolRecording:
    """Watches a runtime's buffers from the end of its first micro-batch to the first step after a
    whole recorded one. Where the first micro-batch kept its gradients on the rank, one that does so
    must be among the recorded: it holds more at a time than one that reduces.

    Evaluations in between are recorded as well: they add conflicts and take none away. ``group``
    has the ranks that will share the pool (None: one rank), in ``replicas`` replicas.
    """

    def __init__(
        self, engine: Engine, group: dist.ProcessGroup | None, *, replicas: int = 1
    ) -> None:
        self.engine = engine
        self.group = group
        self.replicas = replicas
        self.recorder = Recorder()
        self.complete = False
        self._first_kept = False  # the first micro-batch kept its gradients on the rank
        self._recorded: set[bool] = set()  # of which micro-batches there are whole records
        self._received: dict[int, set[str]] = {group.index: set() for group in engine.groups}
        engine.reductions.hold_unsharded = True

    def micro_batch_done(self) -> None:
        """A backward pass has ended."""
        if self.complete:
            return
        kept = self.engine.accumulated
        if not self.recorder.on:
            self._first_kept = kept
            self._start()
            return
        self._recorded.add(kept)
        for group in self.engine.groups:
            self._received[group.index] |= group.touched

    def _start(self) -> None:
        live: list[Key] = []
        for group in self.engine.groups:
            for kind, buffer in group.leased.items():
                buffer.watch = self.recorder.watch(kind, group.index)
                if buffer.alive:
                    live.append((kind, group.index))
        self.recorder.start(live)

    def step_done(self) -> bool:
        """An update has ended: whether the record is complete, the same on all ranks."""
        if not self.complete and self._recorded and self._first_kept in {False, *self._recorded}:
            self.complete = True
            self.recorder.stop()
            for group in self.engine.groups:
                for buffer in group.leased.values():
                    buffer.watch = None
        return self.complete

    def plan(self) -> PoolPlan:
        """The plan by rank 0's record. A collective over ``group``. Raises PlanMismatchError on all
        ranks where one computes another plan, and RuntimeError before the record is complete.
        """
        if not self.complete:
            raise RuntimeError("the pool is planned from a whole recorded micro-batch: train on")
        groups = self.engine.groups
        missing = [self._first_without_gradient(group) for group in groups]
        values = (*missing, *encode(self.recorder.live, self.recorder.events))
        values = self._of_rank_zero(values)
        missing = list(values[: len(groups)])
        live, events = decode(values[len(groups) :])
        seen = {*live, *((event.kind, event.group) for event in events)}
        # Weights that are in use from one end of a pass to the other share with nothing, however
        # short the record's use of them was: nobody could make room for them.
        kept = {(kind, g) for kind in ("weights", "sent") for g in self.engine.always_kept}
        live = tuple(key for key in live if key not in kept)
        events = tuple(event for event in events if (event.kind, event.group) not in kept)
        plan = plan_pool(
            [
                Lease(kind=kind, group=group.index, nbytes=buffer.nbytes)
                for group in groups
                for kind, buffer in group.leased.items()
                if (kind, group.index) in seen
            ],
            events,
            live,
            sharded={group.index: sharded_bytes(group, self.replicas) for group in groups},
            excluded=exclusions(groups, missing, self.replicas),
        )
        exchange_pool(plan.texts(), self.group)
        return plan

    def _first_without_gradient(self, group: LayerGroup) -> int:
        received = self._received[group.index]
        for place, parameter in enumerate(group.trainable):
            if parameter.name not in received:
                return place
        return RECEIVED_ALL

    def _of_rank_zero(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Records of ranks may differ in length: that is agreed on first."""
        device = self.engine.groups[0].master.device
        (length,) = integers_of_rank_zero((len(values),), self.group, device)
        padded = (values + (0,) * length)[:length]
        return integers_of_rank_zero(padded, self.group, device)


def exclusions(
    groups: Sequence[LayerGroup], missing: Sequence[int], replicas: int
) -> dict[int, str]:
    """Groups that stay on the heap of a grid of ``replicas`` replicas, and why. ``missing``: for
    each group the place of its first trainable parameter that received no gradient, or
    RECEIVED_ALL.
    """
    found: dict[int, str] = {}
    for group, place in zip(groups, missing, strict=True):
        if place != RECEIVED_ALL:
            name = group.trainable[place].name
            found[group.index] = f"{name} received no gradient in the recorded micro-batch"
            continue
        held = {
            piece.replica
            for pieces in group.reduce_table.replicas
            for piece in pieces
            if piece.numel
        }
        if replicas > 1 and None in held and len(held) > 1:
            found[group.index] = (
                "its sharded gradients mix slices that every replica keeps with matrices that one"
                " replica owns"
            )
    return found


def sharded_bytes(group: LayerGroup, replicas: int) -> int:
    """The most that a rank's sharded gradients of a group take, on a grid of ``replicas``."""
    table = group.reduce_table
    shards = range(len(table.replicas))
    most = max(table.numel_of(shard, replica) for shard in shards for replica in range(replicas))
    return most * group.sharded_gradient.element_size()


# --- the open pool -------------------------------------------------------------------------------


class OpenPool:
    """Which leases of an open pool are live on this rank, and how they make room."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        plan: PoolPlan,
        memory: Memory,
        free_unsharded: Callable[[LayerGroup], None],
    ) -> None:
        self.groups = tuple(groups)
        self.plan = plan
        self.memory = memory
        self.live: set[Key] = set()
        self.bytes_set_aside = 0  # copied out of the way since the pool was opened
        self._free_unsharded = free_unsharded
        self._transferring = False
        # Weights in use that a collective has displaced: their key, what displaced them, contents.
        self._displaced: list[tuple[Key, Key, Tensor]] = []

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """One collective is made inside: what it needs may displace weights in use, which are back
        at the end; then it has been waited for.
        """
        self._transferring = True
        try:
            yield
        finally:
            self._transferring = False
            displaced, self._displaced = self._displaced, []
            for key, by, contents in displaced:
                self._end_transfer(by)
                self.groups[key[1]].leased[key[0]].raw.copy_(contents)
                self.live.add(key)

    def _end_transfer(self, key: Key) -> None:
        """Wait for the collective of a buffer and set aside what it brought."""
        kind, group = key[0], self.groups[key[1]]
        if kind in ("weights", "sent"):
            group.wait_gathered()
        elif group.reducing is not None:
            self._free_unsharded(group)
        if key in self.live:
            self._set_aside(key)

    def watch(self, kind: str, group: int) -> Callable[[bool], None]:
        """What a pooled buffer tells of its life (``FlatBuffer.watch``)."""
        key = (kind, group)
        return lambda alive: self._acquire(key) if alive else self.live.discard(key)

    def free(self, group: LayerGroup) -> bool:
        """Whether a gather of ``group`` would find its range free."""
        keys = (("weights", group.index), ("sent", group.index))
        return not any(
            other in self.live for key in keys for other in self.plan.overlaps.get(key, ())
        )

    def _acquire(self, key: Key) -> None:
        for other in self.plan.overlaps[key]:
            if other in self.live:
                self._make_room(key, other)
        self.live.add(key)

    def _make_room(self, key: Key, other: Key) -> None:
        """End the lease ``other``. Raises PoolConflictError where it is in use."""
        kind, group = other[0], self.groups[other[1]]
        if kind == "sent":
            group.wait_gathered()  # widening it ends the lease
        elif kind == "weights":
            group.wait_gathered()
            if not (group.entered or group.resident):
                self._set_aside(other)
            elif self._transferring:
                self._displaced.append((other, key, group.weights.raw.clone()))
                self.live.discard(other)
        else:
            if group.reducing is not None:
                self._free_unsharded(group)
            if other in self.live and key[1] != other[1]:
                self._set_aside(other)
        if other in self.live:
            raise self._conflict(key, other)

    def _set_aside(self, key: Key) -> None:
        buffer = self.groups[key[1]].leased[key[0]]
        self.bytes_set_aside += buffer.nbytes
        buffer.set_aside()

    def _conflict(self, key: Key, other: Key) -> PoolConflictError:
        start = self.plan.offsets[key]
        return PoolConflictError(
            f"{key[0]} of {self._name(key)} go to bytes {start}..{start + self.plan.sizes[key]} of"
            f" the symmetric pool, where {other[0]} of {self._name(other)} are still in use: this"
            " pass runs the layers in another way than the micro-batch that the pool was planned"
            " by. Start with --collectives grouped"
        )

    def _name(self, key: Key) -> str:
        return f"group {self.groups[key[1]].name or 'of loose parameters'!r}"


def open_pool(
    groups: Sequence[LayerGroup],
    plan: PoolPlan,
    memory: Memory,
    parameters_by_name: Mapping[str, nn.Parameter],
    *,
    free_unsharded: Callable[[LayerGroup], None],
) -> OpenPool:
    """Move what ``plan`` names into ``memory``: between two steps, when no graph of autograd is
    alive. Gathered weights are dropped, sharded gradients keep their contents.

    ``free_unsharded`` waits until a group's reduction reads its unsharded gradients no
    more. Raises ValueError where the memory is too small, RuntimeError where gradients wait.
    """
    if memory.nbytes < plan.total:
        raise ValueError(f"a pool of {plan.total} bytes does not fit into {memory.nbytes} bytes")
    for group in groups:
        if group.reducing is not None or group.accumulated is not None or group.gradients.alive:
            raise RuntimeError(
                f"group {group.name!r} still holds gradients: the pool opens between two steps"
            )
    pool = OpenPool(groups, plan, memory, free_unsharded)
    for group in groups:
        buffers = group.leased
        for kind, buffer in buffers.items():
            if (kind, group.index) not in plan.offsets:
                continue
            at = plan.offsets[kind, group.index]
            place = memory.tensor(at, buffer.raw.numel(), buffer.raw.dtype)
            _bind(group, kind, place, parameters_by_name)
            buffer.watch = pool.watch(kind, group.index)
        if group.index in plan.sharded:
            at = plan.sharded[group.index]
            group.bind_sharded(
                memory.tensor(at, group.sharded_gradient.numel(), group.sharded_gradient.dtype)
            )
    return pool


def _bind(
    group: LayerGroup, kind: str, place: Tensor, parameters: Mapping[str, nn.Parameter]
) -> None:
    if kind == "weights":
        group.forget_weights()
        group.bind_weights(place, parameters)
    elif kind == "sent":
        group.wait_gathered()
        assert group.sent is not None  # it was leased
        group.sent.bind(place)
    elif kind == "gradients":
        group.bind_gradients(place)
    else:
        group.sums.bind(place)
