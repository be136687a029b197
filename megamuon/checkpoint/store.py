"""The store: the two calls ``save`` and ``load``, and the checkpoints of one run.

Owns the rule that a run has one save under way at most, so that the next one may clean up after a
killed one. Tested by ``tests/checkpoint/test_store.py`` and
``tests/distributed/test_checkpoint_ranks.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megamuon.checkpoint.loading import Loaded, load
from megamuon.checkpoint.ranks import Ranks, members_of
from megamuon.checkpoint.saving import SaveHandle, SaveReport, save
from megamuon.checkpoint.tensors import StoredTensor
from megamuon.checkpoint.tracker import Iteration

__all__ = ["Checkpoints", "Loaded", "SaveHandle", "SaveReport", "StoredTensor", "load", "save"]


class Checkpoints:
    """The checkpoints of one run: ``save`` with one save under way at most, and nothing lost at
    the end.

    An asynchronous save's error is raised by the next ``save`` or ``wait``, on all ranks alike.
    """

    def __init__(self, directory: Path, ranks: Ranks | None = None) -> None:
        # Now, and not hours later under the first save, when the environment may have changed.
        import megamuon.checkpoint.torch_store  # noqa: F401

        self.directory = Path(directory)
        self.ranks = members_of(ranks)
        self._pending: SaveHandle | None = None

    def save(
        self, iteration: Iteration, tensors: Sequence[StoredTensor], **options: Any
    ) -> SaveHandle:
        """As the function ``save``, after the save before it has ended."""
        self.wait()
        handle = save(self.directory, iteration, tensors, ranks=self.ranks, **options)
        self._pending = handle
        return handle

    def wait(self) -> SaveReport | None:
        """End the save under way, if any, and raise its error.  Collective in effect: call it on
        all ranks.
        """
        pending, self._pending = self._pending, None
        return pending.wait() if pending is not None else None
