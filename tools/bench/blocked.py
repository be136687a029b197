"""How long a thread stands in waits of collectives.

Owns ``Blocked``. Invariant: it wraps the one call in which every wait of torch.distributed ends
(``Work.wait``: blocking collectives, handles, FSDP2's own) and the three in which a thread waits
for an operator of the host fabric, so no line can wait unseen, and changes nothing else. A wait for
a slower rank counts as communication. Tested by ``tests/tools/test_lines.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megamuon.collectives.host_engine import HostCalls, HostPublish
from megamuon.collectives.publish import Publisher
from megamuon.collectives.ready_publish import ReadyPublisher

WAITS = (
    (dist.Work, "wait"),
    (HostCalls, "wait"),
    (HostPublish, "publish_wait"),
    (HostPublish, "publish_drain"),
)


class Blocked:
    """Seconds in waits so far: those for published weights, and all others."""

    def __init__(self) -> None:
        self.communication = 0.0
        self.publish = 0.0
        self._publishing = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count all waits of this process until the block ends."""
        originals = [(kind, name, getattr(kind, name)) for kind, name in WAITS]
        for kind, name, original in originals:
            setattr(kind, name, self._timed(original))
        try:
            yield
        finally:
            for kind, name, original in originals:
                setattr(kind, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                if self._publishing:
                    self.publish += seconds
                else:
                    self.communication += seconds

        return wait

    def follow(self, publisher: Publisher | ReadyPublisher) -> None:
        """Count the waits inside ``publisher`` as waits for published weights."""
        for name in ("expect", "wait", "drain"):
            setattr(publisher, name, self._marked(getattr(publisher, name)))

    def _marked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._publishing = True
            try:
                return method(*args, **kwargs)
            finally:
                self._publishing = False

        return marked

    def now(self) -> tuple[float, float, float]:
        """The clock and both counts, to take differences of."""
        return time.perf_counter(), self.communication, self.publish
