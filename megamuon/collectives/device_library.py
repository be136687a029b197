"""The device library: the operators on GPUs over NCCL's device interface, called through ctypes.

Owns the binding of ``csrc/bindings/device_api.h`` and the choice among the ways that GPUs can move
data, the *rungs*. Invariants: a rung is the least that any rank offers, so ranks never differ in
it; a library compiled against another NCCL than the one that is loaded is not used; every reason
for a lower rung is a sentence. Nothing here has run on more than one GPU, and no transport is
built on it yet: training on GPUs takes the grouped one. Tested without a GPU by
``tests/collectives/test_device_library.py``; on one by ``tools/gpu_checks.py``.

| rung | moves data by |
|---|---|
| multimem | the operators, one store or load for the GPUs of a row |
| lsa | the operators, a store or load for each GPU |
| symmetric | torch's own operations on symmetric memory (``reduce_scatter_offset``, torch 2.13) |
| grouped | NCCL's collectives, see ``grouped.py`` |
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.host_library import CODE_VERSION, DTYPES, LibraryMissing, OperatorConfig

PATH = Path(__file__).resolve().parents[1] / "_native" / "libmegamuon_device.so"
REMEDY = (
    "build it with: MEGAMUON_BUILD=cuda pip install --no-build-isolation -e ., "
    "which needs nvcc and the NCCL package that torch brings"
)
TEXT_BYTES = 4096
UNIQUE_ID_BYTES = 128
RUNGS = ("grouped", "symmetric", "lsa", "multimem")  # from the least to the most

_ints = POINTER(c_int)
_words = POINTER(c_uint64)


class DeviceCapability(ctypes.Structure):
    """mmd_capability: what a communicator offers, the least over its ranks."""

    _fields_ = (
        ("lsa_ranks", c_int),
        ("direct", c_int),
        ("row", c_int),
        ("multimem", c_int),
        ("gin", c_int),
    )


_create = (c_void_p, c_int, c_int, c_int, c_int, c_int, c_int, c_int, c_double, c_char_p, c_int)
_table = (c_void_p, c_int, c_int, _ints, _ints, _words, _words)

# Result and arguments of every function of device_api.h.
SIGNATURES: Mapping[str, tuple[type | None, tuple[type, ...]]] = {
    "mmd_code_version": (c_int, ()),
    "mmd_compiled_nccl": (c_int, ()),
    "mmd_loaded_nccl": (c_int, (c_char_p, c_int)),
    "mmd_unique_id": (c_int, (c_void_p, c_char_p, c_int)),
    "mmd_create": (c_void_p, _create),
    "mmd_query": (c_int, (c_void_p, POINTER(DeviceCapability))),
    "mmd_open": (c_int, (c_void_p, c_uint64, c_uint64)),
    "mmd_pool": (c_uint64, (c_void_p,)),
    "mmd_agree": (c_int, (c_void_p, _ints, c_int)),
    "mmd_destroy": (None, (c_void_p,)),
    "mmd_operator_control_bytes": (c_uint64, (c_int, c_int, c_void_p)),
    "mmd_operator_create": (c_int, (c_void_p, c_void_p, c_char_p)),
    "mmd_all_gather_table": (c_int, (*_table, c_char_p)),
    "mmd_reduce_scatter_table": (c_int, (*_table, _words, c_int, c_int, c_int, c_char_p)),
    "mmd_all_gather": (c_int, (c_void_p, c_int, c_int, c_uint64, c_uint64)),
    "mmd_reduce_scatter": (
        c_int,
        (c_void_p, c_int, c_int, c_uint64, c_uint64, c_int, c_double, c_uint64),
    ),
    "mmd_publish_parameters": (
        c_int,
        (c_void_p, c_int, c_int, _ints, _words, _words, POINTER(c_char_p)),
    ),
    "mmd_publish_begin": (c_int, (c_void_p, c_int, c_int, _ints, c_uint64, c_uint64)),
    "mmd_publish_task": (c_int, (c_void_p, c_int, c_int, c_uint64)),
    "mmd_publish_wait": (c_int, (c_void_p, c_int, c_int, _ints, _words, c_uint64)),
    "mmd_abort": (None, (c_void_p,)),
    "mmd_error": (c_int, (c_void_p, c_char_p, c_int)),
}


def nccl_version(code: int) -> str:
    """``22907`` is 2.29.7."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


class DeviceLibrary:
    """One loaded library: its functions with their types (``.call.mmd_...``)."""

    def __init__(self, path: Path = PATH) -> None:
        """Load ``path``. Raises LibraryMissing if it cannot be used, with what to do."""
        if not path.is_file():
            raise LibraryMissing(f"the device library {path} is not there: {REMEDY}")
        try:
            self.call = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryMissing(f"the device library does not load ({error}): {REMEDY}") from None
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self.call, name, None)
            if function is None:
                raise LibraryMissing(f"the device library {path} has no {name}: {REMEDY}")
            function.restype, function.argtypes = result, arguments
        if (version := self.call.mmd_code_version()) != CODE_VERSION:
            raise LibraryMissing(
                f"the device library {path} has code version {version}, and this package needs "
                f"{CODE_VERSION}: {REMEDY}"
            )
        text = ctypes.create_string_buffer(TEXT_BYTES)
        loaded, compiled = (
            self.call.mmd_loaded_nccl(text, TEXT_BYTES),
            self.call.mmd_compiled_nccl(),
        )
        if loaded != compiled:
            found = nccl_version(loaded) if loaded > 0 else text.value.decode(errors="replace")
            raise LibraryMissing(
                f"the device library was compiled against NCCL {nccl_version(compiled)}, and NCCL "
                f"{found} is loaded: {REMEDY}"
            )


def available(path: Path = PATH) -> str | None:
    """None if the device library can be used here, else why not, as a sentence."""
    if not torch.cuda.is_available():
        return "there is no GPU that this torch can use"
    if problems := environment_problems(os.environ):
        return problems[0]
    try:
        DeviceLibrary(path)
    except LibraryMissing as error:
        return str(error)
    return None


def environment_problems(environment: Mapping[str, str]) -> list[str]:
    """What in the environment the operators cannot run with, each with what to change.

    Their kernels wait on the GPU while others have to run: kernels that share one hardware queue,
    or code that is loaded at its first launch, would wait for them.
    """
    problems = []
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        problems.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue, where kernels "
            "that wait for each other stand still: unset it, or take 8 or more"
        )
    if (loading := environment.get("CUDA_MODULE_LOADING", "LAZY")).upper() != "EAGER":
        problems.append(
            f"CUDA_MODULE_LOADING={loading} loads kernels at their first launch, which waits for "
            "kernels that wait: set CUDA_MODULE_LOADING=EAGER"
        )
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            problems.append(
                f"{name} asks for expandable_segments, which do not go together with a pool that "
                "NCCL has registered: take them out"
            )
    return problems


# --- rungs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A rung of the ladder and why it is not a higher one ("" for the highest)."""

    name: str
    reason: str


def agree_capability(values: Sequence[str]) -> str:
    """The rung that all ranks have: the least of ``values``, one per rank.

    Ranks that decided by themselves could differ, and then wait for each other forever.
    """
    if not values:
        raise ValueError("agree_capability needs the rung of at least one rank")
    for rank, value in enumerate(values):
        if value not in RUNGS:
            raise ValueError(f"rank {rank}: rung {value!r}: choose one of {', '.join(RUNGS)}")
    return min(values, key=RUNGS.index)


def select_rung(capability: DeviceCapability | None = None, *, path: Path = PATH) -> Rung:
    """The highest rung of this rank, to be agreed upon with ``agree_capability``.

    ``capability``: what its communicator offers, once there is one; without it the answer says
    what the library could do at least. Looks at the machine alone and communicates nothing.
    """
    if not torch.cuda.is_available():
        return Rung(name="grouped", reason="there is no GPU that this torch can use")
    if reason := available(path):
        from torch.distributed import _symmetric_memory

        if hasattr(_symmetric_memory, "reduce_scatter_offset"):
            return Rung(name="symmetric", reason=reason)
        return Rung(
            name="grouped",
            reason=f"{reason}; torch {torch.__version__} has no symmetric "
            "reduce-scatter at offsets (2.13 has)",
        )
    if capability is None or not capability.multimem:
        return Rung(name="lsa", reason="the GPUs of a row have no common multicast address")
    return Rung(name="multimem", reason="")


# --- a communicator ------------------------------------------------------------------------------


class DeviceEngine:
    """One rank of the device operators: a communicator over R x K ranks, its windows, its calls.

    Making and opening it are collective. Calls are put on the current stream of torch; every rank
    makes an operator's calls in one order. Raises CollectiveError with the library's text. Only
    ``tools/gpu_checks.py`` uses it so far.
    """

    def __init__(
        self,
        unique_id: bytes,
        *,
        rank: int,
        nodes: int,
        columns: int,
        device: int,
        operators: int = 3,
        blocks: int = 16,
        multimem: bool = True,
        deadline: float = 60.0,
    ) -> None:
        self._call = DeviceLibrary().call
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._handle = self._call.mmd_create(
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
        if not self._handle:
            raise CollectiveError(text.value.decode(errors="replace"))
        self.nodes, self.columns = nodes, columns
        self.close = weakref.finalize(self, self._call.mmd_destroy, self._handle)

    @staticmethod
    def unique_id() -> bytes:
        """What one rank makes and hands to the others."""
        made, text = (
            ctypes.create_string_buffer(UNIQUE_ID_BYTES),
            ctypes.create_string_buffer(TEXT_BYTES),
        )
        if DeviceLibrary().call.mmd_unique_id(made, text, TEXT_BYTES) < 0:
            raise CollectiveError(text.value.decode(errors="replace"))
        return made.raw

    def capability(self) -> DeviceCapability:
        """What the communicator offers; equal on all ranks."""
        found = DeviceCapability()
        self._call.mmd_query(self._handle, byref(found))
        return found

    def open(self, control_bytes: int, pool_bytes: int) -> int:
        """Allocate and register the windows; the address of this rank's pool."""
        self._check(self._call.mmd_open(self._handle, control_bytes, pool_bytes))
        return self._call.mmd_pool(self._handle)

    def control_bytes(self, config: OperatorConfig) -> int:
        """What an operator needs at its ``control_offset`` of the control window."""
        native = config.native()
        return self._call.mmd_operator_control_bytes(self.nodes, self.columns, byref(native))

    def operator(self, config: OperatorConfig, name: str) -> int:
        """Make an operator; its number."""
        native = config.native()
        return self._check(
            self._call.mmd_operator_create(self._handle, byref(native), name.encode())
        )

    def gather_table(
        self, op: int, segments: Sequence[tuple[int, int, int, int]], name: str
    ) -> int:
        """A table of (node, column, offset, bytes); its number, or CollectiveError."""
        return self._check(
            self._call.mmd_all_gather_table(
                self._handle, op, len(segments), *_columns(segments, "iiww"), name.encode()
            )
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
        dtypes = [DTYPES[str(dtype).removeprefix("torch.")] for dtype in (slot, wire, window)]
        return self._check(
            self._call.mmd_reduce_scatter_table(
                self._handle,
                op,
                len(segments),
                *_columns(segments, "iiwww"),
                *dtypes,
                name.encode(),
            )
        )

    def gather(self, op: int, table: int, base: int) -> None:
        """Put a gather at pool offset ``base`` on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        self._check(self._call.mmd_all_gather(self._handle, op, table, base, stream))

    def reduce(
        self, op: int, table: int, base: int, window: int, *, first: bool, divisor: float
    ) -> None:
        """Put a reduction of the gradients at ``base`` into ``window`` on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        self._check(
            self._call.mmd_reduce_scatter(
                self._handle, op, table, base, window, int(first), divisor, stream
            )
        )

    def check(self) -> None:
        """Raise CollectiveError if a kernel of this GPU has given up."""
        if text := self._error():
            raise CollectiveError(text)

    def _error(self) -> str:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._call.mmd_error(self._handle, text, TEXT_BYTES)
        return text.value.decode(errors="replace")

    def _check(self, result: int) -> int:
        if result < 0:
            raise CollectiveError(self._error())
        return result


def _columns(rows: Sequence[tuple[int, ...]], kinds: str) -> list[ctypes.Array]:
    """Rows of a table as C arrays, one per column: "i" of ints, "w" of 64-bit words."""
    return [
        ((c_int if kind == "i" else c_uint64) * len(rows))(*(row[i] for row in rows))
        for i, kind in enumerate(kinds)
    ]
