"""Lines of progress.txt."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from megamuon.checkpoint import append_progress


def test_lines_are_appended_with_time_job_and_ranks(tmp_path: Path) -> None:
    when = datetime(2026, 1, 2, 3, 4, 5)
    append_progress(tmp_path / "new", "Starting job", world_size=4, job="77", when=when)
    append_progress(tmp_path / "new", "Saved checkpoint\tIteration: 10", world_size=4, when=when)
    assert (tmp_path / "new" / "progress.txt").read_text() == (
        "2026-01-02 03:04:05\tJob ID: 77\t# GPUs: 4\tStarting job\n"
        "2026-01-02 03:04:05\tJob ID: \t# GPUs: 4\tSaved checkpoint\tIteration: 10\n"
    )


def test_a_line_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one line"):
        append_progress(tmp_path, "a\nb", world_size=1)
