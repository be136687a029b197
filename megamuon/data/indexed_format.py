"""The byte format of a ``.idx`` file: header, item types, and the checks that every open makes.

Owns the constants of Megatron-LM's indexed dataset and the functions that refuse a file which
breaks the format, with one line that names file, field and value. Invariant: what passes here can
be read without further checks. Tested by ``tests/data_room/test_indexed.py``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamuon.data import native

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, item type, sequences, documents + 1
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),  # 6 and 7 are in this order in the format
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
UINT16_LIMIT = (
    65500  # not 65536: the format's writers leave room, and readers trust the header alone
)
CHUNK = 1 << 22  # elements per step of the checks, so that they need no memory of the file's size


class IndexedDatasetError(ValueError):
    """A ``.bin``/``.idx`` pair that breaks an invariant of the format."""


def writer_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """uint16 where the vocabulary is below 65,500, else int32 (Megatron-LM's rule; None means
    int32).
    """
    return np.dtype("<u2" if vocab_size is not None and vocab_size < UINT16_LIMIT else "<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """``<prefix>.bin``, where the items are."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """``<prefix>.idx``, where the index is."""
    return Path(f"{os.fspath(prefix)}.idx")


def read_header(
    path: Path, head: bytes, size: int, multimodal: bool
) -> tuple[np.dtype[Any], int, int]:
    if len(head) < HEADER.size:
        raise IndexedDatasetError(
            f"{path}: header: the file has {len(head)} bytes, a header has {HEADER.size}"
        )
    magic, version, code, count, documents = HEADER.unpack(head)
    if magic != MAGIC:
        raise IndexedDatasetError(
            f"{path}: magic: {magic!r} is not {MAGIC!r}, so this is no indexed dataset"
        )
    if version != VERSION:
        raise IndexedDatasetError(f"{path}: version: {version} is not {VERSION}")
    if code not in DTYPES:
        raise IndexedDatasetError(f"{path}: item type: code {code} is not one of {sorted(DTYPES)}")
    if documents < 1:
        raise IndexedDatasetError(f"{path}: document count: {documents} is below 1")
    expected = HEADER.size + 12 * count + 8 * documents + (count if multimodal else 0)
    if size != expected:
        hint = ""
        if size == expected + (-count if multimodal else count):
            hint = "; it looks like a " + ("text" if multimodal else "multimodal") + " dataset"
        raise IndexedDatasetError(
            f"{path}: file size: {size} bytes, but the header ({count} sequences, {documents} "
            "document indices) "
            f"needs {expected}{hint}"
        )
    return DTYPES[code], count, documents


def check_documents(path: Path, documents: NDArray[Any], count: int) -> None:
    if documents[0] != 0:
        raise IndexedDatasetError(f"{path}: document_indices[0]: {documents[0]} is not 0")
    if documents[-1] != count:
        raise IndexedDatasetError(
            f"{path}: document_indices[{documents.size - 1}]: {documents[-1]} is not the number "
            f"of sequences {count}"
        )
    for start in range(0, documents.size - 1, CHUNK):
        part = documents[start : start + CHUNK + 1]
        fall = np.flatnonzero(part[1:] < part[:-1])
        if fall.size:
            at = start + int(fall[0])
            raise IndexedDatasetError(
                f"{path}: document_indices[{at + 1}]: {documents[at + 1]} is below its "
                f"predecessor {documents[at]}"
            )


def check_pointers(
    idx: Path,
    items: Path,
    lengths: NDArray[Any],
    pointers: NDArray[Any],
    dtype: np.dtype[Any],
    bin_size: int,
) -> None:
    """Raise IndexedDatasetError unless the lengths are counts that the pointers sum up to the end
    of the ``.bin``.
    """
    found = native.check_pointers(lengths, pointers, dtype.itemsize)
    end = found[1] if found is not None else 0
    # Without the library all is checked here; with it, what stops at a sequence is named here.
    first = 0 if found is None else found[0]
    for start, part in _chunks(lengths, first):
        low = np.flatnonzero(part < 0)
        if low.size:
            at = start + int(low[0])
            raise IndexedDatasetError(f"{idx}: lengths[{at}]: {lengths[at]} is negative")
        ends = np.cumsum(part, dtype=np.int64) * dtype.itemsize + end
        starts = np.concatenate(([end], ends[:-1]))
        wrong = np.flatnonzero(pointers[start : start + part.size] != starts)
        if wrong.size:
            at = int(wrong[0])
            raise IndexedDatasetError(
                f"{idx}: pointers[{start + at}]: {pointers[start + at]} is not {starts[at]}, the "
                "sum of the "
                "lengths before it in bytes"
            )
        end = int(ends[-1])
    if end != bin_size:
        raise IndexedDatasetError(
            f"{items}: file size: {bin_size} bytes, but {idx.name} describes {end} "
            f"({lengths.size} sequences of {dtype.name})"
        )


def _chunks(array: NDArray[Any], first: int) -> Iterator[tuple[int, NDArray[Any]]]:
    for start in range(first, array.size, CHUNK):
        yield start, array[start : start + CHUNK]
