"""An optional check that each collective call is for the same layer group on all ranks.

Owns ``CallCheck``. Two ranks that call collectives of equal size in different orders exchange the
wrong bytes, and no library notices. With this check every call is announced on its communicator by
an exchange of its number and its group's name, and whoever waits for the call compares them.
Invariant: the announcements are asynchronous and come in the order of the calls, so that they
change no order and add no wait that the call itself does not have. For tests and for debugging
(``--check-collective-order``): it costs a small collective per call. Tested by
``tests/distributed/test_call_check.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megamuon.collectives.base import CollectiveError, named


class CallCheck:
    """Announces the calls on one communicator."""

    def __init__(
        self, operation: str, group: dist.ProcessGroup | None, names: Sequence[str]
    ) -> None:
        """``operation``: what errors call a call. ``names``: of the layer groups, by index."""
        self.operation, self.group, self.names = operation, group, tuple(names)
        self.calls = 0

    def announce(self, index: int) -> Callable[[], None]:
        """This rank calls the operation for layer group ``index``. Call the result before using
        what the operation brings: it raises CollectiveError where another rank called it for
        another group.
        """
        if self.group is None:
            return lambda: None
        self.calls += 1
        call = self.calls
        mine = torch.tensor([call, index])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        handle = dist.all_gather(everyone, mine, group=self.group, async_op=True)

        def compare() -> None:
            with named(f"order check of {self.operation} {call}"):
                handle.wait()
            said = [tuple(theirs.tolist()) for theirs in everyone]
            if len(set(said)) > 1:
                raise CollectiveError(self._message(said))

        return compare

    def _message(self, said: Sequence[tuple[int, int]]) -> str:
        lines = ", ".join(
            f"rank {dist.get_global_rank(self.group, place)}: number {call},"
            f" {self.names[index] or 'loose parameters'!r}"
            for place, (call, index) in enumerate(said)
        )
        return (
            f"the ranks are in different calls of one {self.operation}: {lines}. Their bytes would"
            " be swapped"
        )
