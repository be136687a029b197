"""Durable files: written, hashed and synced in one pass; JSON that survives a crash.

Owns the rules of writing: every byte is on the device before anything refers to it, and a file
that is replaced is at any instant either the old or the new one.  SHA-256 is taken while writing,
so that a checkpoint is not read again to be sealed.  Tested by
``tests/checkpoint/test_files.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 8 << 20  # bytes hashed and written at a time


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What the manifest knows of a file."""

    name: str
    size: int  # bytes
    sha256: str  # hex digest


def write_durably(path: Path, blocks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write ``blocks`` to a new file, hash them, and return once they are on the device.  Raises
    OSError.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for block in blocks:
            view = memoryview(block).cast("B")
            for start in range(0, len(view), CHUNK):
                part = view[start : start + CHUNK]
                digest.update(part)
                size += len(part)
                while len(part):  # an unbuffered write may be short
                    part = part[file.write(part) :]
        os.fsync(file.fileno())
    return FileRecord(name=path.name, size=size, sha256=digest.hexdigest())


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
