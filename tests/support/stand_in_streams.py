"""The order of a GPU on a CPU, for the stand-in of the device library.

Owns ``StandInStreams`` and ``stand_in_parts``. The stand-in starts a call at once and a thread of
it goes on with it, so an event is over when the call is. What it cannot show is a missing wait of
one stream for another: the host is the current stream.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from ctypes import c_int, c_uint64
from pathlib import Path

import torch
from torch import Tensor

from megamuon.collectives.device_engine import DeviceEngine
from megamuon.collectives.device_library import DeviceLibrary
from megamuon.collectives.host_library import array
from tests.support.device_stand_in import EXTRAS

PATIENCE = 0.5  # seconds of a wait in C, between which Python looks at its signals


class _Event:
    """A call of the stand-in, or the round of a publish (``call`` None)."""

    def __init__(self, engine: DeviceEngine, call: int | None) -> None:
        self._engine, self._call = engine, call

    def query(self) -> bool:
        library, handle = self._engine.call, self._engine.handle
        if self._call is None:
            return bool(self._engine.check(library.mmd_stand_in_round_done(handle, 0)))
        return bool(self._engine.check(library.mmd_stand_in_done(handle, 0, self._call)))

    def wait(self) -> None:
        library, handle = self._engine.call, self._engine.handle
        if self._call is None:
            while library.mmd_stand_in_round_wait(handle, 0, PATIENCE) > 0:
                pass
        else:
            while library.mmd_stand_in_wait(handle, 0, self._call, PATIENCE) > 0:
                pass

    synchronize = wait


class _Over:
    """A point of the current stream, which is the host: it has passed."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    synchronize = wait


class _Arrival:
    """Parameters of a publish in their versions."""

    def __init__(
        self, engine: DeviceEngine, parameters: Sequence[int], versions: Sequence[int]
    ) -> None:
        self._engine, self._parameters, self._versions = engine, parameters, versions

    def query(self) -> bool:
        which, needed = array(c_int, self._parameters), array(c_uint64, self._versions)
        library = self._engine.call
        return bool(
            self._engine.check(
                library.mmd_stand_in_arrived(
                    self._engine.handle, 0, len(self._parameters), which, needed
                )
            )
        )

    def wait(self) -> None:
        self._engine.publish_wait(self._parameters, self._versions, 0)

    synchronize = wait


class StandInStreams:
    """See megamuon.collectives.device_streams.Streams."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._last: dict[str, _Event] = {}

    def current(self) -> int:
        return 0

    def mark(self) -> _Over:
        return _Over()

    def enter(self, name: str, after: _Over | None = None) -> int:
        return 0

    def leave(self, name: str, engine: DeviceEngine) -> _Event:
        call = None
        if name != "publish":
            call = engine.call.mmd_stand_in_calls(engine.handle, 0)
        self._last[name] = _Event(engine, call)
        return self._last[name]

    def arrival(
        self, engine: DeviceEngine, parameters: Sequence[int], versions: Sequence[int]
    ) -> _Arrival:
        return _Arrival(engine, parameters, versions)

    def memory(self, address: int, nbytes: int) -> Tensor:
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)

    def over_within(self, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while not all(event.query() for event in self._last.values()):
            if time.monotonic() > limit:
                return False
            time.sleep(0.001)
        return True

    def release_cache(self) -> None:
        assert self.over_within(60)


@functools.cache
def _library(path: Path) -> DeviceLibrary:
    library = DeviceLibrary(path)
    for name, (result, arguments) in EXTRAS.items():
        function = getattr(library.call, name)
        function.restype, function.argtypes = result, arguments
    return library


def stand_in_parts(path: Path) -> tuple[DeviceLibrary, StandInStreams]:
    """In the place of ``megamuon.collectives.fabric_choice.device_parts``."""
    return _library(path), StandInStreams()
