"""One frozen order per communicator.

Owns the cursor that turns "this group is needed now" into the list of groups to issue. Invariant:
whatever a rank uses or skips, the sequence of issued groups is a prefix of the one frozen order,
and ``rest()`` completes it; so no rank can misalign another's collectives. Tested by
``tests/runtime/test_order.py``.

[Note: frozen order]

A collective only works if every rank makes the same calls in the same order. Ranks may use a model
differently (a branch skipped on one rank, a parameter without a gradient on another), so the order
of calls must not follow the order of use. Each communicator therefore has a frozen list of groups.
A group that is needed is issued together with everything before it in the list; what nobody asked
for is issued at the end of the pass. Reductions wait the other way round: a group that is ready is
held back until all of its predecessors are.
"""

from __future__ import annotations

from collections.abc import Sequence


class Cursor:
    """Walks a frozen order; each pass starts with ``reset``."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = tuple(order)
        self._position = {group: place for place, group in enumerate(self.order)}
        if len(self._position) != len(self.order):
            raise ValueError(f"a frozen order names a group twice: {self.order}")
        self.next = 0

    def reset(self) -> None:
        """Start a new pass."""
        self.next = 0

    def through(self, group: int) -> tuple[int, ...]:
        """What to issue so that ``group`` has been; nothing if the cursor is past it already."""
        place = self._position[group]
        issued = self.order[self.next : place + 1]
        self.next = max(self.next, place + 1)
        return issued

    def following(self, group: int) -> int | None:
        """The group after ``group``, the one to prefetch; None at the end."""
        place = self._position[group] + 1
        return self.order[place] if place < len(self.order) else None

    def rest(self) -> tuple[int, ...]:
        """Everything that has not been issued in this pass."""
        issued = self.order[self.next :]
        self.next = len(self.order)
        return issued

    def ready(self, groups: set[int]) -> tuple[int, ...]:
        """The longest run from the cursor whose members are all in ``groups``."""
        start = self.next
        while self.next < len(self.order) and self.order[self.next] in groups:
            self.next += 1
        return self.order[start : self.next]


def recorded_order(used: Sequence[int], count: int) -> tuple[int, ...]:
    """Order of first use, then the unused groups in registration order."""
    order = list(dict.fromkeys(used))
    return tuple(order + [group for group in range(count) if group not in set(order)])
