"""The device library: the operators on GPUs over NCCL's device interface, called through ctypes.

Owns the binding of ``csrc/bindings/device_api.h`` and the choice among the ways that GPUs can move
data, the *rungs*. Invariants: a rung is the least that any rank offers, so ranks never differ in
it; a library compiled against another NCCL than the one that is loaded is not used; every reason
for a lower rung is a sentence. Nothing here has run on more than one GPU. Tested without a GPU by
``tests/collectives/test_device_library.py``; on one by ``tools/gpu_checks.py``.

| rung | moves data by |
|---|---|
| multimem | the operators, one store or load for the GPUs of a replica |
| lsa | the operators, a store or load for each GPU |
| symmetric | torch's own operations on symmetric memory (``reduce_scatter_offset``, torch 2.13) |
| grouped | NCCL's collectives, see ``grouped.py`` |
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from megamuon.collectives.host_library import CODE_VERSION, LibraryMissing

PATH = Path(__file__).resolve().parents[1] / "_native" / "libmegamuon_device.so"
REMEDY = (
    "build it with: MEGAMUON_BUILD=cuda pip install --no-build-isolation -e ., "
    "which needs nvcc and the NCCL package that torch brings"
)
TEXT_BYTES = 4096
UNIQUE_ID_BYTES = 128
QUEUES = (
    16  # hardware queues of a GPU: the operators' streams, torch's and NCCL's, and some to spare
)
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
    "mmd_open": (c_int, (c_void_p, c_uint64, c_uint64, c_void_p)),
    "mmd_pool": (c_uint64, (c_void_p,)),
    "mmd_agree": (c_int, (c_void_p, _ints, c_int)),
    "mmd_destroy": (None, (c_void_p,)),
    "mmd_operator_control_bytes": (c_uint64, (c_int, c_int, c_void_p)),
    "mmd_operator_create": (c_int, (c_void_p, c_void_p, c_char_p)),
    "mmd_all_gather_table": (c_int, (*_table, c_char_p)),
    "mmd_reduce_scatter_table": (c_int, (*_table, _words, c_int, c_int, c_int, c_char_p)),
    "mmd_upload": (c_int, (c_void_p,)),
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
    queues = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # what CUDA takes by itself
    if not queues.isdecimal() or int(queues) < QUEUES:
        problems.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={queues} puts streams into common hardware queues, where "
            "kernels that wait for each other stand still: set CUDA_DEVICE_MAX_CONNECTIONS=32"
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
        return Rung(name="lsa", reason="the GPUs of a replica have no common multicast address")
    return Rung(name="multimem", reason="")
