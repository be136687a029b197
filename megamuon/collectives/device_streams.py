"""The order of a GPU: streams on which operators run, and events that others wait for.

Owns ``CudaStreams``, one stream per operator beside the one that computes. Invariants: an operator
starts after what the current stream was given before the call, and what the current stream is given
after ``Event.wait`` starts after the operator; so memory of the pool may change hands in the order
in which the host says so. The interface ``Streams`` is there so that all but CUDA's own calls run
in tests on a CPU. Used, and tested, through ``device_fabric.py``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megamuon.collectives.device_engine import DeviceEngine


class Event(Protocol):
    """A point of a stream."""

    def wait(self) -> None:
        """What the current stream is given from now on starts after this point."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Return when the stream has passed it."""


class Streams(Protocol):
    """The streams of one rank, by the names of its operators."""

    device: torch.device

    def current(self) -> int:
        """The stream that computes, as the library takes it."""

    def mark(self) -> Event:
        """This point of the current stream."""

    def enter(self, name: str, after: Event | None = None) -> int:
        """Stream ``name``, which goes on when the current one has come to this point, or to that of
        ``after``, a mark.
        """

    def leave(self, name: str, engine: DeviceEngine) -> Event:
        """The point of stream ``name`` after the call that ``engine`` has just put there."""

    def arrival(
        self, engine: DeviceEngine, parameters: Sequence[int], versions: Sequence[int]
    ) -> Event:
        """The point at which each of ``parameters`` of a publish has arrived in its version."""

    def memory(self, address: int, nbytes: int) -> Tensor:
        """``nbytes`` of this rank's memory (uint8), which the caller keeps allocated."""

    def over_within(self, seconds: float) -> bool:
        """Wait until what this rank has put on its streams and the current one is over; False:
        ``seconds`` are, first. Waits for no other stream, and never without a limit.
        """

    def release_cache(self) -> None:
        """Return when everything that this rank has been given is over and its unused memory can
        be allocated by others than torch.
        """


class CudaStreams:
    """Streams of a GPU. Operators come before what computes when both have blocks to place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def current(self) -> int:
        """See Streams."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def mark(self) -> Event:
        """See Streams."""
        return _CudaEvent(torch.cuda.current_stream(self.device))

    def enter(self, name: str, after: Event | None = None) -> int:
        """See Streams."""
        stream = self._of(name)
        if after is None:
            after = self.mark()
        with torch.cuda.stream(stream):
            after.wait()
        return stream.cuda_stream

    def leave(self, name: str, engine: DeviceEngine) -> Event:
        """See Streams."""
        return _CudaEvent(self._of(name))

    def arrival(
        self, engine: DeviceEngine, parameters: Sequence[int], versions: Sequence[int]
    ) -> Event:
        """See Streams. On a stream of its own, where a kernel of one thread watches the flags: the
        current stream must not stand still for a copy that is only asked about.
        """
        stream = self._of("arrival")
        engine.publish_wait(parameters, versions, stream.cuda_stream)
        return _CudaEvent(stream)

    def memory(self, address: int, nbytes: int) -> Tensor:
        """See Streams."""
        return torch.as_tensor(_Span(address, nbytes), device=self.device)

    def over_within(self, seconds: float) -> bool:
        """See Streams."""
        limit = time.monotonic() + seconds
        streams = [*self._streams.values(), torch.cuda.current_stream(self.device)]
        for event in [_CudaEvent(stream) for stream in streams]:
            while not event.query():
                if time.monotonic() > limit:
                    return False
                time.sleep(0.001)
        return True

    def release_cache(self) -> None:
        """See Streams."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def _of(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device, priority=-1)
        return self._streams[name]


class _CudaEvent:
    """An event recorded on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()


class _Span:
    """Memory of the GPU that torch did not allocate, as torch takes it in."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
