"""Storage of torch.distributed.checkpoint over safetensors files: nothing is pickled, every byte
is hashed once.

Owns the data files (``rank_00003.safetensors``, more per rank beyond 4 GiB) and ``tensors.json``.
Torch's own Hugging Face storage is not used: it keeps one piece per tensor and file, so two
slices held by one rank overwrite each other; it infers a tensor's shape from the pieces that it
finds, so a lost last piece goes unnoticed; and it builds each file in memory. Here the shape
stands in the index, a file is streamed, and its hash is taken on the way.  Every file is plain
safetensors: a tensor that is whole in one piece has its own name as key, a slice has
``name@offset``. Tested by ``tests/checkpoint/test_storage.py``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megamuon.checkpoint.chunks import Chunk
from megamuon.checkpoint.files import FileRecord, write_durably
from megamuon.checkpoint.ranks import CheckpointError
from megamuon.checkpoint.tensors import (
    DTYPE_NAMES,
    INDEX,
    Piece,
    TensorEntry,
    TensorIndex,
    index_to_text,
)

FILE_BYTES = (
    4 << 30
)  # a rank's data is cut into files of about this size, so that many ranks can verify them


class PieceWriter(StorageWriter):
    """Writes this rank's pieces into ``directory``; on the coordinator also the index.

    ``records`` then holds what the manifest must know of the files that this rank wrote.
    """

    def __init__(self, directory: Path, rank: int, *, file_bytes: int = FILE_BYTES) -> None:
        self.directory = directory
        self.rank = rank
        self.file_bytes = file_bytes
        self.records: list[FileRecord] = []

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing is kept between saves: a writer serves one."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Nothing to do: the directory exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream the planned pieces into files; returns the place of each."""
        results: list[WriteResult] = []
        for number, items in enumerate(self._split(plan.items)):
            suffix = f"_{number:03d}" if number else ""
            name = f"rank_{self.rank:05d}{suffix}.safetensors"
            keys = [_key(item) for item in items]
            self.records.append(write_durably(self.directory / name, _blocks(items, keys, planner)))
            results += [
                WriteResult(item.index, _bytes(item), (name, key))
                for item, key in zip(items, keys, strict=True)
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' pieces.  Runs on the coordinator only."""
        places = {
            (result.index.fqn, tuple(result.index.offset or ())): result.storage_data
            for of_rank in results
            for result in of_rank
        }
        index: TensorIndex = {}
        for name, entry in metadata.state_dict_metadata.items():
            pieces = []
            for stored in entry.chunks:
                file, key = places[name, tuple(stored.offsets)]
                chunk = Chunk(tuple(stored.offsets), tuple(stored.sizes))
                pieces.append(Piece(chunk=chunk, file=file, key=key))
            index[name] = TensorEntry(
                shape=tuple(entry.size),
                dtype=entry.properties.dtype,
                pieces=tuple(sorted(pieces, key=lambda piece: piece.chunk)),
            )
        path = self.directory / INDEX
        self.records.append(write_durably(path, [index_to_text(index)]))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Never asked: a writer is always given, never guessed from a path."""
        return True

    def _split(self, items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
        """Groups of about ``file_bytes``.  Wide dtypes first: that keeps every tensor of a file
        aligned.
        """
        group: list[WriteItem] = []
        size = 0
        for item in sorted(items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn)):
            if group and size + _bytes(item) > self.file_bytes:
                yield group
                group, size = [], 0
            group.append(item)
            size += _bytes(item)
        if group:
            yield group


class PieceReader(StorageReader):
    """Reads pieces from ``directory`` by an index that has been read and checked before."""

    def __init__(self, directory: Path, index: TensorIndex) -> None:
        self.directory = directory
        self.index = index

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing is kept between loads: a reader serves one."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Empty: the planner has the index, which says more than torch's metadata can."""
        return Metadata({})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planned ranges, file by file.  Raises CheckpointError naming file and tensor."""
        places = {
            (name, piece.chunk.offset): piece
            for name, entry in self.index.items()
            for piece in entry.pieces
        }
        by_file: dict[str, list[tuple[ReadItem, Piece]]] = {}
        for item in plan.items:
            piece = places[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file.setdefault(piece.file, []).append((item, piece))
        for name, reads in sorted(by_file.items()):
            self._read_file(self.directory / name, reads, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Never asked: a reader is always given, never guessed from a path."""
        return True

    def _read_file(
        self, path: Path, reads: Iterable[tuple[ReadItem, Piece]], planner: LoadPlanner
    ) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for item, piece in reads:
                    self._read_piece(file, path, item, piece, planner)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error

    def _read_piece(
        self, file: Any, path: Path, item: ReadItem, piece: Piece, planner: LoadPlanner
    ) -> None:
        target = planner.resolve_tensor(item)
        ranges = tuple(
            slice(start, start + size)
            for start, size in zip(item.storage_offsets, item.lengths, strict=True)
        )
        if piece.view is not None:
            found = piece.view.back(file.get_slice(piece.key)[piece.view.slices(ranges)])
        elif (
            tuple(item.lengths) == piece.chunk.shape
        ):  # whole piece; also the only way to read a 0-d tensor
            found = file.get_tensor(piece.key)
        else:
            found = file.get_slice(piece.key)[ranges]
        promised = self.index[item.storage_index.fqn].dtype
        if found.shape != target.shape or found.dtype != promised:
            raise CheckpointError(
                f"{path}: {piece.key} holds {tuple(found.shape)} {found.dtype}, "
                f"{INDEX} promises {tuple(target.shape)} {promised}"
            )
        target.copy_(found)  # the planner has let wider dtypes through, which takes no bit away
        planner.commit_tensor(item, target)


def _blocks(
    items: Sequence[WriteItem], keys: Sequence[str], planner: SavePlanner
) -> Iterator[bytes | memoryview]:
    entries = []
    for item, key in zip(items, keys, strict=True):
        assert item.tensor_data is not None
        entries.append((key, _dtype(item), tuple(item.tensor_data.chunk.sizes)))
    return file_blocks(entries, (planner.resolve_data(item) for item in items))


def file_blocks(
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], tensors: Iterable[Any]
) -> Iterator[bytes | memoryview]:
    """A safetensors file as a stream: length of the header, header, the tensors' bytes; one
    tensor in memory at a time. ``entries`` are (key, dtype, shape) of the ``tensors``.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, dtype, shape in entries:
        end = at + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    yield len(text).to_bytes(8, "little")
    yield text
    for data in tensors:
        assert isinstance(data, torch.Tensor)
        block = _bytes_of(data)
        del data  # the next one is read while this frame waits
        yield block
        del block


def _bytes_of(data: torch.Tensor) -> memoryview:
    flat = data.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _key(item: WriteItem) -> str:
    assert item.tensor_data is not None
    if item.tensor_data.chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(str(start) for start in item.tensor_data.chunk.offsets)}"


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * _dtype(item).itemsize
