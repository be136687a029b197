"""A checkpoint of ours as a Hugging Face folder.

Owns ``export_checkpoint``.  Invariants: it needs the checkpoint and the tokenizer beside it alone;
one tensor is in memory at a time; every weight of the checkpoint goes to one place and every
written element comes from one; the folder gets its name when it is complete. Tested by
``tests/conversion/test_round_trip.py``.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamuon.checkpoint import Iteration, read_index
from megamuon.checkpoint.files import (
    FileRecord,
    encode_json,
    make_directory,
    sync_directory,
    write_durably,
)
from megamuon.checkpoint.manifest import check_content, check_present, read_manifest
from megamuon.checkpoint.storage import file_blocks
from megamuon.checkpoint.tensors import TensorEntry, TensorIndex
from megamuon.checkpoint.tracker import directory_name
from megamuon.conversion.families import FAMILIES, ConversionError, Family, Name
from megamuon.conversion.folder_files import (
    GENERATION,
    TOKENIZER,
    check_tokenizer,
    tokenizer_files,
)
from megamuon.conversion.hf_config import CONFIG, config_from_flags
from megamuon.conversion.hf_index import EMBEDDING, INDEX, SINGLE, part_view, spelled
from megamuon.conversion.importing import Advance, check_output, no_progress
from megamuon.conversion.tensor_file import Reader

SHARD_BYTES = 5_000_000_000
OPTIMIZER = "optimizer."
REPORT = "conversion.json"  # hashes of what was written


@dataclass(frozen=True, kw_only=True)
class Part:
    """A parameter of ours inside a tensor of theirs."""

    ours: str
    name: Name
    expert: int | None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A tensor of theirs."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def export_checkpoint(
    directory: Path,
    iteration: Iteration,
    output: Path,
    *,
    flags: Mapping[str, Any],
    documents: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    advance: Advance = no_progress,
) -> str:
    """Write ``directory``'s checkpoint to the new folder ``output``; returns the ``model_type``.

    ``flags`` are the values by dest that the checkpoint stores, ``documents`` its
    ``hugging_face`` document or {}.  ``dtype``: of all tensors, None: as stored.  The checkpoint's
    hashes are compared first.  Raises ConversionError and CheckpointError.
    """
    check_output(output)
    source = directory / directory_name(iteration)
    manifest = read_manifest(source)
    check_present(source, manifest)
    check_content(source, manifest, list(manifest.files))
    index = {
        name: entry
        for name, entry in read_index(directory, iteration).items()
        if not name.startswith(OPTIMIZER)
    }
    if EMBEDDING not in index:
        raise ConversionError(f"{source} holds no {EMBEDDING}: not a decoder of ours")
    flags = {**flags, "padded_vocab_size": index[EMBEDDING].shape[0]}
    stored = str(dtype or index[EMBEDDING].dtype).removeprefix("torch.")
    config = config_from_flags(flags, dtype=stored, origin=documents.get("config"))
    tokenizer = directory / TOKENIZER
    check_tokenizer(tokenizer, documents.get(TOKENIZER, {}))
    targets = plan_targets(index, FAMILIES[config["model_type"]], dtype)
    make_directory(output.absolute().parent)
    partial = output.absolute().with_name(f".{output.name}.{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        records = _write_weights(partial, source, index, targets, shard_bytes, advance)
        records += _write_rest(partial, config, documents.get("generation_config"), tokenizer)
        hashes = {record.name: {"size": record.size, "sha256": record.sha256} for record in records}
        report = {"source": f"{directory_name(iteration)} of a MegaMuon run", "files": hashes}
        write_durably(partial / REPORT, [encode_json(report)])
        sync_directory(partial)
        os.rename(partial, output)  # onto nothing, or onto an empty folder
        sync_directory(output.absolute().parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return str(config["model_type"])


def plan_targets(index: TensorIndex, family: Family, dtype: torch.dtype | None) -> list[Target]:
    """Their tensors, by the first of the family's spellings, in the order of layers.

    Raises ConversionError for a weight that has no place there and a tensor with a part missing.
    """
    parts: dict[str, list[Part]] = {}
    for ours in index:
        try:
            theirs, name, expert = spelled(ours, family.names[0])
        except KeyError as error:
            raise ConversionError(f"{family.model_type} has no place for {ours}") from error
        parts.setdefault(theirs, []).append(Part(ours=ours, name=name, expert=expert))
    targets = []
    for key in sorted(parts, key=_natural):
        found = sorted(parts[key], key=lambda part: part.name.part)
        of = found[0].name.part[1]
        if [part.name.part for part in found] != [(place, of) for place in range(of)]:
            raise ConversionError(f"{key}: {len(found)} of its {of} parts are in the checkpoint")
        first = index[found[0].ours]
        shape = (first.shape[0] * of, *first.shape[1:])
        targets.append(
            Target(
                key=key,
                shape=shape[::-1] if found[0].name.transpose else shape,
                dtype=dtype or first.dtype,
                parts=tuple(found),
            )
        )
    return targets


def _natural(key: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", key)]


def _shards(targets: Sequence[Target], most: int) -> list[list[Target]]:
    shards: list[list[Target]] = [[]]
    size = 0
    for target in targets:
        if shards[-1] and size + target.size > most:
            shards.append([])
            size = 0
        shards[-1].append(target)
        size += target.size
    return shards


def _write_weights(
    partial: Path,
    source: Path,
    index: TensorIndex,
    targets: Sequence[Target],
    shard_bytes: int,
    advance: Advance,
) -> list[FileRecord]:
    reader, done = Reader(source), 0
    total = sum(target.size for target in targets)

    def tensors(shard: Sequence[Target]) -> Iterator[Tensor]:
        nonlocal done
        for target in shard:
            yield _assembled(target, index, reader)
            done += target.size
            advance(done, total)

    records, places = [], {}
    shards = _shards(targets, shard_bytes)
    for number, shard in enumerate(shards, 1):
        name = SINGLE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [(target.key, target.dtype, target.shape) for target in shard]
        records.append(write_durably(partial / name, file_blocks(entries, tensors(shard))))
        places.update(dict.fromkeys((target.key for target in shard), name))
    if len(shards) > 1:
        table = {"metadata": {"total_size": total}, "weight_map": places}
        records.append(write_durably(partial / INDEX, [encode_json(table)]))
    return records


def _assembled(target: Target, index: TensorIndex, reader: Reader) -> Tensor:
    """The tensor, its parts read into their places."""
    whole = torch.empty(target.shape, dtype=target.dtype)
    for part in target.parts:
        entry: TensorEntry = index[part.ours]
        view = part_view(part.name, part.expert, entry.shape)
        place = whole if view is None else view.inside(whole, entry.shape[0])
        reader.fill(place, entry)
    return whole


def _write_rest(
    partial: Path, config: Mapping[str, Any], generation: Any, tokenizer: Path
) -> list[FileRecord]:
    """Config, generation settings, and the tokenizer's files byte for byte."""
    if generation is None:
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation = {name: config[name] for name in tokens if config.get(name) is not None}
    contents = {CONFIG: encode_json(config), GENERATION: encode_json(generation)}
    for name in tokenizer_files(tokenizer):
        contents[name] = (tokenizer / name).read_bytes()
    return [write_durably(partial / name, [content]) for name, content in contents.items()]
