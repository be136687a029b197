"""Communicators and operators of the device library as Python objects.

Owns their handles and the events of calls under way. Invariants: a closed engine is never called; a
call that fails raises CollectiveError with the library's text, and so does the first look after a
kernel has given up; an operator's calls are all on the stream of its name. Tested on CPU ranks by
``tests/distributed/test_device_fabric.py``, over a stand-in for the library; on a GPU by
``tools/gpu_checks.py`` alone so far.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint64, cast, create_string_buffer

import torch

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.device_library import (
    TEXT_BYTES,
    UNIQUE_ID_BYTES,
    DeviceCapability,
    DeviceLibrary,
)
from megamuon.collectives.device_streams import Event, Streams
from megamuon.collectives.host_library import DTYPES, OperatorConfig, array
from megamuon.collectives.operators import TableRefused

BLOCKS = 16  # of a call, at most
MULTIMEM_BYTES = 16  # what one multicast store moves


class DeviceEngine:
    """One rank of a communicator over R x K GPUs with its windows, and one operator.

    Making and opening it are collective. Raises CollectiveError with the library's text.
    """

    def __init__(
        self,
        library: DeviceLibrary,
        unique_id: bytes,
        *,
        rank: int,
        nodes: int,
        columns: int,
        device: int,
        operators: int = 1,
        blocks: int = BLOCKS,
        multimem: bool = True,
        deadline: float = 60.0,
    ) -> None:
        """``device``: the GPU's number; ``multimem``: use the switch where there is one;
        ``deadline``: seconds that an operator may stand still.
        """
        self.library = library
        self.call = library.call
        self.rank, self.nodes, self.columns = rank, nodes, columns
        text = create_string_buffer(TEXT_BYTES)
        handle = self.call.mmd_create(
            unique_id,
            rank,
            nodes,
            columns,
            device,
            operators,
            blocks,
            int(multimem),
            deadline,
            text,
            TEXT_BYTES,
        )
        if not handle:
            raise CollectiveError(text.value.decode(errors="replace"))
        self._handle: int | None = handle
        self._destroy = weakref.finalize(self, self.call.mmd_destroy, handle)
        self.multimem = bool(multimem and self.capability().multimem)

    @staticmethod
    def unique_id(library: DeviceLibrary) -> bytes:
        """What one rank makes and hands to the others."""
        made, text = create_string_buffer(UNIQUE_ID_BYTES), create_string_buffer(TEXT_BYTES)
        if library.call.mmd_unique_id(made, text, TEXT_BYTES) < 0:
            raise CollectiveError(text.value.decode(errors="replace"))
        return made.raw

    @property
    def handle(self) -> int:
        """The C handle. Raises CollectiveError for an engine that is closed."""
        if self._handle is None:
            raise CollectiveError("the device operators are closed")
        return self._handle

    def close(self) -> None:
        """Give everything back; idempotent. Before the engine whose pool this one shares."""
        self._handle = None
        self._destroy()

    def abort(self) -> None:
        """End every wait of this GPU's kernels."""
        self.call.mmd_abort(self.handle)

    def capability(self) -> DeviceCapability:
        """What the communicator offers; equal on all ranks."""
        found = DeviceCapability()
        self.call.mmd_query(self.handle, byref(found))
        return found

    def open(self, control_bytes: int, pool_bytes: int, pool_of: DeviceEngine | None = None) -> int:
        """Allocate and register the windows, or take the pool of another engine; the address of
        this rank's pool.
        """
        shared = None if pool_of is None else pool_of.handle
        self.check(self.call.mmd_open(self.handle, control_bytes, pool_bytes, shared))
        return self.call.mmd_pool(self.handle)

    def control_bytes(self, config: OperatorConfig) -> int:
        """What an operator needs at its ``control_offset`` of the control window."""
        native = config.native()
        return self.call.mmd_operator_control_bytes(self.nodes, self.columns, byref(native))

    def operator(self, config: OperatorConfig, name: str) -> int:
        """Make an operator, after ``open``; its number."""
        native = config.native()
        return self.check(self.call.mmd_operator_create(self.handle, byref(native), name.encode()))

    def gather_table(
        self, op: int, segments: Sequence[tuple[int, int, int, int]], name: str
    ) -> int:
        """A table of (node, column, offset, bytes); its number."""
        columns = _columns(segments, "iiww")
        return self.check(
            self.call.mmd_all_gather_table(self.handle, op, len(segments), *columns, name.encode())
        )

    def reduce_table(
        self,
        op: int,
        segments: Sequence[tuple[int, int, int, int, int]],
        name: str,
        *,
        slot: torch.dtype,
        wire: torch.dtype,
        window: torch.dtype,
    ) -> int:
        """A table of (node, column, offset, elements, window); its number."""
        dtypes = [DTYPES[dtype] for dtype in (slot, wire, window)]
        columns = _columns(segments, "iiwww")
        return self.check(
            self.call.mmd_reduce_scatter_table(
                self.handle, op, len(segments), *columns, *dtypes, name.encode()
            )
        )

    def gather(self, op: int, table: int, base: int, stream: int) -> None:
        """Put a gather at byte ``base`` of the pool on ``stream``."""
        self.check(self.call.mmd_all_gather(self.handle, op, table, base, stream))

    def reduce(
        self,
        op: int,
        table: int,
        base: int,
        window: int,
        stream: int,
        *,
        first: bool,
        divisor: float,
    ) -> None:
        """Put a reduction of the gradients at ``base`` into ``window`` on ``stream``."""
        self.check(
            self.call.mmd_reduce_scatter(
                self.handle, op, table, base, window, int(first), divisor, stream
            )
        )

    def publish_wait(
        self, parameters: Sequence[int], versions: Sequence[int], stream: int, *, op: int = 0
    ) -> None:
        """Hold ``stream`` until each of ``parameters`` has arrived in its version."""
        which, needed = array(c_int, parameters), array(c_uint64, versions)
        self.check(
            self.call.mmd_publish_wait(self.handle, op, len(parameters), which, needed, stream)
        )

    def error(self) -> str:
        """Text of the first failure, or of the last refused table; "" while there is none."""
        text = create_string_buffer(TEXT_BYTES)
        self.call.mmd_error(self.handle, text, TEXT_BYTES)
        return text.value.decode(errors="replace")

    def check(self, result: int | None = None) -> int:
        """``result`` of a call, unless it says that the call failed; without one, raise if a kernel
        of this GPU has given up.
        """
        if result is None:
            if text := self.error():
                raise CollectiveError(text)
            return 0
        if result < 0:
            raise CollectiveError(self.error() or "a device operator failed and left no text")
        return result


class DeviceOperator:
    """The operator of an engine, called on the stream of its name; see operators.Operator.

    Tables can be made and calls can start once ``attach`` has given it an operator of the library.
    """

    def __init__(self, engine: DeviceEngine, name: str, streams: Streams) -> None:
        self.engine, self.name, self.streams = engine, name, streams
        self._number = -1
        self._calls = 0
        self._events: dict[int, Event] = {}  # of calls that nobody has waited for
        self._round: Event | None = None
        # By parameters: the versions last asked for, and the point at which they have arrived.
        self._arrivals: dict[tuple[int, ...], tuple[tuple[int, ...], Event]] = {}

    def attach(self, config: OperatorConfig) -> None:
        """Make the operator in the engine's windows, which are open."""
        self._number = self.engine.operator(config, self.name)

    def all_gather_table(
        self,
        *,
        nodes: Sequence[int],
        columns: Sequence[int],
        offsets: Sequence[int],
        nbytes: Sequence[int],
        name: str,
    ) -> int:
        """See Operator. Raises TableRefused where the switch cannot store the segments."""
        rows = list(zip(nodes, columns, offsets, nbytes, strict=True))
        if self.engine.multimem:
            for _, _, offset, length in rows:
                if offset % MULTIMEM_BYTES or length % MULTIMEM_BYTES:
                    raise TableRefused(
                        f"a segment of {length} bytes at byte {offset} is not in whole"
                        f" {MULTIMEM_BYTES} bytes, which multicast stores need"
                    )
        return self.engine.gather_table(self._number, rows, name)

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
        """See Operator."""
        return self.engine.reduce_table(
            self._number,
            list(zip(nodes, columns, offsets, numels, windows, strict=True)),
            name,
            slot=slot_dtype,
            wire=wire_dtype,
            window=window_dtype,
        )

    def all_gather(self, table: int, base: int) -> int:
        """See Operator."""
        self.engine.gather(self._number, table, base, self.streams.enter(self.name))
        return self._launched()

    def reduce_scatter(
        self, table: int, base: int, window_base: int, *, first: bool, divisor: float
    ) -> int:
        """See Operator."""
        stream = self.streams.enter(self.name)
        self.engine.reduce(
            self._number, table, base, window_base, stream, first=first, divisor=divisor
        )
        return self._launched()

    def _launched(self) -> int:
        self._calls += 1
        self._events[self._calls] = self.streams.leave(self.name, self.engine)
        return self._calls

    def done(self, ticket: int) -> bool:
        """See Operator."""
        event = self._events.get(ticket)
        over = event is None or event.query()
        self.engine.check()
        return over

    def wait(self, ticket: int) -> None:
        """See Operator. On a GPU it holds the current stream, not the host."""
        event = self._events.pop(ticket, None)
        if event is not None:
            event.wait()
        self.engine.check()

    # --- publish ---------------------------------------------------------------------------------

    def publish_parameters(
        self,
        *,
        nodes: Sequence[int],
        offsets: Sequence[int],
        nbytes: Sequence[int],
        names: Sequence[str],
    ) -> None:
        """See Operator."""
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
        """See Operator. The round's kernel stays on its stream until the round is over."""
        stream = self.streams.enter(self.name)
        self.engine.check(
            self.engine.call.mmd_publish_begin(
                self.engine.handle, self._number, len(order), array(c_int, order), version, stream
            )
        )
        self._round = self.streams.leave(self.name, self.engine)

    def publish_task(self, parameter: int) -> None:
        """See Operator. In the order of the current stream, which has written the copy."""
        self.engine.check(
            self.engine.call.mmd_publish_task(
                self.engine.handle, self._number, parameter, self.streams.current()
            )
        )

    def publish_wait(self, parameters: Sequence[int], versions: Sequence[int]) -> None:
        """See Operator. On a GPU it holds the current stream, not the host."""
        if parameters:
            self._arrival(parameters, versions).wait()
        self.engine.check()

    def publish_ready(self, parameters: Sequence[int], versions: Sequence[int]) -> bool:
        """See Operator."""
        ready = not parameters or self._arrival(parameters, versions).query()
        self.engine.check()
        return ready

    def publish_other(
        self, parameters: Sequence[int], versions: Sequence[int]
    ) -> tuple[int, int] | None:
        """See Operator: what the flags hold is seen by kernels alone, which wait for *at least* the
        version.
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
        """See Operator. Holds the host: rounds follow one another on the GPU, and this is asked
        where the ranks agree on something by the host.
        """
        if self._round is not None:
            self._round.synchronize()
        self.engine.check()

    def publish_round_done(self) -> bool:
        """See Operator."""
        over = self._round is None or self._round.query()
        self.engine.check()
        return over


def _columns(rows: Sequence[tuple[int, ...]], kinds: str) -> list[ctypes.Array]:
    """Rows of a table as C arrays, one per column: "i" of ints, "w" of 64-bit words."""
    return [
        array(c_int if kind == "i" else c_uint64, [row[i] for row in rows])
        for i, kind in enumerate(kinds)
    ]
