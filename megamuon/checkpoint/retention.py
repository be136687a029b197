"""Which directories exist under a save directory: publishing, replacing, retaining, cleaning.

Owns the renames that make a save atomic.  A directory under work is
``iter_0000100.partial-<nonce>``; one that is being replaced or deleted carries ``.replaced-`` or
``.deleted-``.  Invariant: whatever instant a run is killed at, every ``iter_N`` is complete, and
an ``iter_N`` that was being replaced exists as the old or the new one (``restore_replaced``
completes a replacement that was cut between its two renames).  It may run in several processes at
once, all other functions run on rank 0 only. Tested by ``tests/checkpoint/test_retention.py``.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from megamuon.checkpoint.files import sync_directory
from megamuon.checkpoint.manifest import run_of
from megamuon.checkpoint.tracker import RELEASE, Iteration, directory_name

_WORK = re.compile(r"(iter_\d{7,}|release)\.(partial|replaced|deleted)-[0-9a-f]+")


def is_work(name: str) -> bool:
    """Whether a directory of that name is a save under way or what one left behind."""
    return _WORK.fullmatch(name) is not None


def make_partial(directory: Path, iteration: Iteration) -> Path:
    """A new empty directory in which a checkpoint is written."""
    partial = _beside(directory / directory_name(iteration), "partial")
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, final: Path) -> None:
    """Give a sealed directory its name, replacing an older checkpoint of that name.  Raises
    OSError.
    """
    old = None
    sync_directory(partial)
    if final.is_symlink() or final.exists():
        old = _beside(final, "replaced")
        os.rename(final, old)
    os.rename(partial, final)
    sync_directory(final.parent)
    if old is not None:
        remove(old)


def restore_replaced(directory: Path) -> None:
    """Take back a checkpoint whose replacement was cut between the two renames of ``publish``.

    Ranks that read a checkpoint's arguments before they know of each other may call it at once.
    """
    for entry, name, kind in _work_entries(directory):
        final = directory / name
        if kind == "replaced" and not (final.is_symlink() or final.exists()):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.rename(entry, final)
            sync_directory(directory)


def clean_stale(directory: Path) -> None:
    """Remove what killed runs left behind.

    Only the run that writes to ``directory`` may call it, while no save is under way: another
    reader would take a live writer's partial directory away.  Hence saving calls it and loading
    does not.
    """
    restore_replaced(directory)
    for entry, _, _ in _work_entries(directory):
        remove(entry)


def retain(
    directory: Path,
    retired: Iterable[Iteration],
    current: Iteration,
    interval: int | None,
    run: str | None = None,
) -> None:
    """Delete the ``retired`` checkpoints, but those whose iteration is a multiple of ``interval``,
    symbolic links, and what another run than ``run`` has saved.

    Megatron-LM's --save-retain-interval; ``interval`` None keeps everything.  ``release`` and the
    checkpoint just written (``current``) always stay.
    """
    for iteration in retired:
        if interval is None or iteration in (RELEASE, current) or iteration % interval == 0:
            continue
        path = directory / directory_name(iteration)
        if path.is_symlink() or not path.is_dir() or run_of(path) != run:
            continue
        # Renamed first: a half-deleted iter_N must not look like a checkpoint.
        doomed = _beside(path, "deleted")
        os.rename(path, doomed)
        sync_directory(directory)
        remove(doomed)


def remove(path: Path) -> None:
    """Delete a directory tree, or a link itself and not what it points to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _beside(final: Path, kind: str) -> Path:
    return final.with_name(f"{final.name}.{kind}-{secrets.token_hex(4)}")


def _work_entries(directory: Path) -> list[tuple[Path, str, str]]:
    if not directory.is_dir():
        return []
    found = ((entry, _WORK.fullmatch(entry.name)) for entry in sorted(directory.iterdir()))
    return [(entry, match.group(1), match.group(2)) for entry, match in found if match]
