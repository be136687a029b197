"""Durable files: content, digest, exclusivity, atomic replacement."""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamuon.checkpoint import files
from megamuon.checkpoint.files import encode_json, hash_file, replace_text, write_durably

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_is_hashed_while_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 7)
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), real(handle))[1])
    content = bytes(range(256)) * 3
    record = write_durably(tmp_path / "a", [content[:100], b"", memoryview(content)[100:]])
    assert (tmp_path / "a").read_bytes() == content
    assert record.size == len(content) and record.name == "a" and len(synced) == 1
    assert record.sha256 == hashlib.sha256(content).hexdigest() == hash_file(tmp_path / "a")


def test_a_file_is_never_written_twice(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", [b"1"])
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "a", [b"2"])


def test_a_replacement_that_fails_leaves_the_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_text(tmp_path / "t", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(tmp_path / "t", "new")
    assert (tmp_path / "t").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_json_keeps_what_is_not_finite_and_refuses_what_is_no_json() -> None:
    assert encode_json({"loss": float("nan")}) == b'{\n "loss": NaN\n}\n'
    with pytest.raises(TypeError):
        encode_json({"path": Path("x")})


def hash_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "checkpoint-hash" in thread.name]


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 7 * 100, 7 * 100 + 1])
def test_any_size_is_hashed_whole_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(files, "CHUNK", 7)
    content = random.Random(size).randbytes(size)
    cuts = [0, *sorted(random.Random(size).choices(range(size + 1), k=5)), size]
    blocks = [memoryview(content)[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    record = write_durably(tmp_path / "a", blocks)
    assert (tmp_path / "a").read_bytes() == content and record.size == size
    assert record.sha256 == hashlib.sha256(content).hexdigest()
    assert hash_threads() == []


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(io.FileIO):
        def write(self, data: memoryview) -> int:
            return super().write(data[:3])

    monkeypatch.setattr(files, "open", lambda path, mode, buffering: Short(path, mode), False)
    record = write_durably(tmp_path / "a", [b"0123456789"])
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert record.sha256 == hashlib.sha256(b"0123456789").hexdigest()


def test_what_fails_is_raised_and_no_thread_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"x" * 100
        raise ValueError("the tensor is gone")

    with pytest.raises(ValueError, match="the tensor is gone"):
        write_durably(tmp_path / "a", blocks())
    assert hash_threads() == []

    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        write_durably(tmp_path / "b", [b"x" * 100])
    assert hash_threads() == []


def test_a_hash_that_fails_is_an_error_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def update(self, _: memoryview) -> None:
            raise MemoryError("no memory to hash with")

    monkeypatch.setattr(files, "CHUNK", 7)
    monkeypatch.setattr(hashlib, "sha256", Broken)
    with pytest.raises(MemoryError, match="no memory to hash with"):
        write_durably(tmp_path / "a", [bytes(7 * files.AHEAD * 10)])
    assert hash_threads() == []


def test_a_file_can_be_written_when_the_main_thread_has_ended(tmp_path: Path) -> None:
    """As the last asynchronous save of a run is: pools and daemons would take no part then."""
    code = (
        "import pathlib, sys, threading\n"
        "from megamuon.checkpoint.files import write_durably\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    write_durably(pathlib.Path(sys.argv[1]), [bytes(20_000_000)])\n"
        "threading.Thread(target=late).start()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "late")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "late").read_bytes() == bytes(20_000_000)
