"""What a checkpoint says about its tensors: pieces in memory, and the index of the pieces on
disk.

Owns ``StoredTensor`` (a piece of a whole tensor on this rank) and ``TensorIndex``
(``tensors.json``: for every tensor its whole shape, dtype and the file, key and place of each
piece).  Invariant: the index of a complete checkpoint covers every tensor exactly once, and
nothing in it depends on how the reader is sharded. Tested by
``tests/checkpoint/test_tensors.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megamuon.checkpoint.chunks import Chunk, coverage, inside
from megamuon.checkpoint.ranks import CheckpointError

INDEX = "tensors.json"

# Names of the safetensors format for the dtypes that may be stored.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SHOWN = 5  # names listed in an error before "and n more"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A rectangular piece of a whole tensor, held by this rank.

    ``data`` is a plain local tensor (any device, any strides) whose shape is the piece's; saving
    reads it, loading fills it in place.  A rank may list several pieces of one tensor, empty
    ones, or none.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where the piece starts, same length as shape
    data: torch.Tensor
    rounds: bool = False  # a float saved in a wider dtype may be loaded into it, rounded once
    # Gives the values when they are written; ``data`` is on the meta device then, so that a tensor
    # is in memory only while its file is.
    read: Callable[[], torch.Tensor] | None = None

    @property
    def chunk(self) -> Chunk:
        """The piece's place in the whole."""
        return Chunk(tuple(self.offset), tuple(self.data.shape))

    def share(self, place: int, places: int) -> StoredTensor | None:
        """What the holder number ``place`` of ``places`` that hold this piece alike saves of it:
        rows of dim 0 by the rule of torch.chunk; a 0-d piece is the first holder's.
        """
        if places == 1 or not self.data.ndim:
            return self if place == 0 else None
        size = len(self.data)
        each = -(-size // places)
        start, stop = min(place * each, size), min((place + 1) * each, size)
        if start == stop:
            return None
        offset = (self.offset[0] + start, *self.offset[1:])
        return replace(self, offset=offset, data=self.data[start:stop])

    def check(self) -> None:
        """Raise CheckpointError where the piece does not lie inside the whole or has a dtype that
        is not stored.
        """
        if not inside(self.shape, self.chunk):
            raise CheckpointError(
                f"tensor {self.name}: a piece of shape {tuple(self.data.shape)} at offset "
                f"{tuple(self.offset)} "
                f"does not lie inside the whole shape {tuple(self.shape)}"
            )
        if self.data.dtype not in DTYPE_NAMES:
            known = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
            raise CheckpointError(
                f"tensor {self.name}: dtype {self.data.dtype} cannot be stored; convert it to "
                f"one of {known}"
            )


def widens(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether every value of ``saved`` is one of ``wanted``: equal, or a wider float (BF16 and FP16
    in FP32, all of them in FP64).
    """
    floats = saved.is_floating_point and wanted.is_floating_point
    return saved == wanted or (floats and torch.promote_types(saved, wanted) == wanted)


@dataclass(frozen=True, kw_only=True)
class View:
    """Where a piece lies in a stored tensor of another shape: ``stored[lead]``, transposed, from
    row ``start`` on (fused experts, GPT-2's maps; our own checkpoints need none).
    """

    lead: int | None = None  # index of dim 0 of a 3-D tensor
    start: int = 0
    transpose: bool = False

    def slices(self, ranges: tuple[slice, ...]) -> tuple[slice, ...]:
        """``ranges`` of the piece as ranges of the stored tensor."""
        first, *rest = ranges
        moved = (slice(first.start + self.start, first.stop + self.start), *rest)
        if self.transpose:
            moved = moved[::-1]
        return moved if self.lead is None else (slice(self.lead, self.lead + 1), *moved)

    def back(self, found: torch.Tensor) -> torch.Tensor:
        """What ``slices`` cut out of the stored tensor, in the shape of the piece."""
        found = found if self.lead is None else found[0]
        return found.t() if self.transpose else found

    def inside(self, whole: torch.Tensor, rows: int) -> torch.Tensor:
        """The piece of ``rows`` rows as a view of a ``whole`` stored tensor."""
        whole = whole if self.lead is None else whole[self.lead]
        return (whole.t() if self.transpose else whole).narrow(0, self.start, rows)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece on disk."""

    chunk: Chunk
    file: str  # name inside the checkpoint's directory
    key: str  # name inside the safetensors file
    view: View | None = None  # None: the stored tensor is the piece


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A whole tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


TensorIndex = dict[str, TensorEntry]


def index_to_text(index: TensorIndex) -> bytes:
    """The content of ``tensors.json``: a line per tensor, since indented JSON is ten times
    slower.
    """
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(_entry_to_json(entry))}"
        for name, entry in sorted(index.items())
    )
    return f'{{"tensors": {{\n{lines}\n}}}}\n'.encode()


def _entry_to_json(entry: TensorEntry) -> dict[str, Any]:
    return {
        "shape": entry.shape,
        "dtype": DTYPE_NAMES[entry.dtype],
        "pieces": [
            {
                "offset": piece.chunk.offset,
                "shape": piece.chunk.shape,
                "file": piece.file,
                "key": piece.key,
            }
            for piece in entry.pieces
        ],
    }


def index_from_json(value: Any, source: Path, files: Mapping[str, Any]) -> TensorIndex:
    """Read the index back, check it, and check that it covers every tensor once.

    ``files`` are the names that the manifest lists: a piece elsewhere is refused.  Raises
    CheckpointError naming ``source`` and the tensor.
    """
    index: TensorIndex = {}
    name = ""
    try:
        for name, entry in value["tensors"].items():
            shape = tuple(int(size) for size in entry["shape"])
            pieces = tuple(
                Piece(
                    chunk=Chunk(tuple(map(int, item["offset"])), tuple(map(int, item["shape"]))),
                    file=str(item["file"]),
                    key=str(item["key"]),
                )
                for item in entry["pieces"]
            )
            index[name] = TensorEntry(shape=shape, dtype=DTYPES[entry["dtype"]], pieces=pieces)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        where = f"tensor {name}: " if name else ""
        raise CheckpointError(f"{source}: {where}malformed entry ({error!r})") from error
    for name, entry in index.items():
        for piece in entry.pieces:
            if piece.file not in files:
                raise CheckpointError(
                    f"{source}: tensor {name} lies in {piece.file}, which the manifest does "
                    "not list"
                )
            if not inside(entry.shape, piece.chunk):
                raise CheckpointError(
                    f"{source}: tensor {name}: piece {piece.chunk} lies outside {entry.shape}"
                )
        check_coverage(name, entry.shape, [piece.chunk for piece in entry.pieces], f"{source}: ")
    return index


def check_coverage(
    name: str, shape: tuple[int, ...], chunks: list[Chunk], prefix: str = ""
) -> None:
    """Raise CheckpointError unless ``chunks`` cover ``shape`` exactly once."""
    found = coverage(shape, chunks)
    if found.overlap is not None:
        raise CheckpointError(
            f"{prefix}tensor {name} of shape {shape}: the piece {found.overlap[1]} holds "
            "elements that another piece "
            "holds too; each element must be saved by one rank"
        )
    if found.missing:
        raise CheckpointError(
            f"{prefix}tensor {name} of shape {shape}: no rank saved the elements {found.missing[0]}"
        )


def listed(names: list[str]) -> str:
    """The first few names, sorted, and how many more there are."""
    names = sorted(names)
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
