"""Folders that another program wrote, as a run meets them in ``--load``.

Owns what a folder without a checkpoint of ours is: a Hugging Face folder, other weights, or nothing
but logs; the flags that a Hugging Face folder stands for; and the tokenizer's copy beside a run's
checkpoints.  Invariant: weights that cannot be loaded are never passed over in silence.  Tested by
``tests/training/test_folders.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamuon.arguments import Config, specs_by_dest
from megamuon.checkpoint import CheckpointError, Ranks
from megamuon.checkpoint.manifest import MANIFEST
from megamuon.checkpoint.retention import is_work
from megamuon.checkpoint.tracker import TRACKER
from megamuon.conversion import flags_from_config, model_type_of, read_config
from megamuon.conversion.folder_files import TOKENIZER, copy_tokenizer, tokenizer_files
from megamuon.conversion.hf_index import weight_files
from megamuon.training.failures import TrainingError

# Files that hold weights, ours or another program's; .bin beside an .idx is a corpus.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".h5", ".msgpack", ".gguf")


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder without checkpoints of ours has a ``config.json`` that names a model type.

    Raises ConversionError where that cannot be read.
    """
    return not (folder / TRACKER).exists() and model_type_of(folder) is not None


def other_weights(folder: Path) -> str | None:
    """A file with weights in a folder that has no tracker, in it or one folder below; None where
    there are none.  Our own checkpoints and unfinished saves do not count.
    """
    if not folder.is_dir():
        return None
    for entry in sorted(folder.iterdir()):
        if entry.is_file() and _has_weights(entry):
            return entry.name
        if entry.is_dir() and not is_work(entry.name) and not (entry / MANIFEST).exists():
            for inner in sorted(entry.iterdir()):
                if inner.is_file() and _has_weights(inner):
                    return f"{entry.name}/{inner.name}"
    return None


def _has_weights(path: Path) -> bool:
    corpus = path.suffix == ".bin" and path.with_suffix(".idx").exists()
    return (path.suffix in WEIGHTS and not corpus) or path.name == ".metadata"


def read_folder_args(place: str) -> dict[str, dict[str, Any]] | None:
    """Model and tokenizer flags of a Hugging Face folder, nested by component; None where ``place``
    is none.  Raises ValueError with one line.
    """
    folder = Path(place)
    try:
        if not is_hugging_face(folder):
            return None
        if weight_files(folder) is None:
            raise ValueError(f"{folder}: a config.json of a model, and no weights")
        values = flags_from_config(read_config(folder), folder)
    except (CheckpointError, OSError) as error:
        raise ValueError(str(error)) from error
    if tokenizer_files(folder):
        values.update(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=place)
    nested: dict[str, dict[str, Any]] = {"model": {}, "tokenizer": {}}
    for dest, value in values.items():
        nested[specs_by_dest()[dest].component][dest] = value
    return nested


def keep_tokenizer(config: Config, ranks: Ranks) -> Mapping[str, str]:
    """Copy the tokenizer's files to ``<save>/tokenizer/``, where the run has a folder of them;
    SHA-256 by name.  A collective.  Raises TrainingError where other files lie there.
    """
    save, flags = config.checkpoint.save, config.tokenizer
    if save is None or config.training.skip_train or flags.tokenizer_model is None:
        return {}
    if flags.tokenizer_type != "HuggingFaceTokenizer":
        return {}
    path = Path(flags.tokenizer_model)
    folder = path if path.is_dir() else path.parent

    def copy() -> dict[str, str]:
        try:
            return copy_tokenizer(folder, Path(save) / TOKENIZER)
        except CheckpointError as error:
            raise TrainingError(str(error)) from error

    return ranks.first("keep the tokenizer", copy)
