"""Durable files: content, digest, exclusivity, atomic replacement."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from megamuon.checkpoint import files
from megamuon.checkpoint.files import encode_json, hash_file, replace_text, write_durably


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
