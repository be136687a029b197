"""Compiles a C++ driver of ``csrc/tests`` when it is older than its sources.

Owns ``build_driver``: one program per source and set of flags, in ``build/drivers``.  Invariant: a
program is replaced as a whole, so processes that build at the same time do not disturb each other;
what counts as a source is ``csrc/build.py``'s rule. Tested by
``tests/tools/test_publish_replay.py``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
DRIVERS = ROOT / "build" / "drivers"


def _library_build() -> ModuleType:
    """csrc/build.py, by its path: csrc is no package."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "csrc" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_driver(source: Path, flags: Sequence[str] = ("-O2",), also: Sequence[Path] = ()) -> Path:
    """The program of one ``.cpp`` file, built if it is missing or older than a header or itself.

    ``flags`` come after ``-std=c++17 -pthread``; ``also``: further files of the program.  Raises
    RuntimeError with what the compiler said, or with how to get a compiler where there is none.
    """
    build = _library_build()
    tag = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:8]
    program = DRIVERS / f"{source.stem}-{tag}"
    headers = {*build.sources_of({".h"}, ROOT), *source.parent.glob("*.h")}
    if not build.is_stale(program, [source, *also, *headers]):
        return program
    DRIVERS.mkdir(parents=True, exist_ok=True)
    half_made = program.with_suffix(f".{os.getpid()}")
    command = [*build.find_cxx().split(), "-std=c++17", "-pthread", *flags]
    command += [*map(str, (source, *also)), f"-I{ROOT / 'csrc'}", "-o", str(half_made), "-lrt"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        half_made.unlink(missing_ok=True)
        raise RuntimeError(f"{source} does not compile:\n{answer.stderr.strip()}")
    half_made.replace(program)
    return program
