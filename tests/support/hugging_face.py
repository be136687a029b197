"""A small tokenizer for a Hugging Face folder, and changes of its config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_tokenizer(folder: Path, tokens: int = 257) -> list[str]:
    """Write a tokenizer of single bytes and an end of text; the names of its files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(alphabet)}
    words |= {f"<extra{number}>": number for number in range(len(words), tokens - 1)}
    words["<|endoftext|>"] = tokens - 1
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return ["tokenizer.json", "tokenizer_config.json"]


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Apply ``change(config)`` to the folder's ``config.json``."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
