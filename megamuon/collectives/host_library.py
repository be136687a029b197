"""The host library's C interface, bound by ctypes.

Owns the binding of ``csrc/bindings/host_api.h``, name by name; ``host_engine.py`` has the classes
over its engines and operators. Invariants: a library of another code version is never used; what
fails is a CollectiveError with the library's text. ctypes releases Python's lock during a call, so
a wait here keeps no other thread from running. Tested by
``tests/collectives/test_host_library.py``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.operator_settings import OPERATOR_KINDS, OperatorConfig

PATH = Path(__file__).resolve().parents[1] / "_native" / "libmegamuon_host.so"
CODE_VERSION = 3  # MM_CODE_VERSION of host_api.h
REMEDY = (
    "build it with: pip install --no-build-isolation -e . (a clone; or make setup), "
    "which needs a C++ compiler (on Debian or Ubuntu: apt-get install -y g++)"
)
TEXT_BYTES = 4096

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

_ints = POINTER(c_int)
_words = POINTER(c_uint64)
_addresses = POINTER(c_void_p)


def array(of: type, values: Sequence[object]) -> ctypes.Array:
    """A C array of ``values``."""
    return (of * len(values))(*values)


class LibraryMissing(CollectiveError):  # noqa: N818  (what is wrong, like FileNotFound)
    """There is no host library that this code can use; the text says what to do."""


class _Config(ctypes.Structure):
    """mm_operator_config."""

    _fields_ = (
        ("kind", c_int),
        ("nodes", c_int),
        ("columns", c_int),
        ("ranks", _ints),
        ("control_offset", c_uint64),
        ("slots", c_int),
        ("chunk_bytes", c_uint64),
        ("groups", c_int),
        ("star_bytes", c_uint64),
        ("parameters", c_int),
        ("tiles", c_uint64),
        ("tile_bytes", c_uint64),
    )


_config = POINTER(_Config)

# Result and arguments of every function of host_api.h.
SIGNATURES: Mapping[str, tuple[type | None, tuple[type, ...]]] = {
    "mm_code_version": (c_int, ()),
    "mm_segment_create": (c_void_p, (c_char_p, c_uint64, c_char_p, c_int)),
    "mm_segment_map": (c_void_p, (c_char_p, c_uint64, c_char_p, c_int)),
    "mm_segment_unlink": (c_int, (c_char_p,)),
    "mm_segment_unmap": (c_int, (c_void_p, c_uint64)),
    "mm_engine_control_bytes": (c_uint64, ()),
    "mm_engine_create": (c_void_p, (c_int, c_int, _addresses, POINTER(c_int64), c_double)),
    "mm_engine_destroy": (None, (c_void_p,)),
    "mm_engine_abort": (None, (c_void_p, c_char_p)),
    "mm_engine_error": (c_int, (c_void_p, c_char_p, c_int)),
    "mm_engine_set_link": (None, (c_void_p, c_uint64, c_double)),
    "mm_operator_control_bytes": (c_uint64, (_config,)),
    "mm_operator_create": (c_int, (c_void_p, _config, c_char_p)),
    "mm_operator_set_pool": (c_int, (c_void_p, c_int, _addresses)),
    "mm_all_gather_table": (
        c_int,
        (c_void_p, c_int, c_int, _ints, _ints, _words, _words, c_char_p),
    ),
    "mm_reduce_scatter_table": (
        c_int,
        (c_void_p, c_int, c_int, _ints, _ints, _words, _words, _words, c_int, c_int, c_int)
        + (c_char_p,),
    ),
    "mm_all_gather": (c_int64, (c_void_p, c_int, c_int, c_uint64)),
    "mm_reduce_scatter": (
        c_int64,
        (c_void_p, c_int, c_int, c_uint64, c_uint64, c_int, c_double),
    ),
    "mm_done": (c_int, (c_void_p, c_int, c_int64)),
    "mm_wait": (c_int, (c_void_p, c_int, c_int64, c_double)),
    "mm_publish_parameters": (
        c_int,
        (c_void_p, c_int, c_int, _ints, _words, _words, POINTER(c_char_p)),
    ),
    "mm_publish_begin": (c_int, (c_void_p, c_int, c_int, _ints, c_uint64)),
    "mm_publish_task": (c_int, (c_void_p, c_int, c_int)),
    "mm_publish_arrived": (c_uint64, (c_void_p, c_int, c_int)),
    "mm_publish_compare": (c_int, (c_void_p, c_int, c_int, _ints, _words)),
    "mm_publish_wait": (c_int, (c_void_p, c_int, c_int, _ints, _words, c_double)),
    "mm_publish_drain": (c_int, (c_void_p, c_int, c_double)),
    "mm_publish_round_done": (c_int, (c_void_p, c_int)),
    "mm_operator_cursors": (c_int, (c_void_p, c_int, _words, c_int)),
}


class HostLibrary:
    """One loaded library: its functions with their types (``.call.mm_...``), and its segments."""

    def __init__(self, path: Path = PATH) -> None:
        """Load ``path``. Raises LibraryMissing if it is not there or of another code version."""
        self.path = path
        if not path.is_file():
            raise LibraryMissing(f"the host library {path} is not there: {REMEDY}")
        try:
            self.call = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryMissing(f"the host library does not load ({error}): {REMEDY}") from None
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self.call, name, None)
            if function is None:
                raise LibraryMissing(f"the host library {path} has no {name}: {REMEDY}")
            function.restype, function.argtypes = result, arguments
            if name == "mm_code_version" and function() != CODE_VERSION:
                raise LibraryMissing(
                    f"the host library {path} has code version {function()}, and this package "
                    f"needs {CODE_VERSION}: {REMEDY}"
                )

    def create_segment(self, name: str, nbytes: int) -> int:
        """Make and map a shared segment; its address."""
        return self._segment(self.call.mm_segment_create, name, nbytes)

    def map_segment(self, name: str, nbytes: int) -> int:
        """Map a segment that another process made; its address."""
        return self._segment(self.call.mm_segment_map, name, nbytes)

    def unlink_segment(self, name: str) -> None:
        """Take the name away; mappings stay. A name that is not there is no error."""
        self.call.mm_segment_unlink(name.encode())

    def unmap_segment(self, address: int, nbytes: int) -> None:
        """Give the addresses back; nothing may use them any more."""
        self.call.mm_segment_unmap(address, nbytes)

    def engine_control_bytes(self) -> int:
        """What an engine needs at the start of every control segment."""
        return self.call.mm_engine_control_bytes()

    def operator_control_bytes(self, config: OperatorConfig) -> int:
        """What an operator needs at its ``control_offset`` of every control segment."""
        return self.call.mm_operator_control_bytes(native(config))

    def _segment(self, function: ctypes._CFuncPtr, name: str, nbytes: int) -> int:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        address = function(name.encode(), nbytes, text, TEXT_BYTES)
        if not address:
            raise CollectiveError(text.value.decode(errors="replace"))
        return address


_loaded: HostLibrary | None = None
_loading = threading.Lock()


def library() -> HostLibrary:
    """The host library of this package, loaded once. Raises LibraryMissing."""
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = HostLibrary()
        return _loaded


def available() -> str | None:
    """None if the host library can be used, else why not, as a sentence."""
    try:
        library()
    except LibraryMissing as error:
        return str(error)
    return None


def native(config: OperatorConfig) -> ctypes.Structure:
    """mm_operator_config of host_api.h, which keeps its list of ranks alive."""
    fields = {name: getattr(config, name) for name, _ in _Config._fields_}
    fields["kind"] = OPERATOR_KINDS.index(config.kind)
    fields["ranks"] = ctypes.cast(array(c_int, config.ranks), _ints)
    return _Config(**fields)
