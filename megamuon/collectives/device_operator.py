"""An operator of the device library: its tables, calls and rounds, on the stream of its name.

Owns the events of calls under way and the moment at which a publish's kernel is launched.
Invariants: an operator's calls are all on one stream; a table is on the GPU before a call reads it;
no kernel waits for what this process still has to launch. Tested on CPU ranks by
``tests/distributed/test_device_fabric.py``, over a stand-in for the library, and by
``tests/collectives/test_device_operator.py``; on a GPU by ``tools/gpu_training.py`` alone so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint64, cast
from dataclasses import dataclass

import torch

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.device_engine import DeviceEngine
from megamuon.collectives.device_streams import Event, Streams
from megamuon.collectives.host_library import array
from megamuon.collectives.operator_settings import OPERATOR_KINDS, OperatorConfig
from megamuon.collectives.operators import TableRefused

MULTIMEM_BYTES = 16  # what one multicast store moves


class DeviceOperator:
    """The operator of an engine, called on the stream of its name.

    Tables can be made and calls can start once ``attach`` has given it an operator of the library.
    """

    def __init__(self, engine: DeviceEngine, name: str, streams: Streams) -> None:
        self.engine, self.name, self.streams = engine, name, streams
        self._number = -1

    def attach(self, config: OperatorConfig) -> None:
        """Make the operator in the engine's windows, which are open."""
        self._number = self.engine.operator(config, self.name)

    def upload(self) -> None:
        """See Fabric.upload_tables."""


class DeviceCalls(DeviceOperator):
    """An operator whose calls return tickets; see operators.CallOperator."""

    def __init__(self, engine: DeviceEngine, name: str, streams: Streams) -> None:
        super().__init__(engine, name, streams)
        self._calls = 0
        self._tables = self._uploaded = 0
        self._events: dict[int, Event] = {}  # of calls that nobody has waited for

    def upload(self) -> None:
        """Bring the tables that were made since the last time to the GPU, in one copy."""
        if self._uploaded < self._tables:
            self.engine.upload()
            self._uploaded = self._tables

    def _launched(self) -> int:
        self._calls += 1
        self._events[self._calls] = self.streams.leave(self.name, self.engine)
        return self._calls

    def done(self, ticket: int) -> bool:
        """See operators."""
        event = self._events.get(ticket)
        over = event is None or event.query()
        self.engine.check()
        return over

    def wait(self, ticket: int) -> None:
        """See operators. On a GPU it holds the current stream, not the host."""
        event = self._events.pop(ticket, None)
        if event is not None:
            event.wait()
        self.engine.check()


class DeviceGather(DeviceCalls):
    """See operators.GatherOperator."""

    def all_gather_table(
        self,
        *,
        nodes: Sequence[int],
        columns: Sequence[int],
        offsets: Sequence[int],
        nbytes: Sequence[int],
        name: str,
    ) -> int:
        """See operators. Raises TableRefused where the switch cannot store the segments."""
        rows = list(zip(nodes, columns, offsets, nbytes, strict=True))
        if self.engine.multimem:
            for _, _, offset, length in rows:
                if offset % MULTIMEM_BYTES or length % MULTIMEM_BYTES:
                    raise TableRefused(
                        f"a segment of {length} bytes at byte {offset} is not in whole"
                        f" {MULTIMEM_BYTES} bytes, which multicast stores need"
                    )
        number = self.engine.gather_table(self._number, rows, name)
        self._tables = number + 1
        return number

    def all_gather(self, table: int, base: int) -> int:
        """See operators."""
        self.upload()
        self.engine.gather(self._number, table, base, self.streams.enter(self.name))
        return self._launched()


class DeviceReduce(DeviceCalls):
    """See operators.ReduceOperator."""

    def reduce_scatter_table(
        self,
        *,
        nodes: Sequence[int],
        columns: Sequence[int],
        offsets: Sequence[int],
        numels: Sequence[int],
        windows: Sequence[int],
        slot_dtype: torch.dtype,
        wire_dtype: torch.dtype,
        window_dtype: torch.dtype,
        name: str,
    ) -> int:
        """See operators."""
        number = self.engine.reduce_table(
            self._number,
            list(zip(nodes, columns, offsets, numels, windows, strict=True)),
            name,
            slot=slot_dtype,
            wire=wire_dtype,
            window=window_dtype,
        )
        self._tables = number + 1
        return number

    def reduce_scatter(
        self, table: int, base: int, window_base: int, *, first: bool, divisor: float
    ) -> int:
        """See operators."""
        self.upload()
        stream = self.streams.enter(self.name)
        self.engine.reduce(
            self._number, table, base, window_base, stream, first=first, divisor=divisor
        )
        return self._launched()


class DevicePublish(DeviceOperator):
    """See operators.PublishOperator."""

    def __init__(self, engine: DeviceEngine, name: str, streams: Streams) -> None:
        super().__init__(engine, name, streams)
        self._own: set[int] = set()  # parameters that this rank owns
        self._version = 0
        self._opening: _Opening | None = None
        self._round: Event | None = None
        # By parameters: the versions last asked for, and the point at which they have arrived.
        self._arrivals: dict[tuple[int, ...], tuple[tuple[int, ...], Event]] = {}

    def publish_parameters(
        self,
        *,
        nodes: Sequence[int],
        offsets: Sequence[int],
        nbytes: Sequence[int],
        names: Sequence[str],
    ) -> None:
        """See operators."""
        node = self.engine.rank // self.engine.columns
        self._own = {index for index, owner in enumerate(nodes) if owner == node}
        texts = array(c_char_p, [name.encode() for name in names])
        self.engine.check(
            self.engine.call.mmd_publish_parameters(
                self.engine.handle,
                self._number,
                len(names),
                array(c_int, nodes),
                array(c_uint64, offsets),
                array(c_uint64, nbytes),
                cast(texts, POINTER(c_char_p)),
            )
        )

    def publish_begin(self, order: Sequence[int], version: int) -> None:
        """See operators. The round's kernel goes to its stream when the last own parameter has been
        handed over, and starts, for the relays' sake, as if it had been put there now.

        A kernel that waited for tasks which its host has yet to launch would be waited for by
        whatever synchronises the GPU in between, and the tasks would never come.
        """
        if version <= self._version:
            raise CollectiveError(f"{self.name}: version {version} after version {self._version}")
        self._version = version
        self._opening = _Opening(tuple(order), version, self.streams.mark(), self._own & {*order})
        self._launch_round()

    def _launch_round(self) -> None:
        opening = self._opening
        if opening is None or opening.awaited:
            return
        stream = self.streams.enter(self.name, opening.start)
        order = array(c_int, opening.order)
        self.engine.check(
            self.engine.call.mmd_publish_begin(
                self.engine.handle, self._number, len(order), order, opening.version, stream
            )
        )
        self._opening = None
        self._round = self.streams.leave(self.name, self.engine)

    def publish_task(self, parameter: int) -> None:
        """See operators. In the order of the current stream, which has written the copy."""
        self.engine.check(
            self.engine.call.mmd_publish_task(
                self.engine.handle, self._number, parameter, self.streams.current()
            )
        )
        if self._opening is not None:
            self._opening.awaited.discard(parameter)
        self._launch_round()

    def publish_wait(self, parameters: Sequence[int], versions: Sequence[int]) -> None:
        """See operators. On a GPU it holds the current stream, not the host."""
        if parameters:
            self._arrival(parameters, versions).wait()
        self.engine.check()

    def publish_ready(self, parameters: Sequence[int], versions: Sequence[int]) -> bool:
        """See operators."""
        ready = not parameters or self._arrival(parameters, versions).query()
        self.engine.check()
        return ready

    def publish_other(
        self, parameters: Sequence[int], versions: Sequence[int]
    ) -> tuple[int, int] | None:
        """See operators: what the flags hold is seen by kernels alone, which wait for *at least*
        the version.
        """
        return None

    def _arrival(self, parameters: Sequence[int], versions: Sequence[int]) -> Event:
        """One watch per list and version, however often somebody asks."""
        key, wanted = tuple(parameters), tuple(versions)
        held = self._arrivals.get(key)
        if held is None or held[0] != wanted:
            held = wanted, self.streams.arrival(self.engine, parameters, versions)
            self._arrivals[key] = held
        return held[1]

    def publish_drain(self) -> None:
        """See operators. Holds the host: rounds follow one another on the GPU, and this is asked
        where the ranks agree on something by the host. A round that was given up before its last
        own parameter has nothing under way.
        """
        if self._round is not None:
            self._round.synchronize()
        self.engine.check()

    def publish_round_done(self) -> bool:
        """See operators."""
        over = self._opening is None and (self._round is None or self._round.query())
        self.engine.check()
        return over


@dataclass(frozen=True)
class _Opening:
    """A round whose kernel is not launched yet."""

    order: tuple[int, ...]
    version: int
    start: Event  # where the round began
    awaited: set[int]  # own parameters that have not been handed over


KINDS: dict[str, type[DeviceOperator]] = dict(
    zip(OPERATOR_KINDS, (DeviceGather, DeviceReduce, DevicePublish), strict=True)
)
