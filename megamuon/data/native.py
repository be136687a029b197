"""The index helpers of the host library, bound by ctypes.

Owns the binding of ``csrc/data/index_api.h``: blends, sample indices, shuffles and the check of
index files, each to the bits of its NumPy twin (``blend.py``, ``gpt_indices.py``,
``indexed_format.py``). Invariant: a library that is absent or of another version is never used;
``library`` is None then, and the twins work, which is slower and changes no result. Tested by
``tests/data_room/test_native.py``.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PATH = Path(__file__).resolve().parents[1] / "_native" / "libmegamuon_host.so"
VERSION = 1  # mm_index_version of csrc/data/index.cpp
SLOW_DRAWS = 1_000_000  # blends above this take seconds in Python, so their users are told
REMEDY = "build it with: pip install --no-build-isolation -e . (a clone; or make setup)"

_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "mm_index_version": (c_int, ()),
    "mm_blend_indices": (c_int, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "mm_sample_index": (
        c_int,
        (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64, c_int, c_void_p, c_int),
    ),
    "mm_shuffle": (c_int, (c_void_p, c_int64, c_int, c_void_p, c_int)),
    "mm_check_pointers": (c_int64, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
}


@functools.cache
def library() -> Any | None:
    """The host library with its functions declared; None where there is none of this version."""
    try:
        loaded = ctypes.CDLL(str(PATH))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)  # AttributeError: built before there was this one
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return loaded if loaded.mm_index_version() == VERSION else None


def blend_indices(
    weights: Sequence[float], size: int, limits: Sequence[int] | None
) -> tuple[NDArray[np.int16], NDArray[np.int64]] | None:
    """Dataset (size,) int16 and sample (size,) int64 of each draw; None without the library.

    The rule is that of ``blend.py``. Raises ValueError for limits that end before ``size``.
    """
    lib = library()
    if lib is None:
        if size > SLOW_DRAWS:
            warnings.warn(
                f"{PATH.name} is absent or old, so {size} draws of a blend are made in Python, "
                f"which takes minutes for each 100 million; {REMEDY}",
                stacklevel=2,
            )
        return None
    shares = np.ascontiguousarray(weights, dtype=np.float64)
    bounds = None if limits is None else np.ascontiguousarray(limits, dtype=np.int64)
    datasets, samples = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    code = lib.mm_blend_indices(
        shares.ctypes.data,
        None if bounds is None else bounds.ctypes.data,
        shares.size,
        size,
        datasets.ctypes.data,
        samples.ctypes.data,
    )
    if code < 0:
        raise ValueError(f"a blend of {size} samples from {shares.size} parts of {limits} samples")
    return datasets, samples


def sample_index(
    lengths: NDArray[np.int32],
    documents: NDArray[np.integer],
    rows: NDArray[np.integer],
    *,
    length: int,
    extra: int,
    clamp: bool,
) -> bool:
    """Fill ``rows`` (samples + 1, 2); False without the library.

    ``lengths`` are contiguous int32, ``documents`` (count,) and ``rows`` int32 or int64. Raises
    ValueError if the documents hold too few items.
    """
    lib = library()
    if lib is None:
        return False
    count, samples = documents.size, rows.shape[0] - 1
    wide = [int(array.dtype.itemsize == 8) for array in (documents, rows)]
    code = lib.mm_sample_index(
        lengths.ctypes.data,
        documents.ctypes.data,
        wide[0],
        count,
        length,
        extra,
        samples,
        int(clamp),
        rows.ctypes.data,
        wide[1],
    )
    if code < 0:
        raise ValueError(f"{count} documents hold fewer than {samples} samples of {length} items")
    return True


def shuffle(array: NDArray[np.integer], generator: np.random.RandomState) -> None:
    """``generator.shuffle(array)`` for a contiguous array of 4 or 8 bytes per element."""
    lib = library()
    state = generator.get_state(legacy=True)
    if lib is None or state[0] != "MT19937" or not array.flags.c_contiguous:
        generator.shuffle(array)
        return
    key = np.array(state[1], dtype=np.uint32)
    position = lib.mm_shuffle(
        array.ctypes.data, array.size, array.dtype.itemsize, key.ctypes.data, int(state[2])
    )
    if position < 0:
        raise ValueError(f"elements of {array.dtype} cannot be shuffled")
    generator.set_state((state[0], key, position, state[3], state[4]))


def check_pointers(
    lengths: NDArray[np.int32], pointers: NDArray[np.int64], item_bytes: int
) -> tuple[int, int] | None:
    """The first bad sequence (or their number) and the bytes before it; None without the library.

    Both arrays (sequences,) are contiguous, and need not be aligned.
    """
    lib = library()
    if lib is None:
        return None
    end = c_int64()
    place = lib.mm_check_pointers(
        lengths.ctypes.data, pointers.ctypes.data, lengths.size, item_bytes, ctypes.byref(end)
    )
    return int(place), end.value
