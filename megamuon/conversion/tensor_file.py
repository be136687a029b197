"""safetensors files, checked before use and read a block at a time.

Owns the reading of a header (every tensor inside the file, none twice) and of tensors without
mapping a file into memory: what is in memory is the target and one block.  Invariant: a file that
is cut or malformed is an error that names it, before any tensor is read. Tested by
``tests/conversion/test_hf_index.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megamuon.checkpoint.tensors import DTYPES, TensorEntry, View
from megamuon.conversion.families import ConversionError

BLOCK = 32 << 20  # bytes read at a time
LONGEST_HEADER = 100 << 20  # bytes; the format's own limit


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file."""

    dtype: str  # the format's name
    shape: tuple[int, ...]
    start: int  # of its bytes in the file

    @property
    def size(self) -> int:
        """Bytes, of a dtype that is read."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by key.  Raises ConversionError naming the file."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a tensor stands in the header twice")
        return dict(pairs)

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise ValueError(f"{size} bytes, too short for its header: cut, or another format")
            header = json.loads(file.read(length), object_pairs_hook=once)
        found, ends = {}, []
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            stored = Stored(
                dtype=entry["dtype"], shape=tuple(entry["shape"]), start=8 + length + start
            )
            if stored.dtype in DTYPES and stored.size != end - start:
                raise ValueError(f"{key}: {end - start} bytes for shape {list(stored.shape)}")
            found[key] = stored
            ends.append((start, end))
        at = 0
        for start, end in sorted(ends):
            if start != at or end < start:
                raise ValueError(f"the tensors overlap or leave a gap at byte {at}")
            at = end
        if 8 + length + at != size:
            raise ValueError(f"its header promises {8 + length + at} bytes, the file has {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path} cannot be read as safetensors: {error}") from error
    return found


class Reader:
    """Whole tensors from the files of a directory, in blocks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._headers: dict[str, dict[str, Stored]] = {}
        self._buffer = bytearray(BLOCK)

    def tensor(self, entry: TensorEntry) -> Tensor:
        """A whole tensor, in the dtype of its entry."""
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        self.fill(whole, entry)
        return whole

    def fill(self, whole: Tensor, entry: TensorEntry) -> None:
        """Copy a whole tensor into ``whole`` (any strides, any dtype)."""
        for piece in entry.pieces:
            chunk = piece.chunk
            part = whole
            for dim, (start, size) in enumerate(zip(chunk.offset, chunk.shape, strict=True)):
                part = part.narrow(dim, start, size)
            if piece.file not in self._headers:
                self._headers[piece.file] = read_header(self.directory / piece.file)
            stored = self._headers[piece.file].get(piece.key)
            if stored is None:
                raise ConversionError(f"{self.directory / piece.file} holds no {piece.key}")
            self._copy(self.directory / piece.file, stored, part, piece.view)

    def equal(self, one: TensorEntry, other: TensorEntry) -> bool:
        """Whether two tensors in one piece each, stored as they are, have the same bytes."""
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        with self._open(one) as (first, at), self._open(other) as (second, there):
            left = math.prod(one.shape) * one.dtype.itemsize
            first.seek(at)
            second.seek(there)
            while left:
                size = min(left, BLOCK)
                if first.read(size) != second.read(size):
                    return False
                left -= size
        return True

    @contextmanager
    def _open(self, entry: TensorEntry) -> Iterator[tuple[BinaryIO, int]]:
        (piece,) = entry.pieces
        path = self.directory / piece.file
        with path.open("rb") as file:
            yield file, read_header(path)[piece.key].start

    def _copy(self, path: Path, stored: Stored, part: Tensor, view: View | None) -> None:
        view = view or View()
        shape, at = stored.shape or (1,), stored.start
        part = part.reshape(1) if part.ndim == 0 else part
        if view.lead is not None:
            at += view.lead * stored.size // shape[0]
            shape = shape[1:]
        low, high = view.start, view.start + part.shape[0]
        cut = view.transpose and part.ndim == 2  # then what is taken are columns
        first, last = (0, shape[0]) if cut else (low, high)
        with path.open("rb") as file:
            for start, block in self._blocks(file, at, shape, stored.dtype, first, last):
                stop = start + block.shape[0]
                if cut:
                    part[:, start:stop].copy_(block[:, low:high].t())
                else:
                    part[start - low : stop - low].copy_(block)

    def _blocks(
        self, file: BinaryIO, at: int, shape: tuple[int, ...], name: str, first: int, last: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows ``first`` to ``last`` of a tensor that starts at byte ``at``: (row, rows) in turns.
        A row longer than a block makes the buffer longer.
        """
        dtype = DTYPES[name]
        row = math.prod(shape[1:]) * dtype.itemsize
        if len(self._buffer) < row:
            self._buffer = bytearray(row)
        rows = max(1, len(self._buffer) // max(row, 1))
        for start in range(first, last, rows):
            count = min(rows, last - start)
            file.seek(at + start * row)
            wanted = memoryview(self._buffer)[: count * row]
            if file.readinto(wanted) != len(wanted):  # type: ignore[attr-defined]
                raise ConversionError(f"{file.name}: the file became shorter while it was read")
            if row:
                block = torch.frombuffer(wanted, dtype=dtype).view(count, *shape[1:])
                yield start, block
