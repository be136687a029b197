"""Raw text to token ids: cutting the input into chunks, encoding a chunk.

Owns the input side of ``tools/preprocess_data.py`` but for which files there are
(``corpus_files.py``) and what their bytes are (``corpus_streams.py``). Invariants: the chunks, and
so the bytes that are written, depend on the input, the tokenizer and the options alone, not on the
number of workers; a line that cannot be used is an error that names file and line. Tested by
``tests/tools/test_preprocess_data.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamuon.data import corpus_files
from megamuon.data.corpus_files import Found
from megamuon.data.corpus_streams import CorpusError, damage, first_line, open_input
from megamuon.data.indexed import writer_dtype
from megamuon.data.tokenizer import ByteTokenizer, Tokenizer

CHUNK_BYTES = 1 << 20
TEXT_KEY = "text"


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """What to read and how to encode it.

    In directories, only files with one of ``suffixes`` are read (empty: all files), and files and
    directories whose names match one of ``excluded`` are left out.
    """

    json_keys: tuple[str, ...] = (TEXT_KEY,)
    suffixes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    append_eod: bool = False
    workers: int = 1
    partitions: int = 1


@dataclass(frozen=True)
class Chunk:
    """Work of one worker: lines of a JSON Lines file (numbered from ``first_line``), or whole text
    files.
    """

    file: str = ""
    first_line: int = 1
    lines: tuple[bytes, ...] = ()
    compression: str = ""  # of the file that the lines are from
    text_files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Per JSON key, the documents of a chunk: ids back to back, and the length of each (0: empty
    document). ``kinds`` counts documents by what they were read from, ``replaced`` those in which
    bytes that are not UTF-8 were replaced.
    """

    ids: dict[str, NDArray[Any]]
    lengths: dict[str, list[int]]
    text_bytes: int
    kinds: dict[str, int]
    replaced: int


def find_files(inputs: Sequence[str], options: CorpusOptions) -> Found:
    """The files of the corpus. Raises CorpusError for what cannot be one."""
    return corpus_files.find_files(inputs, options.json_keys, options.suffixes, options.excluded)


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
    with open_input(file) as (stream, compression):
        try:
            for number, line in enumerate(stream, start=1):
                part.append(line)
                size += len(line)
                if size >= CHUNK_BYTES:
                    yield Chunk(file, first, tuple(part), compression)
                    part, size, first = [], 0, number + 1
        except damage() as error:
            last = first + len(part) - 1
            raise CorpusError(
                f"{file}:{last}: damaged after this line ({first_line(error)})"
            ) from error
    if part:
        yield Chunk(file, first, tuple(part), compression)


@dataclass(frozen=True)
class _Document:
    """Where a document is, its texts by key, and what was read for it."""

    place: str
    texts: dict[str, str]
    size: int
    kind: str
    replaced: bool


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
        kinds: Counter[str] = Counter()
        text_bytes = replaced = 0
        for document in self._documents(chunk):
            text_bytes += document.size
            kinds[document.kind] += 1
            replaced += document.replaced
            for key, text in document.texts.items():
                encoded = self._encode(document.place, text)
                size_with_eod = encoded.size
                ids[key].append(encoded)
                if encoded.size and self.options.append_eod:
                    ids[key].append(self._eod)
                    size_with_eod += 1
                lengths[key].append(size_with_eod)
        nothing = np.empty(0, dtype=self.dtype)
        arrays = {key: np.concatenate([nothing, *parts]) for key, parts in ids.items()}
        return Encoded(
            ids=arrays,
            lengths=lengths,
            text_bytes=text_bytes,
            kinds=dict(kinds),
            replaced=replaced,
        )

    def _encode(self, place: str, text: str) -> NDArray[Any]:
        try:
            if isinstance(self.tokenizer, ByteTokenizer):  # no list of Python ints for every byte
                return self.tokenizer.encode_array(text).astype(self.dtype)
            ids = np.asarray(self.tokenizer.encode(text), dtype=np.int64)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library's Rust code is no Exception
            raise CorpusError(f"{place}: {_why_not(text, error)}") from error
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocab_size:
            raise CorpusError(
                f"{place}: ids {ids.min()}..{ids.max()}, but the tokenizer says that it has "
                f"{self.tokenizer.vocab_size}"
            )
        return ids.astype(self.dtype)

    def _documents(self, chunk: Chunk) -> Iterator[_Document]:
        for offset, line in enumerate(chunk.lines):
            if line.strip():
                place = f"{chunk.file}:{chunk.first_line + offset}"
                kind = _kind("JSON Lines", chunk.compression)
                yield _Document(place, self._fields(place, line), len(line), kind, False)
        for file in chunk.text_files:
            with open_input(file) as (stream, compression):
                content = stream.read().removeprefix(b"\xef\xbb\xbf")
            text = content.decode("utf-8", errors="replace")
            # A text may hold the mark of replacement itself: only then is it decoded again.
            replaced = "\ufffd" in text and not _is_utf8(content)
            kind = _kind("text", compression)
            yield _Document(file, {TEXT_KEY: text}, len(content), kind, replaced)

    def _fields(self, place: str, line: bytes) -> dict[str, str]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{place}: not JSON ({first_line(error)})") from error
        if not isinstance(record, dict):
            raise CorpusError(f"{place}: expected a JSON object, got {type(record).__name__}")
        for key in self.options.json_keys:
            if not isinstance(record.get(key), str):
                kind = type(record[key]).__name__ if key in record else "missing"
                raise CorpusError(f"{place}: key {key!r} is {kind}, expected text; see --json-keys")
        return {key: record[key] for key in self.options.json_keys}


def _kind(what: str, compression: str) -> str:
    return f"{what} ({compression})" if compression else what


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _why_not(text: str, error: BaseException) -> str:
    """Why a tokenizer cannot encode ``text``; libraries say little of what they were given."""
    if isinstance(error, MemoryError):
        return f"out of memory while {len(text)} characters were encoded"
    for place, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            return (
                f"character {place} is half of a surrogate pair (\\u{ord(character):04x}), "
                "which no tokenizer can encode; repair or drop the line"
            )
    if isinstance(error, ValueError):  # of our own tokenizers: it says what to change
        return first_line(error)
    return f"cannot be encoded ({type(error).__name__}: {first_line(error)})"
