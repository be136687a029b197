"""What a Hugging Face folder holds beside config and weights: tokenizer and generation settings.

Owns the copy of the tokenizer's files, byte for byte with their hashes, and the check that the
token table has a row for every token.  Invariant: a file is copied whole or the copy fails.  Tested
by ``tests/conversion/test_round_trip.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamuon.checkpoint.files import hash_file, make_directory, write_durably
from megamuon.conversion.families import ID_FILES, TOKENIZER_FILES, ConversionError
from megamuon.conversion.hf_config import read_config, read_json

TOKENIZER = "tokenizer"  # folder beside a run's checkpoints
GENERATION = "generation_config.json"
DOCUMENT = "hugging_face"  # of a checkpoint: what its folder said that our flags do not


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the tokenizer's files in a folder."""
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def with_kept_tokenizer(flags: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Tokenizer flags of a checkpoint in ``directory``, with the copy of the tokenizer beside it
    where there is one: the path that was given may be another machine's.
    """
    kept = directory / TOKENIZER
    if flags.get("tokenizer_type") == "HuggingFaceTokenizer" and tokenizer_files(kept):
        return {**flags, "tokenizer_model": str(kept)}
    return dict(flags)


def copy_tokenizer(folder: Path, target: Path) -> dict[str, str]:
    """Copy the tokenizer's files to ``target``, made where it is missing, and those beside it that
    say ids of special tokens; SHA-256 by name.

    A file that is there already stays if it is the same.  Raises ConversionError where it is
    another one.
    """
    hashes = {}
    names = tokenizer_files(folder)
    names += [name for name in ID_FILES if names and (folder / name).is_file()]
    for name in names:
        hashes[name] = hash_file(folder / name)
        if (target / name).exists():
            if hash_file(target / name) != hashes[name]:
                raise ConversionError(
                    f"{target / name} is another file than {folder / name}: the checkpoints beside"
                    " it have a tokenizer of their own; choose another folder"
                )
            continue
        make_directory(target)
        write_durably(target / name, [(folder / name).read_bytes()])
    return hashes


def check_tokenizer(target: Path, hashes: Mapping[str, str]) -> None:
    """Raise ConversionError naming a tokenizer file that is not the one a checkpoint was saved
    with.
    """
    for name, expected in hashes.items():
        path = target / name
        if not path.is_file():
            raise ConversionError(f"{path} is missing: the checkpoint was saved with it")
        if hash_file(path) != expected:
            raise ConversionError(f"{path} has changed since the checkpoint was saved")


def folder_document(folder: Path, hashes: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint keeps of the folder that its weights came from, for an export."""
    path = folder / GENERATION
    return {
        "config": read_config(folder),
        "generation_config": read_json(path) if path.is_file() else None,
        TOKENIZER: dict(hashes),
    }


def check_rows(folder: Path, rows: int) -> None:
    """Raise ConversionError where the token table lacks a row of a token in ``tokenizer.json``."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    content = read_json(path)
    try:
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        ids += [token["id"] for token in content.get("added_tokens") or []]
        highest = max(ids, default=-1)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path}: not a tokenizer.json ({error!r})") from error
    if highest >= rows:
        raise ConversionError(
            f"{folder}: the token table has {rows} rows, and the tokenizer's highest id is"
            f" {highest}: it is the tokenizer of another model, or the table was not extended"
        )
