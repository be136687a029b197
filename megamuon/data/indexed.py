"""Megatron-LM's indexed dataset: ``<prefix>.bin`` (items back to back) and ``<prefix>.idx`` (where
they lie).

Owns the byte format, its reader and its writer. Invariants, all checked when a dataset is opened:
the magic, the version and the item type are known; the file has exactly the size that its header
implies; lengths are not negative; pointers are the exclusive running sum of the lengths in bytes
and end at the size of the ``.bin``; document indices start at 0, never fall and end at the number
of sequences. A violation is one line that names file, field and value. The writer is atomic: the
pair appears complete or not at all. Source: Megatron-LM's ``indexed_dataset``; byte-exact by golden
vectors. Tested by ``tests/data_room/test_indexed.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megamuon.data.indexed_format import (
    CHUNK,
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDatasetError,
    bin_path,
    check_documents,
    check_pointers,
    idx_path,
    read_header,
    writer_dtype,
)
from megamuon.data.temporary import temporary_path

__all__ = [
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "IndexedDatasetError",
    "bin_path",
    "idx_path",
    "writer_dtype",
]

_COPY_BYTES = 1 << 24


class IndexedDatasetBuilder:
    """Write a dataset. As a context manager it finalizes on success and leaves nothing behind on an
    error.

    The files lie under temporary names until ``finalize``. An existing pair stays readable until
    then; it is replaced index first removed, then items, then index, so that no reader sees a new
    file beside an old one.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: DTypeLike, *, multimodal: bool = False
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(
                f"{self.prefix}: items of type {self.dtype} have no code in the format"
            )
        self.multimodal = multimodal
        self._lengths: list[int] = []
        self._documents: list[int] = [0]
        self._modes: list[int] = []
        self._bytes = 0
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._temporary_bin = temporary_path(bin_path(self.prefix))
        self._temporary_idx = temporary_path(idx_path(self.prefix))
        self._file = self._temporary_bin.open("wb", buffering=1 << 20)

    @property
    def sequences(self) -> int:
        """Sequences so far."""
        return len(self._lengths)

    @property
    def documents(self) -> int:
        """Ended documents so far."""
        return len(self._documents) - 1

    def add_item(self, items: ArrayLike, mode: int = 0) -> None:
        """Append one sequence, ``items`` of shape (length,). Raises if a value does not fit the
        item type.
        """
        array = self._cast(items)
        self._file.write(array.tobytes())
        self._record(array.size, mode)

    def end_document(self) -> None:
        """Close the current document; one without sequences is legal."""
        self._documents.append(len(self._lengths))

    def add_document(
        self, items: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document, ``items`` of shape (sum(lengths),), cut into sequences of these
        lengths.
        """
        array = self._cast(items)
        counts = [int(length) for length in lengths]  # Python's integers: NumPy's sums may wrap
        if sum(counts) != array.size or min(counts, default=0) < 0:
            raise ValueError(
                f"{self.prefix}: a document of {array.size} items has lengths {counts}"
            )
        if modes is not None and len(modes) != len(counts):
            raise ValueError(f"{self.prefix}: {len(modes)} modes for {len(counts)} sequences")
        self._file.write(array.tobytes())
        for position, length in enumerate(counts):
            self._record(length, modes[position] if modes is not None else 0)
        self.end_document()

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append another finished dataset of the same item type, in its order."""
        other = IndexedDataset(prefix, multimodal=self.multimodal, mmap=False)
        if other.dtype != self.dtype:
            raise ValueError(
                f"{idx_path(prefix)}: items are {other.dtype}, {self.prefix} holds {self.dtype}"
            )
        offset = len(self._lengths)
        self._lengths.extend(other.lengths.tolist())
        self._documents.extend((other.document_indices[1:] + offset).tolist())
        if other.modes is not None:
            self._modes.extend(other.modes.tolist())
        self._bytes += int(bin_path(prefix).stat().st_size)
        with bin_path(prefix).open("rb") as source:
            shutil.copyfileobj(source, self._file, _COPY_BYTES)

    def finalize(self) -> None:
        """Write the index and publish the pair under its names. Sequences after the last end are an
        error.
        """
        if self._documents[-1] != len(self._lengths):
            raise ValueError(
                f"{self.prefix}: {len(self._lengths) - self._documents[-1]} sequences lie after "
                "the last "
                "end_document()"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with self._temporary_idx.open("wb") as file:
            self._write_index(file)
            file.flush()
            os.fsync(file.fileno())
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._temporary_bin, bin_path(self.prefix))
        os.replace(self._temporary_idx, idx_path(self.prefix))

    def abort(self) -> None:
        """Remove the temporary files."""
        self._file.close()
        self._temporary_bin.unlink(missing_ok=True)
        self._temporary_idx.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.finalize()
        finally:
            self.abort()

    def _cast(self, items: ArrayLike) -> NDArray[Any]:
        array = np.asarray(items)
        if array.ndim != 1:
            raise ValueError(f"{self.prefix}: a sequence has shape {array.shape}, not (length,)")
        if array.dtype != self.dtype and array.size and self.dtype.kind in "iu":
            bounds = np.iinfo(self.dtype)
            low, high = array.min(), array.max()
            if low < bounds.min or high > bounds.max:  # a plain cast would wrap around silently
                raise ValueError(
                    f"{self.prefix}: items {low}..{high} of sequence {len(self._lengths)} do not "
                    f"fit {self.dtype}"
                )
        return array.astype(self.dtype, copy=False)

    def _record(self, length: int, mode: int) -> None:
        if not 0 <= length < 1 << 31:
            raise ValueError(
                f"{self.prefix}: sequence {len(self._lengths)} has length {length}, not in [0, "
                "2^31)"
            )
        self._lengths.append(length)
        self._bytes += length * self.dtype.itemsize
        if self.multimodal:
            self._modes.append(mode)
        elif mode:
            raise ValueError(
                f"{self.prefix}: mode {mode} needs a dataset built with multimodal=True"
            )

    def _write_index(self, file: Any) -> None:
        lengths = np.asarray(self._lengths, dtype="<i4")
        count, documents = len(self._lengths), len(self._documents)
        file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], count, documents))
        file.write(lengths.tobytes())
        pointers = np.zeros(count, dtype="<i8")
        if count:
            np.cumsum(lengths[:-1], dtype="<i8", out=pointers[1:])
            pointers *= self.dtype.itemsize
        file.write(pointers.tobytes())
        file.write(np.asarray(self._documents, dtype="<i8").tobytes())
        if self.multimodal:
            file.write(np.asarray(self._modes, dtype="<i1").tobytes())


class IndexedDataset:
    """Read a dataset; every invariant of the format is checked first.

    ``lengths`` (sequences,) int32, ``pointers`` (sequences,) int64 in bytes, ``document_indices``
    (documents + 1,) int64 and ``modes`` (sequences,) int8 or None are views of the mapped index.
    Items are read through a mapping, or with ``mmap=False`` through ``pread`` (file systems on
    which mappings are slow). Picklable: a copy in another process opens the files again.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        multimodal: bool = False,
        mmap: bool = True,
        check: bool = True,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.multimodal = multimodal
        self._mmap = mmap
        self._idx = idx_path(self.prefix)
        self._bin = bin_path(self.prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path}: no such file (the data path is the prefix without .bin/.idx)"
                )
        self._descriptor = -1
        self._fingerprint: dict[str, Any] | None = None
        self._open(check)

    @property
    def path(self) -> str:
        """The ``.bin`` file, for messages."""
        return str(self._bin)

    def _open(self, check: bool) -> None:
        size = self._idx.stat().st_size
        with self._idx.open("rb") as file:
            head = file.read(HEADER.size)
        self.dtype, count, documents = read_header(self._idx, head, size, self.multimodal)
        self._index = np.memmap(self._idx, dtype=np.uint8, mode="r")
        place = HEADER.size

        def view(dtype: str, number: int) -> NDArray[Any]:
            nonlocal place
            part = np.frombuffer(self._index, dtype=dtype, count=number, offset=place)
            place += part.nbytes
            return part

        self.lengths = view("<i4", count)
        self.pointers = view("<i8", count)
        self.document_indices = view("<i8", documents)
        self.modes = view("<i1", count) if self.multimodal else None
        self._bin_size = self._bin.stat().st_size
        if check:
            check_documents(self._idx, self.document_indices, count)
            check_pointers(
                self._idx, self._bin, self.lengths, self.pointers, self.dtype, self._bin_size
            )
        if not self._mmap:
            self._descriptor = os.open(self._bin, os.O_RDONLY)
        self._items: NDArray[Any] | None = None
        if self._mmap and self._bin_size:  # an empty file cannot be mapped
            self._items = np.memmap(self._bin, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        return int(self.lengths.size)

    def __getitem__(self, index: int | slice) -> Any:
        """A sequence (length,), or with an int8 mode beside it if multimodal; a contiguous slice
        gives a list.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(
                    f"{self.prefix}: a slice with step {step}; only contiguous slices are read"
                )
            return [self[i] for i in range(start, stop)]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{self.prefix}: sequence {index} of {len(self)}")
        items = self.get(position)
        return items if self.modes is None else (items, int(self.modes[position]))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Items ``[offset, offset + length)`` of sequence ``index`` (to its end by default), shape
        (length,).

        Unlike ``[]`` it counts from the front alone: what comes from an index file is never
        negative unless it has wrapped. Raises IndexError.
        """
        if not 0 <= index < self.lengths.size:
            raise IndexError(f"{self.prefix}: sequence {index} of {self.lengths.size}")
        whole = int(self.lengths[index])
        if length is None:
            length = whole - offset
        if offset < 0 or length < 0 or offset + length > whole:
            raise IndexError(
                f"{self.prefix}: items [{offset}, {offset + length}) of sequence {index}, which "
                f"has {whole}"
            )
        start = int(self.pointers[index]) // self.dtype.itemsize + offset
        if self._items is not None:
            return self._items[start : start + length]
        return self._pread(start, length)

    def _pread(self, start: int, length: int) -> NDArray[Any]:
        wanted = length * self.dtype.itemsize
        parts: list[bytes] = []
        place = start * self.dtype.itemsize
        while wanted:
            part = os.pread(self._descriptor, wanted, place)
            if not part:
                raise IndexedDatasetError(
                    f"{self._bin}: ends at byte {place}, {wanted} bytes too early"
                )
            parts.append(part)
            place += len(part)
            wanted -= len(part)
        return np.frombuffer(b"".join(parts), dtype=self.dtype)

    def fingerprint(self) -> dict[str, Any]:
        """What sample indices depend on: the size of the ``.idx`` and a hash of its header and
        lengths.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        digest = hashlib.sha256(self._index[: HEADER.size].tobytes())
        for start in range(0, len(self), CHUNK):
            digest.update(self.lengths[start : start + CHUNK].tobytes())
        self._fingerprint = {
            "idx_bytes": int(self._index.size),
            "lengths_sha256": digest.hexdigest(),
        }
        return self._fingerprint

    def close(self) -> None:
        """Give the file descriptor of the ``pread`` mode back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "multimodal": self.multimodal, "mmap": self._mmap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The first process has checked; every data loader worker need not do so again.
        self.__init__(
            state["prefix"], multimodal=state["multimodal"], mmap=state["mmap"], check=False
        )
