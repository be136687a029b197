"""A Hugging Face folder as a checkpoint of ours.

Owns ``import_folder``.  Invariant: one tensor is in memory at a time; every parameter is written
once, and the checkpoint is complete or absent. Tested by ``tests/conversion/test_round_trip.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamuon.checkpoint import RELEASE, StoredTensor, save
from megamuon.checkpoint.tensors import TensorEntry
from megamuon.conversion.families import ConversionError
from megamuon.conversion.folder_files import (
    DOCUMENT,
    TOKENIZER,
    check_rows,
    copy_tokenizer,
    folder_document,
)
from megamuon.conversion.hf_config import family_of, read_config
from megamuon.conversion.hf_index import EMBEDDING, Shapes, folder_index
from megamuon.conversion.tensor_file import Reader

Advance = Callable[[int, int], None]  # bytes done, bytes in all


def no_progress(_done: int, _total: int) -> None:
    """Tell nobody."""


def check_output(output: Path) -> None:
    """Raise ConversionError where ``output`` has anything in it."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConversionError(f"--output {output} is not empty: name a new folder")


def import_folder(
    folder: Path,
    output: Path,
    *,
    shapes: Shapes,
    arguments: Mapping[str, Any],
    advance: Advance = no_progress,
) -> tuple[str, ...]:
    """Write the folder's weights to ``output`` as the checkpoint ``release``; what was stored there
    and not used, with reasons.

    ``shapes`` are those of our model's parameters, ``arguments`` the nested flags that the
    checkpoint stores.  Raises ConversionError and CheckpointError.
    """
    check_output(output)
    family = family_of(read_config(folder), folder)
    check_rows(folder, shapes[EMBEDDING][0])
    found = folder_index(folder, family, shapes)
    reader, done = Reader(folder), 0
    sizes = {name: _bytes(entry) for name, entry in found.index.items()}
    total = sum(sizes.values())

    def read(name: str) -> Tensor:
        nonlocal done
        tensor = reader.tensor(found.index[name])
        done += sizes[name]
        advance(done, total)
        return tensor

    pieces = [
        StoredTensor(
            name=name,
            shape=entry.shape,
            offset=(0,) * len(entry.shape),
            data=torch.empty(entry.shape, dtype=entry.dtype, device="meta"),
            read=lambda name=name: read(name),  # type: ignore[misc]
        )
        for name, entry in found.index.items()
    ]
    hashes = copy_tokenizer(folder, output / TOKENIZER)
    documents = {"args": arguments, DOCUMENT: folder_document(folder, hashes)}
    save(output, RELEASE, pieces, documents=documents).wait()
    return found.named


def _bytes(entry: TensorEntry) -> int:
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize
