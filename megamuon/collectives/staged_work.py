"""A collective of several stages, each of which starts when the one before it is over.

Owns ``StagedWork``. Invariant: the later stages of all works in one queue start in the order in
which the works were made, whichever way a rank mixes ``advance()`` and ``wait()``, so the ranks of
a rail cannot misalign each other's collectives. Tested by
``tests/collectives/test_staged_work.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megamuon.collectives.base import CollectiveError, Work

STAGE_1 = "stage 1 (inside the replica)"
STAGE_2 = "stage 2 (along the rail)"
STAGE_2_SHARE = "stage 2 (finished sums to all replicas)"


class StagedWork:
    """A reduction in flight, in stages. Whichever way the ranks of a rail mix ``advance()`` and
    ``wait()``, the later stages start in the order of the ``reduce`` calls: a work first starts all
    stages of those before it in ``queue``.
    """

    def __init__(
        self,
        first: Work,
        later: Sequence[tuple[str, Callable[[], Work]]],
        queue: deque[StagedWork],
    ) -> None:
        self._work, self._name = first, STAGE_1
        self._later = deque(later)
        self._queue = queue
        self._advanced = False
        self._borrows = first.borrows
        if self._later:
            queue.append(self)

    @property
    def borrows(self) -> bool:
        """Whether the input must stay as it is, which ends when stage 1 is over."""
        return self._borrows and not self._advanced

    def advance(self) -> None:
        """Wait for stage 1 and start stage 2; again: nothing happens. Raises CollectiveError."""
        if self._advanced:
            return
        self._start_predecessors()
        if self._later:
            self._start_next()
        else:
            self._wait()
        self._advanced = True

    def wait_first(self) -> None:
        """Wait for stage 1 and start nothing; again: nothing happens. Raises CollectiveError."""
        if self._name == STAGE_1:
            self._wait()

    def free_unsharded(self) -> None:
        """Return when the input is read no more, with the next stage started; again: nothing
        happens. Raises CollectiveError.
        """
        StagedWork.advance(self)  # one that never blocks is no help here

    def wait(self) -> None:
        """Return when the output holds the result; again: nothing happens. Raises CollectiveError
        naming the stage where a peer was lost.
        """
        self._start_predecessors()
        self._start_all()
        self._wait()

    def done(self) -> bool:
        """Whether ``wait()`` would return at once, but for unpacking; starts nothing."""
        return not self._later and self._work.done()

    def _start_predecessors(self) -> None:
        while self._later and self._queue[0] is not self:
            self._queue[0]._start_all()

    def _start_all(self) -> None:
        while self._later:
            self._start_next()
        self._advanced = True

    def _start_next(self) -> None:
        self._wait()
        name, start = self._later[0]
        with stage(name):
            self._work, self._name = start(), name
        self._later.popleft()
        if not self._later:
            self._queue.popleft()

    def _wait(self) -> None:
        with stage(self._name):
            self._work.wait()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Name the stage in whatever a backend raises."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"two-stage reduction, {name}: {error}") from error
