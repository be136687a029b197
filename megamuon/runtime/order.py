"""The frozen order of collectives on a communicator, and the cursor that follows it.

Owns the cursor that turns "this group is needed now" into the list of groups to issue, and the
rules by which an order is recorded and replaced. Invariant: whatever a rank uses or skips, the
sequence of issued groups is a prefix of the one frozen order, and ``rest()`` completes it; so no
rank can misalign another's collectives. Tested by ``tests/runtime/test_order.py``.

[Note: frozen order]

A collective only works if every rank makes the same calls in the same order. Ranks may use a model
differently (a branch skipped on one rank, a parameter without a gradient on another), so the order
of calls must not follow the order of use. Each communicator therefore has a frozen list of groups.
A group that is needed is issued together with everything before it in the list; what nobody asked
for is issued at the end of the pass. Reductions wait the other way round: a group that is ready is
held back until all of its predecessors are, or until they are due (``[Note: who waits for whom]``
in ``engine.py``).

The list is rank 0's order of first use in the first forward pass. A pass that went another way is
corrected later: when rank 0 has used the groups twice running in an order that contradicts the
list, the ranks freeze the new one between two steps. A pass that only left groups out contradicts
nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet


class Cursor:
    """Walks a frozen order; each pass starts with ``reset``."""

    def __init__(self, order: Sequence[int], turns: Sequence[int] | None = None) -> None:
        """``turns``: which groups are used together, as ``turns_of`` gives it; without it each has
        a turn of its own.
        """
        self.order = tuple(order)
        self.turns = tuple(range(len(self.order)) if turns is None else turns)
        self._position = {group: place for place, group in enumerate(self.order)}
        if len(self._position) != len(self.order):
            raise ValueError(f"a frozen order names a group twice: {self.order}")
        self.next = 0

    def reset(self) -> None:
        """Start a new pass."""
        self.next = 0

    def __contains__(self, group: int) -> bool:
        return group in self._position

    def through(self, group: int) -> tuple[int, ...]:
        """What to issue so that ``group`` has been; nothing if the cursor is past it already."""
        place = self._position[group]
        issued = self.order[self.next : place + 1]
        self.next = max(self.next, place + 1)
        return issued

    def following(self, group: int, count: int) -> tuple[int, ...]:
        """What is left of the turn of ``group`` and the ``count`` turns after it, to prefetch;
        fewer at the end.
        """
        place = self._position[group]
        end = bisect_right(self.turns, self.turns[place] + count)
        return self.order[place + 1 : end]

    def rest(self) -> tuple[int, ...]:
        """Everything that has not been issued in this pass."""
        issued = self.order[self.next :]
        self.next = len(self.order)
        return issued

    def ready(
        self, groups: AbstractSet[int], skipped: AbstractSet[int] = frozenset()
    ) -> tuple[int, ...]:
        """The longest run from the cursor that ends in one of ``groups``, all others in it being in
        ``groups`` or ``skipped``.
        """
        start = self.next
        for place in range(start, len(self.order)):
            if self.order[place] in groups:
                self.next = place + 1
            elif self.order[place] not in skipped:
                break
        return self.order[start : self.next]


def turns_of(order: Sequence[int], modules: Sequence[Hashable]) -> tuple[int, ...]:
    """The turn of each group of ``order``, ascending from 0. Neighbours of one module share a turn:
    they differ in their dtype alone, and one forward uses them all. ``modules``: by group.
    """
    turns: list[int] = []
    for place, group in enumerate(order):
        together = place > 0 and modules[group] == modules[order[place - 1]]
        turns.append(turns[-1] + (not together) if turns else 0)
    return tuple(turns)


def merged_order(used: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The groups of ``order`` in the order of their first use; one that was not used stays behind
    the group that it follows in ``order``.
    """
    merged = list(dict.fromkeys(used))
    for place, group in enumerate(order):
        if group not in merged:
            merged.insert(merged.index(order[place - 1]) + 1 if place else 0, group)
    return tuple(merged)


def follows(used: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the first uses in ``used`` come in the order of ``order``, some perhaps left out."""
    position = {group: place for place, group in enumerate(order)}
    places = [position[group] for group in dict.fromkeys(used)]
    return places == sorted(places)
