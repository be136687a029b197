"""Which test files ``make test QUICK=1`` runs.

Owns the reading of ``tests/quick.txt``: one file a line, relative to ``tests``, with comments after
``#``. Of these files, tests marked slow are left out. Tested by ``tests/test_quick.py``.
"""

from pathlib import Path

QUICK = Path(__file__).resolve().parents[1] / "quick.txt"


def quick_files() -> frozenset[str]:
    """The files, relative to ``tests``."""
    lines = (line.partition("#")[0].strip() for line in QUICK.read_text().splitlines())
    return frozenset(filter(None, lines))
