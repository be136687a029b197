"""The stand-in for the device library: ``csrc/tests/device_stand_in.cpp``, built and bound.

Owns its compilation, the types of the functions that it has beyond ``device_api.h``, and a fabric
for tests of the interface itself. Invariant:
a library is replaced as a whole, so several test processes may build the same one. Tested by
``tests/collectives/test_device_stand_in.py``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from ctypes import POINTER, byref, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from megamuon.collectives.device_library import SIGNATURES, DeviceCapability
from megamuon.collectives.host_library import native
from megamuon.collectives.operator_settings import OperatorConfig

CSRC = Path(__file__).resolve().parents[2] / "csrc"
BUILT = CSRC.parent / "build" / "tests"  # kept from one test file to the next
SOURCES = (CSRC / "tests" / "device_stand_in.cpp", CSRC / "pool" / "segment.cpp")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")
SECONDS = 30.0  # for one call
MULTIMEM = "MEGAMUON_STAND_IN_MULTIMEM"  # in the environment, 1: rows offer multimem

# Result and arguments of the functions that say what a stream would on a GPU.
EXTRAS: Mapping[str, tuple[type, tuple[type, ...]]] = {
    "mmd_stand_in_calls": (c_int64, (c_void_p, c_int)),
    "mmd_stand_in_done": (c_int, (c_void_p, c_int, c_int64)),
    "mmd_stand_in_wait": (c_int, (c_void_p, c_int, c_int64, c_double)),
    "mmd_stand_in_round_done": (c_int, (c_void_p, c_int)),
    "mmd_stand_in_round_wait": (c_int, (c_void_p, c_int, c_double)),
    "mmd_stand_in_arrived": (c_int, (c_void_p, c_int, c_int, POINTER(c_int), POINTER(c_uint64))),
}


def stand_in_library(folder: Path = BUILT) -> Path:
    """The library in ``folder``, compiled (some seconds) if it is missing or older than csrc.

    Raises CalledProcessError where the compiler fails or warns.
    """
    library = folder / "libmegamuon_device_stand_in.so"
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp")]
    newest = max(path.stat().st_mtime_ns for path in sources)
    if library.is_file() and library.stat().st_mtime_ns > newest:
        return library
    folder.mkdir(parents=True, exist_ok=True)
    fresh = library.with_name(f".{library.name}.{os.getpid()}")
    command = ["g++", *FLAGS, f"-I{CSRC}", *map(str, SOURCES), "-o", str(fresh), "-lrt"]
    subprocess.run(command, check=True)
    os.replace(fresh, library)
    return library


def load(library: Path) -> ctypes.CDLL:
    """The library with the types of all its functions."""
    call = ctypes.CDLL(str(library))
    for name, (result, arguments) in {**SIGNATURES, **EXTRAS}.items():
        function = getattr(call, name)
        function.restype, function.argtypes = result, arguments
    return call


class BareFabric:
    """One fabric of a rank, through the bare C interface; up to four operators."""

    def __init__(
        self,
        call: ctypes.CDLL,
        unique_id: bytes,
        rank: int,
        grid: tuple[int, int],
        *,
        multimem: bool = False,
        deadline: float = 20.0,
    ) -> None:
        self.call, self.grid, self.rank = call, grid, rank
        text = ctypes.create_string_buffer(4096)
        self.handle = call.mmd_create(
            unique_id, rank, *grid, 0, 4, 16, int(multimem), deadline, text, 4096
        )
        assert self.handle, text.value
        self.control = 0

    def config(self, kind: str, **more: int) -> OperatorConfig:
        rows, columns = self.grid
        values: dict[str, Any] = {"slots": 2, "chunk_bytes": 1024, "groups": 2, **more}
        return OperatorConfig(
            kind=kind,
            nodes=rows,
            columns=columns,
            ranks=tuple(range(rows * columns)),
            control_offset=self.control,
            **values,
        )

    def open(self, pool: int, of: BareFabric | None = None, *, control: int = 1 << 20) -> int:
        return self.call.mmd_open(self.handle, control, pool, of.handle if of else None)

    def pool(self, start: int, count: int, dtype: str = "uint8") -> np.ndarray:
        """A view of this rank's pool."""
        nbytes = count * np.dtype(dtype).itemsize
        address = self.call.mmd_pool(self.handle) + start
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype)

    def operator(self, kind: str, **more: int) -> int:
        config = self.config(kind, **more)
        made = native(config)
        op = self.call.mmd_operator_create(self.handle, byref(made), kind.encode())
        self.control += self.call.mmd_operator_control_bytes(*self.grid, byref(made))
        return op

    def gather_table(self, op: int, rows: list[tuple[int, int, int, int]]) -> int:
        return self.call.mmd_all_gather_table(
            self.handle, op, len(rows), *arrays(rows, "iiww"), b"group"
        )

    def reduce_table(
        self, op: int, rows: list[tuple[int, int, int, int, int]], dtypes: tuple[int, int, int]
    ) -> int:
        return self.call.mmd_reduce_scatter_table(
            self.handle, op, len(rows), *arrays(rows, "iiwww"), *dtypes, b"group"
        )

    def gather(self, op: int, table: int, base: int) -> None:
        assert self.call.mmd_all_gather(self.handle, op, table, base, 0) == 0, self.error()
        self.finish(op)

    def reduce(
        self, op: int, table: int, base: int, window: int, *, first: bool, divisor: float
    ) -> None:
        status = self.call.mmd_reduce_scatter(
            self.handle, op, table, base, window, int(first), divisor, 0
        )
        assert status == 0, self.error()
        self.finish(op)

    def finish(self, op: int) -> None:
        """Wait for the operator's last call."""
        last = self.call.mmd_stand_in_calls(self.handle, op)
        assert self.call.mmd_stand_in_done(self.handle, op, last) in (0, 1)
        assert self.call.mmd_stand_in_wait(self.handle, op, last, SECONDS) == 0, self.error()
        assert self.call.mmd_stand_in_done(self.handle, op, last) == 1
        assert self.call.mmd_stand_in_done(self.handle, op, last + 1) == -1

    def agree(self, value: int) -> int:
        values = (c_int * 1)(value)
        assert self.call.mmd_agree(self.handle, values, 1) == 0, self.error()
        return values[0]

    def capability(self) -> DeviceCapability:
        found = DeviceCapability()
        assert self.call.mmd_query(self.handle, byref(found)) == 0
        return found

    def error(self) -> str:
        text = ctypes.create_string_buffer(4096)
        self.call.mmd_error(self.handle, text, 4096)
        return text.value.decode()

    def destroy(self) -> None:
        self.call.mmd_destroy(self.handle)


def arrays(rows: list[Any], kinds: str) -> list[ctypes.Array]:
    """The rows of a table by column: "i" ints, "w" 64-bit words."""
    return [
        ((c_int if kind == "i" else c_uint64) * len(rows))(*(row[i] for row in rows))
        for i, kind in enumerate(kinds)
    ]
