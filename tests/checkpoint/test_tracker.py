"""The tracker file: what is read, what is refused, and that a replacement is atomic."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megamuon.checkpoint.ranks import CheckpointError
from megamuon.checkpoint.tracker import (
    TRACKER,
    directory_name,
    find_checkpoint,
    iterations,
    read_tracker,
    write_tracker,
)


def test_names_are_megatrons() -> None:
    assert TRACKER == "latest_checkpointed_iteration.txt"
    assert directory_name(100) == "iter_0000100"
    assert directory_name(12_345_678) == "iter_12345678"
    assert directory_name("release") == "release"
    with pytest.raises(ValueError, match="-1"):
        directory_name(-1)


@pytest.mark.parametrize(("text", "value"), [("100", 100), ("7\n", 7), ("release", "release")])
def test_a_tracker_is_read(tmp_path: Path, text: str, value: object) -> None:
    (tmp_path / TRACKER).write_text(text)
    assert read_tracker(tmp_path) == value


@pytest.mark.parametrize("content", [b"", b"  \n", b"12x", b"-3", b"\xff\x00", "²".encode()])
def test_a_broken_tracker_is_an_error_with_file_and_content(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TRACKER).write_bytes(content)
    (tmp_path / "iter_0000040").mkdir()
    with pytest.raises(CheckpointError) as caught:
        read_tracker(tmp_path)
    shown = content.decode("utf-8", errors="replace").strip()
    assert TRACKER in str(caught.value) and repr(shown) in str(caught.value)
    assert "present: 40" in str(caught.value) and "--ckpt-step" in str(caught.value)


def test_a_write_has_no_newline_and_replaces_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tracker(tmp_path, 100)
    assert (tmp_path / TRACKER).read_bytes() == b"100"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_tracker(tmp_path, 200)
    assert (tmp_path / TRACKER).read_bytes() == b"100"
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER]


def test_the_checkpoint_to_load(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "nowhere") is None
    for number in (5, 10):
        (tmp_path / directory_name(number)).mkdir()
    write_tracker(tmp_path, 10)
    assert iterations(tmp_path) == [5, 10]
    assert find_checkpoint(tmp_path) == 10
    assert find_checkpoint(tmp_path, step=5) == 5
    with pytest.raises(CheckpointError, match=r"--ckpt-step names 7.*present: 5, 10"):
        find_checkpoint(tmp_path, step=7)
    write_tracker(tmp_path, 15)
    with pytest.raises(CheckpointError, match=r"names 15.*iter_0000015 does not exist"):
        find_checkpoint(tmp_path)
