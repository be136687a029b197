"""Durable files: written, hashed and synced in one pass; JSON that survives a crash.

Owns the rules of writing: every byte is on the device before anything refers to it, and a file
that is replaced is at any instant either the old or the new one.  SHA-256 is taken while writing,
in a second thread, so that a checkpoint is neither read again to be sealed nor slower for its
hash; what is hashed are the bytes that were handed over to be written.  Tested by
``tests/checkpoint/test_files.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

CHUNK = 1 << 20  # bytes hashed and written at a time: larger writes cost the kernel more a byte
AHEAD = 32  # chunks that may be written before they are hashed: bounds the memory that they hold


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What the manifest knows of a file."""

    name: str
    size: int  # bytes
    sha256: str  # hex digest


class _Hasher:
    """SHA-256 of what is handed over, in a thread: hashing and writing let go of Python's lock.

    A plain thread, not a pool's: an asynchronous save may run when the main thread has ended, and
    pools take no more work then.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._parts: queue.Queue[memoryview | None] = queue.Queue(AHEAD)
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-hash", daemon=True)
        self._thread.start()

    def update(self, part: memoryview) -> None:
        """Hash ``part`` soon; it must not change before ``close``."""
        self._parts.put(part)

    def close(self) -> None:
        """End the thread when it has hashed everything.  Always to be called."""
        self._parts.put(None)
        self._thread.join()

    def hexdigest(self) -> str:
        """Of everything, after ``close``.  Raises what went wrong in the thread."""
        if self._problem is not None:
            raise self._problem
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            try:
                self._digest.update(part)
            except BaseException as error:  # kept: who hands over must not wait for a dead thread
                self._problem = error
            del part  # else its whole tensor stays in memory until the next part comes


def _write_block(file: FileIO, view: memoryview, hasher: _Hasher) -> int:
    for start in range(0, len(view), CHUNK):
        part = view[start : start + CHUNK]
        hasher.update(part)
        while len(part):  # an unbuffered write may be short
            part = part[file.write(part) :]
    return len(view)


def write_durably(path: Path, blocks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write ``blocks`` to a new file, hash them, and return once they are on the device.  A block
    must not change before the return.  Raises OSError, and RuntimeError where no thread starts.
    """
    size = 0
    with open(path, "xb", buffering=0) as file:
        hasher = _Hasher()
        try:
            for block in blocks:
                size += _write_block(file, memoryview(block).cast("B"), hasher)
                del block  # or two of the largest tensors would be in memory at a time
            os.fsync(file.fileno())  # the last chunks are hashed meanwhile
        finally:
            hasher.close()
    return FileRecord(name=path.name, size=size, sha256=hasher.hexdigest())


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, hex.  Raises OSError."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sync_directory(path: Path) -> None:
    """Make the names inside ``path`` durable: a rename lives in its directory, not in the file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Make ``path`` and what is missing above it, durably: a new folder's name lives in the folder
    above, and files inside are lost with it.  Raises OSError.
    """
    missing = []
    folder = Path(os.path.abspath(path))
    while not folder.is_dir() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file atomically: a reader, or a restart after a crash, sees the old or the
    new text.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_durably(temporary, [text.encode()])
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def encode_json(value: Any) -> bytes:
    """Readable JSON, keys in the given order.  Raises TypeError for what JSON cannot say.

    Non-finite floats are kept (as NaN and Infinity, which Python reads back): a loss that is not
    a number must not cost the run its checkpoint.
    """
    return (json.dumps(value, indent=1) + "\n").encode()
