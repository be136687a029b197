"""The plan of the symmetric pool: which buffers may share memory, from a recorded micro-batch.

Owns leases, events, their recorder, and the plan that gives each lease its place; pure integers, no
tensors and no ranks. Invariants: two leases that were ever live together in the recorded cycle
never overlap; equal inputs give an equal plan, whatever the rank. Tested by
``tests/runtime/test_pool.py``.

[Note: one cycle]

Memory that transfers read and write must lie at the same offset on all ranks, for life, so it
cannot come from an allocator that decides anew each time. But a training step repeats: a lease (one
kind of buffer of one layer group) that was never live together with another one will not be later.
So what comes alive and what is released is recorded, from the end of the first micro-batch to the
end of the first step after a whole recorded one. That stretch is read as a cycle: what is live at
its end is live at its start, and the other way round. Each lease gets one offset; leases that were
live together get disjoint ranges, others may share. The record may hold more than one cycle, or an
evaluation: a forward without gradients adds conflicts and takes none away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megamuon.runtime.buffers import ALIGNMENT

# What is leased: gathered weights in the compute dtype; the same in the dtype that gathers carry,
# where that is another; unsharded gradients; the FP32 sum of several micro-batches' gradients.
KINDS = ("weights", "sent", "gradients", "accumulated")
# Reduced gradients lie in the pool too, each alone; the word is a key of the benchmarks' JSON.
SHARDED = "windows"

Key = tuple[str, int]  # kind, index of the group


class PoolConflictError(RuntimeError):
    """A buffer comes alive whose range another one still uses, in a way that no record has seen."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What one kind of buffer of one group needs."""

    kind: str
    group: int
    nbytes: int

    @property
    def key(self) -> Key:
        """What the lease is known by."""
        return self.kind, self.group


@dataclass(frozen=True, kw_only=True)
class Event:
    """A buffer has come alive, or was released."""

    kind: str
    group: int
    acquire: bool


class Recorder:
    """The events of a cycle, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.live: tuple[Key, ...] = ()  # at the start of the record
        self.events: list[Event] = []

    def start(self, live: Iterable[Key]) -> None:
        """Record from now on; ``live`` is in use already."""
        self.on, self.live, self.events = True, tuple(live), []

    def stop(self) -> None:
        """Keep what there is."""
        self.on = False

    def acquired(self, kind: str, group: int) -> None:
        """A buffer comes alive."""
        if self.on:
            self.events.append(Event(kind=kind, group=group, acquire=True))

    def released(self, kind: str, group: int) -> None:
        """A buffer was released."""
        if self.on:
            self.events.append(Event(kind=kind, group=group, acquire=False))

    def watch(self, kind: str, group: int) -> Callable[[bool], None]:
        """What a buffer tells of its life (``FlatBuffer.watch``)."""
        return lambda alive: (self.acquired if alive else self.released)(kind, group)


def encode(live: Iterable[Key], events: Iterable[Event]) -> tuple[int, ...]:
    """A record as integers, so that ranks can take rank 0's."""
    held = [_number(kind, group) for kind, group in live]
    return (len(held), *held, *(2 * _number(e.kind, e.group) + e.acquire for e in events))


def decode(values: Sequence[int]) -> tuple[tuple[Key, ...], tuple[Event, ...]]:
    """The record that ``encode`` was given."""
    first = values[0] + 1
    live = tuple((KINDS[v % len(KINDS)], v // len(KINDS)) for v in values[1:first])
    events = []
    for value in values[first:]:
        number, acquire = divmod(value, 2)
        group, kind = divmod(number, len(KINDS))
        events.append(Event(kind=KINDS[kind], group=group, acquire=bool(acquire)))
    return live, tuple(events)


def _number(kind: str, group: int) -> int:
    return group * len(KINDS) + KINDS.index(kind)


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """Where everything lies in the pool, in bytes from its start; equal on all ranks.

    ``nbytes`` counts each byte once: one that several kinds use counts as the first of KINDS that
    does, so the values add up to ``total``.
    """

    offsets: dict[Key, int]
    sizes: dict[Key, int]  # multiples of the alignment
    sharded: dict[int, int]  # offsets
    nbytes: dict[str, int]
    total: int
    excluded: dict[int, str]  # groups that stay on the heap, and why

    @cached_property
    def digest(self) -> str:
        """Equal for equal plans."""
        places = [[*key, self.offsets[key], size] for key, size in sorted(self.sizes.items())]
        sharded, excluded = sorted(self.sharded.items()), sorted(self.excluded.items())
        text = json.dumps([ALIGNMENT, places, sharded, excluded, self.total])
        return hashlib.sha256(text.encode()).hexdigest()

    def texts(self) -> dict[str, str]:
        """What ranks compare, by name."""
        return {
            "bytes": str(self.total),
            "leases": str(len(self.sizes)),
            "excluded": ",".join(map(str, sorted(self.excluded))) or "none",
            "digest": self.digest[:16],
        }

    @cached_property
    def overlaps(self) -> dict[Key, tuple[Key, ...]]:
        """For each lease those whose ranges overlap its own."""
        spans = {key: (start, start + self.sizes[key]) for key, start in self.offsets.items()}
        return {
            key: tuple(
                other
                for other, (start, stop) in spans.items()
                if other != key and start < end and begin < stop
            )
            for key, (begin, end) in spans.items()
        }


def plan_pool(
    leases: Iterable[Lease],
    events: Sequence[Event],
    live: Iterable[Key],
    *,
    sharded: Mapping[int, int],
    excluded: Mapping[int, str],
) -> PoolPlan:
    """Places for ``leases`` by the recorded cycle, then for ``sharded`` (bytes by group, the most
    that any rank has).

    Groups in ``excluded`` get no place. A lease that the cycle never saw shares with nobody. Raises
    ValueError for a kind that is none of KINDS and for a lease that is given twice.
    """
    sizes: dict[Key, int] = {}
    for lease in leases:
        if lease.kind not in KINDS or lease.key in sizes:
            raise ValueError(f"{lease}: its kind must be one of {KINDS}, and given once per group")
        if lease.nbytes and lease.group not in excluded:
            sizes[lease.key] = _aligned(lease.nbytes)
    offsets = _place(sizes, find_conflicts(sizes, events, live))
    shared = max((offsets[key] + size for key, size in sizes.items()), default=0)
    end = shared
    places: dict[int, int] = {}
    for group, nbytes in sorted(sharded.items()):
        if nbytes and group not in excluded:
            places[group] = end
            end += _aligned(nbytes)
    nbytes_of = _bytes_by_kind(offsets, sizes)
    return PoolPlan(
        offsets=offsets,
        sizes=sizes,
        sharded=places,
        nbytes={**nbytes_of, SHARDED: end - shared},
        total=end,
        excluded=dict(excluded),
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def find_conflicts(
    keys: Iterable[Key], events: Sequence[Event], live: Iterable[Key]
) -> dict[Key, set[Key]]:
    """For each lease those that are ever live together with it in the cycle; a lease that is never
    live in it is in conflict with all.
    """
    known = set(keys)
    found: dict[Key, set[Key]] = {key: set() for key in known}
    now = {key for key in live if key in known}
    seen = set(now)
    for _ in range(2):  # the second time round starts with what the first one left behind, too
        start = set(now)
        for key in start:
            found[key] |= start - {key}
        for event in events:
            key = (event.kind, event.group)
            if key not in known:
                continue
            seen.add(key)
            if not event.acquire:
                now.discard(key)
                continue
            for other in now - {key}:
                found[key].add(other)
                found[other].add(key)
            now.add(key)
        now |= start
    for key in known - seen:
        for other in known - {key}:
            found[key].add(other)
            found[other].add(key)
    return found


def _place(sizes: Mapping[Key, int], conflicts: Mapping[Key, set[Key]]) -> dict[Key, int]:
    """Largest first; each at the lowest offset where it overlaps nothing that it may not."""
    order = sorted(sizes, key=lambda key: (-sizes[key], KINDS.index(key[0]), key[1]))
    offsets: dict[Key, int] = {}
    for key in order:
        taken = [(offsets[o], offsets[o] + sizes[o]) for o in conflicts[key] if o in offsets]
        at = 0
        for start, stop in sorted(taken):
            if at + sizes[key] <= start:
                break
            at = max(at, stop)
        offsets[key] = at
    return offsets


def _bytes_by_kind(offsets: Mapping[Key, int], sizes: Mapping[Key, int]) -> dict[str, int]:
    """Each byte of the shared part once, for the first kind that uses it."""
    edges = sorted({edge for key, at in offsets.items() for edge in (at, at + sizes[key])})
    counted = dict.fromkeys(KINDS, 0)
    for start, stop in zip(edges, edges[1:], strict=False):
        using = {key[0] for key, at in offsets.items() if at <= start < at + sizes[key]}
        if using:
            counted[min(using, key=KINDS.index)] += stop - start
    return counted
