"""Raw text to token ids: finding documents, cutting the input into chunks, encoding a chunk.

Owns the input side of ``tools/preprocess_data.py``. Invariants: the chunks, and so the bytes that
are written, depend on the input, the tokenizer and the options alone, not on the number of workers;
a line that cannot be used is an error that names file and line. Tested by
``tests/tools/test_preprocess_data.py``.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamuon.data.indexed import writer_dtype
from megamuon.data.tokenizer import ByteTokenizer, Tokenizer

CHUNK_BYTES = 1 << 20
_JSON_SUFFIXES = (".jsonl", ".json")
TEXT_KEY = "text"


class CorpusError(ValueError):
    """Input that cannot be made into a dataset."""


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """What to read and how to encode it.

    In directories, only files with one of ``suffixes`` are read (empty: all files), and directories
    named in ``excluded`` are left out.
    """

    json_keys: tuple[str, ...] = (TEXT_KEY,)
    suffixes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    append_eod: bool = False
    workers: int = 1
    partitions: int = 1


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Work of one worker: lines of a JSON Lines file (numbered from ``first_line``), or whole text
    files.
    """

    file: str = ""
    first_line: int = 1
    lines: tuple[bytes, ...] = ()
    text_files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Per JSON key, the documents of a chunk: ids back to back, and the length of each (0: empty
    document).
    """

    ids: dict[str, NDArray[Any]]
    lengths: dict[str, list[int]]
    text_bytes: int


def find_files(inputs: Sequence[str], options: CorpusOptions) -> tuple[list[str], list[str]]:
    """JSON Lines files and text files that the inputs name, sorted inside each input.

    A named file or pattern is JSON Lines if it ends in .jsonl or .json (.gz aside), and text
    otherwise; in a directory only .jsonl counts, since a tree of sources holds .json files of every
    kind.
    """
    lines: list[str] = []
    texts: list[str] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            for file in _walk(path, options):
                plain = file.removesuffix(".gz")
                (lines if plain.endswith(".jsonl") else texts).append(file)
            continue
        found = (
            [name] if path.is_file() else sorted(p for p in glob.glob(name) if Path(p).is_file())
        )
        if not found:
            raise CorpusError(f"--input {name}: no such file, directory or pattern")
        for file in found:
            plain = file.removesuffix(".gz")
            (lines if plain.endswith(_JSON_SUFFIXES) else texts).append(file)
    if not lines and not texts:
        wanted = f" ending in {', '.join(options.suffixes)}" if options.suffixes else ""
        raise CorpusError(f"--input {' '.join(inputs)}: empty corpus, no files{wanted}")
    return lines, texts


def _walk(directory: Path, options: CorpusOptions) -> list[str]:
    found: list[str] = []
    for root, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if name not in options.excluded]
        for name in files:
            if not options.suffixes or name.removesuffix(".gz").endswith(options.suffixes):
                found.append(os.path.join(root, name))
    return sorted(file for file in found if os.path.isfile(file))


def chunks(lines: Sequence[str], texts: Sequence[str]) -> Iterator[Chunk]:
    """The input in pieces of about CHUNK_BYTES, JSON Lines first; the cuts do not depend on the
    workers.
    """
    for file in lines:
        yield from _line_chunks(file)
    group: list[str] = []
    size = 0
    for file in texts:
        group.append(file)
        size += Path(file).stat().st_size
        if size >= CHUNK_BYTES:
            yield Chunk(text_files=tuple(group))
            group, size = [], 0
    if group:
        yield Chunk(text_files=tuple(group))


def _line_chunks(file: str) -> Iterator[Chunk]:
    part: list[bytes] = []
    size, first = 0, 1
    with _open(file) as stream:
        try:
            for number, line in enumerate(stream, start=1):
                part.append(line)
                size += len(line)
                if size >= CHUNK_BYTES:
                    yield Chunk(file=file, first_line=first, lines=tuple(part))
                    part, size, first = [], 0, number + 1
        except (EOFError, gzip.BadGzipFile) as error:
            raise CorpusError(
                f"{file}: damaged after line {first + len(part) - 1} ({error})"
            ) from error
    if part:
        yield Chunk(file=file, first_line=first, lines=tuple(part))


def _open(file: str) -> Any:
    try:
        return gzip.open(file, "rb") if file.endswith(".gz") else Path(file).open("rb")
    except OSError as error:
        raise CorpusError(f"{file}: cannot be read ({error.strerror})") from error


class Encoder:
    """Encode chunks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, options: CorpusOptions) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.dtype = writer_dtype(tokenizer.vocab_size)
        self._eod = np.asarray([tokenizer.eod], dtype=self.dtype)

    def __call__(self, chunk: Chunk) -> Encoded:
        """Ids and lengths of every document.  Raises CorpusError naming file and line."""
        keys = self.options.json_keys if chunk.lines else (TEXT_KEY,)
        ids: dict[str, list[NDArray[Any]]] = {key: [] for key in keys}
        lengths: dict[str, list[int]] = {key: [] for key in keys}
        text_bytes = 0
        for place, texts, size in self._documents(chunk):
            text_bytes += size
            for key, text in texts.items():
                document = self._encode(place, text)
                size_with_eod = document.size
                ids[key].append(document)
                if document.size and self.options.append_eod:
                    ids[key].append(self._eod)
                    size_with_eod += 1
                lengths[key].append(size_with_eod)
        nothing = np.empty(0, dtype=self.dtype)
        arrays = {key: np.concatenate([nothing, *parts]) for key, parts in ids.items()}
        return Encoded(ids=arrays, lengths=lengths, text_bytes=text_bytes)

    def _encode(self, place: str, text: str) -> NDArray[Any]:
        try:
            if isinstance(self.tokenizer, ByteTokenizer):  # no list of Python ints for every byte
                return self.tokenizer.encode_array(text).astype(self.dtype)
            return np.asarray(self.tokenizer.encode(text), dtype=self.dtype)
        except ValueError as error:
            raise CorpusError(f"{place}: {error}") from error

    def _documents(self, chunk: Chunk) -> Iterator[tuple[str, dict[str, str], int]]:
        for offset, line in enumerate(chunk.lines):
            if line.strip():
                place = f"{chunk.file}:{chunk.first_line + offset}"
                yield place, self._fields(place, line), len(line)
        for file in chunk.text_files:
            with _open(file) as stream:
                try:
                    content = stream.read()
                except (OSError, EOFError) as error:
                    raise CorpusError(f"{file}: cannot be read ({error})") from error
            yield file, {TEXT_KEY: content.decode("utf-8", errors="replace")}, len(content)

    def _fields(self, place: str, line: bytes) -> dict[str, str]:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CorpusError(f"{place}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise CorpusError(f"{place}: expected a JSON object, got {type(record).__name__}")
        for key in self.options.json_keys:
            if not isinstance(record.get(key), str):
                kind = type(record[key]).__name__ if key in record else "missing"
                raise CorpusError(f"{place}: key {key!r} is {kind}, expected text; see --json-keys")
        return {key: record[key] for key in self.options.json_keys}
