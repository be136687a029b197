"""Names inside a save directory: iterations, the tracker file, and which checkpoint to load.

Owns ``iter_0000100`` / ``release`` and ``latest_checkpointed_iteration.txt`` (Megatron-LM's
names, so that its tools find ours).  Invariant: the tracker is replaced atomically and only ever
names a complete checkpoint; a tracker that cannot be read is an error with the file and its
content, never a silent fresh start. Tested by ``tests/checkpoint/test_tracker.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from megamuon.checkpoint.files import replace_text
from megamuon.checkpoint.ranks import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE: Literal["release"] = "release"
Iteration = int | Literal["release"]

_ITERATION = re.compile(r"iter_(\d{7,})")


def directory_name(iteration: Iteration) -> str:
    """``iter_0000100``, or ``release`` for weights without an iteration.  Raises ValueError below
    0.
    """
    if iteration == RELEASE:
        return RELEASE
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
        raise ValueError(f"iteration {iteration!r} must be a number from 0 up or {RELEASE!r}")
    return f"iter_{iteration:07d}"


def iterations(directory: Path) -> list[int]:
    """The iterations that have a directory, ascending."""
    if not directory.is_dir():
        return []
    found = (_ITERATION.fullmatch(entry.name) for entry in directory.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in found if match)


def read_tracker(directory: Path) -> Iteration | None:
    """What the tracker names; None where there is no tracker.  Raises CheckpointError where it is
    unreadable.
    """
    path = directory / TRACKER
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    text = raw.decode("utf-8", errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if text.isascii() and text.isdigit():
        return int(text)
    raise CheckpointError(
        f"{path} must hold an iteration number or '{RELEASE}', found {text[:80]!r}; write the "
        "number of a complete "
        f"checkpoint into it (present: {_present(directory)}) or choose one with --ckpt-step"
    )


def write_tracker(directory: Path, iteration: Iteration) -> None:
    """Name the newest complete checkpoint, atomically."""
    directory_name(iteration)  # refuses what could not be read back
    replace_text(directory / TRACKER, str(iteration))


def find_checkpoint(directory: Path, step: int | None = None) -> Iteration | None:
    """Which checkpoint to load: ``step`` (--ckpt-step) if given, else the tracker's; None without
    a tracker.

    Raises CheckpointError where the chosen one does not exist.
    """
    chosen: Iteration | None = step if step is not None else read_tracker(directory)
    if chosen is None:
        return None
    if not (directory / directory_name(chosen)).is_dir():
        reason = "--ckpt-step" if step is not None else f"{directory / TRACKER}"
        raise CheckpointError(
            f"{reason} names {chosen}, but {directory / directory_name(chosen)} does not exist "
            f"(present: {_present(directory)})"
        )
    return chosen


def _present(directory: Path) -> str:
    names = [str(iteration) for iteration in iterations(directory)]
    if (directory / RELEASE).is_dir():
        names.append(RELEASE)
    return ", ".join(names) or "none"
