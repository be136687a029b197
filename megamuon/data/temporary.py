"""Names of temporary files, which are renamed when they are complete.

Owns one rule: a name is unique to the writer, whether that is another process, another machine on
the same file system, or another thread of this process. Tested by
``tests/data_room/test_index_cache.py``.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """A name beside ``path`` that no other writer has, with the process in it for cleaners."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(8)}")
