"""Communicators of the device library as Python objects.

Owns their handles. Invariants: a closed engine is never called; a call that fails raises
CollectiveError with the library's text, and so does the first look after a kernel has given up.
Tested on CPU ranks by ``tests/distributed/test_device_fabric.py``, over a stand-in for the library;
on a GPU by ``tools/gpu_checks.py`` alone so far.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int, c_uint64, create_string_buffer

import torch

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.device_library import (
    TEXT_BYTES,
    UNIQUE_ID_BYTES,
    DeviceCapability,
    DeviceLibrary,
)
from megamuon.collectives.host_library import DTYPES, array, native
from megamuon.collectives.operator_settings import OperatorConfig

BLOCKS = 16  # of a call, at most


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
        made = native(config)
        return self.call.mmd_operator_control_bytes(self.nodes, self.columns, byref(made))

    def operator(self, config: OperatorConfig, name: str) -> int:
        """Make an operator, after ``open``; its number."""
        made = native(config)
        return self.check(self.call.mmd_operator_create(self.handle, byref(made), name.encode()))

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

    def upload(self) -> None:
        """Bring the tables that were made since the last time to the GPU."""
        self.check(self.call.mmd_upload(self.handle))

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


def _columns(rows: Sequence[tuple[int, ...]], kinds: str) -> list[ctypes.Array]:
    """Rows of a table as C arrays, one per column: "i" of ints, "w" of 64-bit words."""
    return [
        array(c_int if kind == "i" else c_uint64, [row[i] for row in rows])
        for i, kind in enumerate(kinds)
    ]
