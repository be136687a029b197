"""Directories: publish, replace, restore, clean, retain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megamuon.checkpoint.manifest import write_manifest
from megamuon.checkpoint.retention import (
    clean_stale,
    make_partial,
    publish,
    restore_replaced,
    retain,
)


def _made(directory: Path, name: str, text: str = "") -> Path:
    (directory / name).mkdir()
    (directory / name / "content").write_text(text)
    return directory / name


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_publishing_replaces_an_older_directory_of_that_name(tmp_path: Path) -> None:
    final = _made(tmp_path, "iter_0000001", "old")
    partial = make_partial(tmp_path, 1)
    (partial / "content").write_text("new")
    publish(partial, final)
    assert _names(tmp_path) == ["iter_0000001"]
    assert (final / "content").read_text() == "new"


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_replacement_cut_at_any_rename_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    final = _made(tmp_path, "iter_0000001", "old")
    partial = make_partial(tmp_path, 1)
    (partial / "content").write_text("new")
    real, left = os.rename, [renames]

    def rename(source: Path, target: Path) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr("megamuon.checkpoint.retention.remove", lambda path: None)
        try:
            publish(partial, final)
        except KeyboardInterrupt:
            assert renames < 2
    restore_replaced(tmp_path)
    assert (final / "content").read_text() == ("new" if renames == 2 else "old")
    clean_stale(tmp_path)
    assert _names(tmp_path) == ["iter_0000001"]


def test_cleaning_touches_nothing_else(tmp_path: Path) -> None:
    _made(tmp_path, "iter_0000002")
    _made(tmp_path, "iter_0000003.partial-0a1b2c3d")
    _made(tmp_path, "iter_0000001.deleted-0a1b2c3d")
    _made(tmp_path, "release.replaced-0a1b2c3d", "kept")
    _made(tmp_path, "my.partial-notes")
    (tmp_path / "progress.txt").touch()
    clean_stale(tmp_path)
    assert _names(tmp_path) == ["iter_0000002", "my.partial-notes", "progress.txt", "release"]
    clean_stale(tmp_path / "nowhere")


def test_retention_deletes_the_previous_unless_multiple_link_or_release(tmp_path: Path) -> None:
    for number in (100, 150, 200, 250):
        _made(tmp_path, f"iter_{number:07d}")
    (tmp_path / "iter_0000350").symlink_to(tmp_path / "iter_0000250")
    retain(tmp_path, [150], 200, None)
    retain(tmp_path, [], 100, 100)
    retain(tmp_path, ["release"], 100, 100)
    retain(tmp_path, [100], 150, 100)
    retain(tmp_path, [150], 150, 100)
    retain(tmp_path, [350], 400, 100)
    retain(tmp_path, [175], 200, 100)  # already gone
    retain(tmp_path, [150], 200, 100, run="another")
    assert len(_names(tmp_path)) == 5
    retain(tmp_path, [100, 150, 250], 200, 100)
    assert _names(tmp_path) == [f"iter_{n:07d}" for n in (100, 200, 350)]


def test_retention_deletes_only_what_the_same_run_saved(tmp_path: Path) -> None:
    for number, run in ((1, "a"), (2, "b"), (3, None)):
        write_manifest(_made(tmp_path, f"iter_{number:07d}"), number, 1, [], [], run=run)
    retain(tmp_path, [1, 2, 3], 4, 100, run="a")
    assert _names(tmp_path) == ["iter_0000002", "iter_0000003"]
