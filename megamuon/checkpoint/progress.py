"""``progress.txt`` of --log-progress: one line per start and per save, tab-separated.

Owns the file beside the tracker from which a job chain's progress is read (Megatron-LM's name and
columns).  Invariant: a line is appended whole or not at all, and is never rewritten.  Tested by
``tests/checkpoint/test_progress.py``.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from megamuon.checkpoint.files import make_directory

PROGRESS = "progress.txt"


def append_progress(
    directory: Path, text: str, *, world_size: int, job: str = "", when: datetime | None = None
) -> None:
    """Append ``time, job, number of ranks, text``.  Call it on rank 0; ``job`` is the scheduler's
    id of the job.

    Raises ValueError where ``text`` holds a line break, OSError where the file cannot be written.
    """
    if "\n" in text:
        raise ValueError(f"progress text must be one line, got {text!r}")
    stamp = (when or datetime.now()).strftime("%Y-%m-%d %H:%M:%S")
    line = f"{stamp}\tJob ID: {job}\t# GPUs: {world_size}\t{text}\n".encode()
    make_directory(directory)
    handle = os.open(directory / PROGRESS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, line)  # one write in append mode: lines of two jobs never mix
        os.fsync(handle)
    finally:
        os.close(handle)
