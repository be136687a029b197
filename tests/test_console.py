"""A console that cannot take a text loses it, and the work goes on."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megamuon.console import ForgivingStream, write_line

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys
from megamuon.console import run_script
def main():
    for number in range(20000):
        print("w\\u00f6rld \\u20ac", number)
    print("done", file=open(sys.argv[1], "w"))
    return 3
sys.exit(run_script(main))
"""


def run(tmp_path: Path, shell: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """SCRIPT as ``$RUN`` inside a shell line; its work must have been done."""
    command = f"'{sys.executable}' -c '{SCRIPT}' '{tmp_path / 'done'}'"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {shell}"],
        capture_output=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=120,
    )
    assert (tmp_path / "done").read_text() == "done\n"
    assert done.returncode == 3, done.stderr
    assert done.stderr == b""
    return done


@pytest.mark.parametrize("shell", ["| head -1", ">&-", "> /dev/full", "2>&- | head -1"])
def test_scripts_finish_on_consoles_that_are_gone(tmp_path: Path, shell: str) -> None:
    run(tmp_path, shell)


def test_characters_that_a_console_lacks_are_escaped(tmp_path: Path) -> None:
    done = run(tmp_path, "", PYTHONIOENCODING="ascii")
    assert done.stdout.startswith(b"w\\xf6rld \\u20ac 0\n")


def test_lines_are_lost_but_never_raised() -> None:
    write_line("x", None)
    closed = io.StringIO()
    closed.close()
    write_line("x", closed)
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    write_line("\u20ac", narrow)
    assert narrow.buffer.getvalue() == b"\\u20ac\n"  # type: ignore[attr-defined]
    with Path("/dev/full").open("w") as full:
        write_line("x", full)
        stream = ForgivingStream(full)
        assert stream.write("y" * 100_000) == 100_000
        stream.flush()
        assert stream.name == "/dev/full"
        full.truncate = lambda *_: None  # type: ignore[method-assign]
        with pytest.raises(OSError, match="No space"):
            full.close()


def test_every_script_and_tool_prints_that_way() -> None:
    scripts = [*ROOT.glob("pretrain_*.py"), *ROOT.glob("tools/**/*.py")]
    starts = [path for path in scripts if '__name__ == "__main__"' in path.read_text()]
    assert len(starts) > 15
    for path in starts:
        assert re.search(r"sys\.exit\(run_script\(main\)\)\n$", path.read_text()), path
