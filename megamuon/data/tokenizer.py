"""Tokenizers behind one small protocol.

Owns ``Tokenizer`` (what the data room, the loop and the tools ask of a tokenizer) and its
implementations: bytes, Hugging Face (a ``tokenizer.json`` or a directory), GPT-2 byte-pair files,
SentencePiece and null. Invariants: every id that ``encode`` returns is below ``vocab_size``;
``encode`` adds no special tokens (the end-of-document id is the writer's business); ``identity``
depends on the tokenizer's contents, never on where it lies, so that caches keyed by it survive a
move. Libraries are imported on first use, with an error that names the package. Tested by
``tests/data_room/test_tokenizer.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megamuon.data.special_tokens import (
    EOD_HELP,
    ROLES,
    NamedTokens,
    find_eod,
    read_named_tokens,
    transformers_id,
)


@runtime_checkable
class Tokenizer(Protocol):
    """What a tokenizer offers: ids are ints in ``[0, vocab_size)``; ``pad``, ``bos`` and ``eos``
    may be None.
    """

    name: str
    vocab_size: int
    eod: int
    pad: int | None
    bos: int | None
    eos: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without special tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``."""
        ...

    def identity(self) -> dict[str, Any]:
        """JSON-able facts that tell this tokenizer from every other, for cache keys."""
        ...


class ByteTokenizer:
    """The 256 byte values of UTF-8, and 256 as end of document."""

    def __init__(self) -> None:
        self.name = "byte"
        self.vocab_size = 257
        self.eod = 256
        self.pad: int | None = None
        self.bos: int | None = None
        self.eos: int | None = 256

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes; a lone surrogate becomes ``?``, not an error amid a corpus."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> NDArray[np.uint8]:
        """The same as an array, (bytes,), for whole corpora."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Ids above 255 (end of document, rows that pad the vocabulary) are skipped."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def identity(self) -> dict[str, Any]:
        return {"class": "ByteTokenizer", "vocab_size": self.vocab_size, "eod": self.eod}


class NullTokenizer:
    """Text that already is ids, separated by spaces; end of document is the id ``vocab_size`` of
    the flag.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"--vocab-size {vocab_size}: NullTokenizer needs at least 1")
        self.name = "NullTokenizer"
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size
        self.pad: int | None = None
        self.bos: int | None = None
        self.eos: int | None = vocab_size

    def encode(self, text: str) -> list[int]:
        ids = [int(word) for word in text.split()]
        for index in ids:
            if not 0 <= index < self.vocab_size:
                raise ValueError(
                    f"NullTokenizer: id {index} is outside [0, {self.vocab_size}); raise "
                    "--vocab-size"
                )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids)

    def identity(self) -> dict[str, Any]:
        return {"class": "NullTokenizer", "vocab_size": self.vocab_size, "eod": self.eod}


class FastTokenizer:
    """A tokenizer of the ``tokenizers`` library; special tokens come from the files beside it."""

    def __init__(
        self, name: str, core: Any, named: NamedTokens, *, source: str, eod_token: str | None
    ) -> None:
        self.name = name
        self._core = core
        named.add_to(core)
        vocabulary = core.get_vocab(with_added_tokens=True)
        # Ids may have holes, so the count of tokens is not a bound on them.
        self.vocab_size = max(len(vocabulary), max(vocabulary.values(), default=-1) + 1)
        self.bos, self.eos, self.pad = named.find_all(vocabulary, eod_token)
        self.eod = find_eod(vocabulary, self.eos, eod_token, source)
        self._keep_whole(source, eod_token)
        self._hash = hashlib.sha256(core.to_str().encode()).hexdigest()

    def _keep_whole(self, source: str, eod_token: str | None) -> None:
        """Special tokens of the vocabulary are one id in texts too, as in their authors' code."""
        special = [index for index in (self.eod, self.eos, self.bos, self.pad) if index is not None]
        texts = list(dict.fromkeys(self._core.id_to_token(index) for index in special))
        split = [text for text in texts if len(self.encode(text)) != 1]
        if split:
            self._core.add_special_tokens(split)
        token = self._core.id_to_token(self.eod)
        if self.encode(token) != [self.eod]:
            flag = f"--eod-token {eod_token!r}: " if eod_token is not None else ""
            raise ValueError(
                f"{flag}{source}: the end-of-document token {token!r} (id {self.eod}) is encoded "
                f"as {self.encode(token)}; {EOD_HELP}"
            )

    def encode(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        # Rows that pad the vocabulary have no token; a sampled one must not be an error.
        return self._core.decode(
            [i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=False
        )

    def identity(self) -> dict[str, Any]:
        specials = {"eod": self.eod, "bos": self.bos, "eos": self.eos, "pad": self.pad}
        return {
            "class": "FastTokenizer",
            "sha256": self._hash,
            "vocab_size": self.vocab_size,
        } | specials


class TransformersTokenizer:
    """A local directory that only ``transformers.AutoTokenizer`` can read."""

    def __init__(self, path: Path, *, eod_token: str | None, trust_remote_code: bool) -> None:
        transformers = _library(
            "transformers", "transformers", "--tokenizer-type HuggingFaceTokenizer"
        )
        try:
            core = transformers.AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # whatever the code of a tokenizer's class raises
            first = " ".join(str(error).split())[:500] or type(error).__name__
            raise ValueError(
                f"--tokenizer-model {path}: no tokenizer can be read there ({first})"
            ) from error
        self.name = "HuggingFaceTokenizer"
        self._core = core
        vocabulary = core.get_vocab()
        self.vocab_size = max(len(core), max(vocabulary.values(), default=-1) + 1)
        self.bos, self.eos, self.pad = (
            transformers_id(core, role, vocabulary, str(path)) for role in ROLES
        )
        self.eod = find_eod(vocabulary, self.eos, eod_token, str(path))
        self._hash = _hash_json(sorted(vocabulary.items(), key=lambda pair: pair[1]))

    def encode(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        return self._core.decode([i for i in ids if 0 <= i < self.vocab_size])

    def identity(self) -> dict[str, Any]:
        kind = type(self._core).__name__
        specials = {"eod": self.eod, "bos": self.bos, "eos": self.eos, "pad": self.pad}
        return {"class": kind, "sha256": self._hash, "vocab_size": self.vocab_size} | specials


class SentencePieceTokenizer:
    """A SentencePiece ``.model`` file; end of document is its ``</s>``."""

    def __init__(self, path: Path, *, eod_token: str | None) -> None:
        library = _library(
            "sentencepiece", "sentencepiece", "--tokenizer-type SentencePieceTokenizer"
        )
        if not path.is_file():
            raise FileNotFoundError(f"--tokenizer-model {path}: no such SentencePiece model file")
        content = path.read_bytes()
        try:
            self._core = library.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError, OSError) as error:
            raise ValueError(
                f"--tokenizer-model {path}: not a SentencePiece model ({error})"
            ) from error
        core = self._core
        self.name = "SentencePieceTokenizer"
        self.vocab_size = int(core.get_piece_size())
        self.bos, self.eos, self.pad = (
            _absent(i()) for i in (core.bos_id, core.eos_id, core.pad_id)
        )
        vocabulary = {core.id_to_piece(i): i for i in range(self.vocab_size)}
        self.eod = find_eod(vocabulary, self.eos, eod_token, str(path))
        self._hash = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._core.encode(text, out_type=int)

    def decode(self, ids: Iterable[int]) -> str:
        return self._core.decode([int(i) for i in ids if 0 <= i < self.vocab_size])

    def identity(self) -> dict[str, Any]:
        return {"class": "SentencePieceTokenizer", "sha256": self._hash, "eod": self.eod}


TOKENIZER_TYPES = (
    "byte",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
)


def build_tokenizer(
    tokenizer_type: str | None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    eod_token: str | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Build the tokenizer that the flags describe; every error names the flag to change.

    Raises ValueError for a missing or contradictory flag, FileNotFoundError for a missing file and
    ImportError for a missing library. The types are Megatron-LM's names, and ``byte``.
    """
    if tokenizer_type is None:
        raise ValueError(f"--tokenizer-type is required; one of {', '.join(TOKENIZER_TYPES)}")
    if tokenizer_type == "byte":
        return ByteTokenizer()
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(vocab_size)
    if tokenizer_type == "GPT2BPETokenizer":
        return _gpt2(vocab_file, merge_file, eod_token)
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type}: not one of {', '.join(TOKENIZER_TYPES)}"
        )
    if tokenizer_model is None:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} needs --tokenizer-model (a local path)"
        )
    path = Path(tokenizer_model)
    if tokenizer_type in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        return SentencePieceTokenizer(path, eod_token=eod_token)
    return _hugging_face(path, eod_token, trust_remote_code)


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int = 1) -> int:
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel`` (Megatron-LM's
    formula).
    """
    if vocab_size < 1 or divisible_by < 1 or tensor_parallel < 1:
        raise ValueError(
            f"vocabulary {vocab_size}, --make-vocab-size-divisible-by {divisible_by} and "
            f"tensor-parallel size {tensor_parallel} must all be at least 1"
        )
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def pad_id(tokenizer: Tokenizer, *, allow_ambiguous: bool = False) -> int:
    """The id that marks padding in items, or -1 (no token) where there is none or it means
    something else too.

    Source: Megatron-LM's GPT dataset. A pad that doubles as end of document would mask real
    targets.
    """
    if tokenizer.pad is None:
        return -1
    specials = {tokenizer.eod, tokenizer.bos, tokenizer.eos}
    if tokenizer.pad in specials and not allow_ambiguous:
        return -1
    return tokenizer.pad


def _hugging_face(path: Path, eod_token: str | None, trust_remote_code: bool) -> Tokenizer:
    if not path.exists():
        raise FileNotFoundError(
            f"--tokenizer-model {path}: no such file or directory (models are read locally)"
        )
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return TransformersTokenizer(path, eod_token=eod_token, trust_remote_code=trust_remote_code)
    library = _library("tokenizers", "tokenizers", "--tokenizer-type HuggingFaceTokenizer")
    try:
        core = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every parse error
        raise ValueError(f"--tokenizer-model {file}: not a tokenizer.json ({error})") from error
    # A stored post-processing length would silently cut or pad documents.
    core.no_truncation()
    core.no_padding()
    named = read_named_tokens(file.parent)
    return FastTokenizer("HuggingFaceTokenizer", core, named, source=str(file), eod_token=eod_token)


def _gpt2(vocab_file: str | None, merge_file: str | None, eod_token: str | None) -> Tokenizer:
    if vocab_file is None or merge_file is None:
        raise ValueError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
    for flag, name in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if not Path(name).is_file():
            raise FileNotFoundError(f"{flag} {name}: no such file")
    library = _library("tokenizers", "tokenizers", "--tokenizer-type GPT2BPETokenizer")
    try:
        core = library.ByteLevelBPETokenizer(vocab_file, merge_file, add_prefix_space=False)
    except Exception as error:  # the library raises bare Exception for every parse error
        raise ValueError(
            f"--vocab-file {vocab_file} and --merge-file {merge_file}: not a vocab.json and a"
            f" merges.txt ({error})"
        ) from error
    # The two files have no field for it: GPT-2's own code knows the name.
    known = core.token_to_id("<|endoftext|>") is not None
    named = NamedTokens(tokens={"eos_token": ("<|endoftext|>", vocab_file)} if known else {})
    return FastTokenizer("GPT2BPETokenizer", core, named, source=vocab_file, eod_token=eod_token)


def _library(module: str, package: str, flag: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{flag} needs the package {package!r}: pip install {package}") from error


def _absent(index: int) -> int | None:
    return index if index >= 0 else None


def _hash_json(content: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
