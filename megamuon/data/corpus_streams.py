"""Reading the bytes of a corpus: compression by content, damage by name, foreign files by kind.

Owns ``open_input`` and the list of what is no text. Invariant: whatever a library of compression
raises, the caller sees a CorpusError that names the file; a file that ends in the middle of its
compressed data is damaged, never short. Tested by ``tests/tools/test_preprocess_kinds.py``.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class CorpusError(ValueError):
    """Input that cannot be made into a dataset."""


# How compressed data begins, and what it is called.
_MAGIC = (
    (b"\x1f\x8b\x08", "gzip"),
    *((b"BZh%d1AY&SY" % level, "bzip2") for level in range(1, 10)),
    *((b"BZh%d\x17\x72\x45\x38\x50\x90" % level, "bzip2") for level in range(1, 10)),  # empty
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x5d\x00\x00", "xz"),  # the older .lzma
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
COMPRESSED = (".gz", ".gzip", ".bz2", ".xz", ".lzma", ".zst", ".zstd")
# Suffixes of compressed data that cannot be told by content, or not be read here.
_UNREADABLE = (".br", ".lz4", ".lzo", ".z", ".sz", ".snappy", ".zip", ".7z", ".rar", ".tar", ".tgz")

_FOREIGN = (
    (b"\x93NUMPY", "a NumPy array"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"MMIDIDX", "the index of a dataset"),
    (b"%PDF-", "a PDF file"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x04\x22\x4d\x18", "compressed by lz4"),
    (b"\x28\xb5\x2f\xfd", "compressed twice"),
    (b"\x1f\x8b", "compressed twice"),
    (b"\xff\xfe\x00\x00", "UTF-32 text"),
    (b"\x00\x00\xfe\xff", "UTF-32 text"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
)
_CONTROLS = bytes({*range(1, 32), 127} - {*b"\b\t\n\v\f\r\x1b"})
_CONTROL_SHARE = 50  # text has fewer than one control character in as many bytes; noise has ten


class InputStream:
    """The decompressed bytes of a file, from the start, once; looking ahead does not move it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._buffered = io.BufferedReader(stream, 1 << 20) if _raw(stream) else stream
        self._ahead = b""

    def peek_bytes(self, size: int) -> bytes:
        """Up to ``size`` bytes that will be read again."""
        while len(self._ahead) < size:
            more = self._buffered.read(size - len(self._ahead))
            if not more:
                break
            self._ahead += more
        return self._ahead[:size]

    def first_lines(self, count: int, limit: int) -> list[bytes]:
        """The first ``count`` lines that are not blank; none from one longer than ``limit`` on.
        What is read here is not read again.
        """
        lines: list[bytes] = []
        for line in self._lines(limit):
            if len(line) >= limit:
                break
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                lines.append(line)
            if len(lines) == count:
                break
        return lines

    def _lines(self, limit: int) -> Iterator[bytes]:
        rest = self._ahead
        self._ahead = b""
        whole, newline, tail = rest.rpartition(b"\n")
        if newline:
            yield from (line + b"\n" for line in whole.split(b"\n"))
        first = True
        while True:
            line = self._buffered.readline(limit)
            if first:
                line, first = tail + line, False
            if not line:
                return
            yield line

    def __iter__(self) -> Iterator[bytes]:
        yield from self._lines(-1)

    def read(self) -> bytes:
        """All of it."""
        ahead, self._ahead = self._ahead, b""
        return ahead + self._buffered.read()


def _raw(stream: IO[bytes]) -> bool:
    return isinstance(stream, io.RawIOBase)


@contextlib.contextmanager
def open_input(path: str) -> Iterator[tuple[InputStream, str]]:
    """The decompressed stream of a file and the name of its compression ("" for none).

    Raises CorpusError, naming the file, for what cannot be opened, and inside the block for what
    cannot be read.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
            head = file.read(16)
            file.seek(0)
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read ({error.strerror})") from error
        name = next((name for magic, name in _MAGIC if head.startswith(magic)), "")
        stream = _decompressed(path, file, name)
        try:
            yield InputStream(stream), name
        except CorpusError:
            raise
        except damage() as error:
            raise CorpusError(
                f"{path}: {'damaged' if name else 'cannot be read'} ({first_line(error)})"
            ) from error


def _decompressed(path: str, file: IO[bytes], name: str) -> IO[bytes]:
    if name == "gzip":
        return gzip.GzipFile(fileobj=file)
    if name == "bzip2":
        return bz2.BZ2File(file)
    if name == "xz":
        return lzma.LZMAFile(file)
    if name == "zstd":
        return _ZstdReader(file, _zstd_decompressor(path))
    return file


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def damage() -> tuple[type[Exception], ...]:
    """What libraries raise for data that is not theirs, or not whole."""
    found: list[type[Exception]] = [OSError, EOFError, zlib.error, lzma.LZMAError]
    for module in _ZSTD_MODULES:
        with contextlib.suppress(ImportError, AttributeError):
            found.append(importlib.import_module(module).ZstdError)
    return tuple(found)


_ZSTD_MODULES = ("compression.zstd", "backports.zstd", "zstandard")


def _zstd_decompressor(path: str) -> Any:
    """A function that makes a decompressor of one frame, from whatever module there is."""
    for name in _ZSTD_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if name == "zstandard":
            return lambda: module.ZstdDecompressor().decompressobj()
        return module.ZstdDecompressor
    raise CorpusError(
        f"{path}: compressed by zstd, which this Python cannot read: pip install zstandard"
        " (Python 3.14 reads it by itself), or unpack the file"
    )


class _ZstdReader(io.RawIOBase):
    """All frames of a file, one after the other; an unfinished one is an error."""

    def __init__(self, file: IO[bytes], make: Any) -> None:
        super().__init__()
        self._file, self._make = file, make
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._file.read(1 << 18)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            if self._frame is None:
                self._frame = self._make()
            self._output = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        part = self._output[: len(buffer)]
        self._output = self._output[len(part) :]
        buffer[: len(part)] = part
        return len(part)


def foreign_kind(path: str, head: bytes) -> str | None:
    """What a file is that is no text, from its first decompressed bytes; None for text."""
    known = next((kind for magic, kind in _FOREIGN if head.startswith(magic)), None)
    if known is not None:
        return known
    if head[257:262] == b"ustar":
        return "a tar archive"
    suffix = Path(path).suffix.lower()
    if suffix in _UNREADABLE:
        return f"compressed or packed ({suffix})"
    if b"\0" in head:
        return "binary data"
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if controls * _CONTROL_SHARE > len(head):
        return "binary data"
    return None
