"""Checks the device code's hand-offs against the PTX memory model with Dartagnan.

The programs in ``csrc/verification/*.litmus`` are the places where the operators' kernels rely on a
fence: a message through a block, entry before a multicast, arrival after it, the last group that
leaves, the tail of the publish's tasks, a ring slot that is used again. Each must hold in every
execution that the model allows, and must not without any one of its fences: a program that holds
anyway proves nothing about the fence. What is checked are these programs, which are written by
hand after the code they name, not the code itself; and the model is the one that Dartagnan has of
PTX 7.5, whose alias proxy stands for the address of a multicast.

    DAT3M_HOME=... DARTAGNAN="java -jar .../dartagnan.jar" python tools/verify_litmus.py

``DAT3M_HOME`` is a checkout of hernanponcedeleon/Dat3M (its ``cat`` folder has the model) and
``DARTAGNAN`` the command that starts the tool, by default the jar that its build leaves there. The
exit status is 1 where a program or a variant of it is not found as expected, 3 without Dartagnan.

Owns how variants are made and how Dartagnan is read. Tested by
``tests/tools/test_verify_litmus.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megamuon.console import run_script  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

PROGRAMS = ROOT / "csrc" / "verification"
MODEL = Path("cat") / "ptx-v7.5.cat"
JAR = Path("dartagnan") / "target" / "dartagnan.jar"
MISSING = 3  # exit status without Dartagnan
HOLDS, BREAKS = "holds", "breaks"
FENCE = re.compile(r"\bfence\.[\w.]+")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A program, the fence that was taken out of it ("" for none), and what became of it."""

    program: str
    without: str
    expected: str
    found: str

    @property
    def passed(self) -> bool:
        """Whether it is as expected."""
        return self.expected == self.found


def variants(text: str) -> Iterator[tuple[str, str]]:
    """The program as it is, then without each of its fences: (what is missing, text)."""
    yield "", text
    for place in FENCE.finditer(text):
        blank = " " * len(place[0])
        row = text[: place.start()].count("\n") + 1
        yield f"{place[0]} in line {row}", text[: place.start()] + blank + text[place.end() :]


def command() -> list[str] | None:
    """How Dartagnan is started, up to the program; None where it cannot be."""
    home = os.environ.get("DAT3M_HOME")
    if not home or not (Path(home) / MODEL).is_file():
        return None
    start = shlex.split(os.environ.get("DARTAGNAN", f"java -jar {Path(home) / JAR}"))
    if shutil.which(start[0]) is None or (
        "DARTAGNAN" not in os.environ and not Path(start[-1]).is_file()
    ):
        return None
    return [*start, str(Path(home) / MODEL)]


def read_output(text: str) -> str:
    """What Dartagnan found of a program whose last lines say ``~exists``."""
    said = re.search(r"^Result: (\w+)", text, re.MULTILINE)
    verdict = said[1] if said else ""
    return {"PASS": HOLDS, "FAIL": BREAKS}.get(verdict, f"no result: {text.strip()[-300:]}")


def check(start: Sequence[str], program: Path) -> Iterator[Finding]:
    """Run a program and its variants."""
    with tempfile.TemporaryDirectory(prefix="verify_litmus_") as folder:
        for without, text in variants(program.read_text(encoding="utf-8")):
            path = Path(folder) / program.name
            path.write_text(text, encoding="utf-8")
            # The lazy solver was seen to miss what a proxy fence orders between aliases.
            flags = ["--target=ptx", "--method=eager"]
            done = subprocess.run([*start, str(path), *flags], capture_output=True, text=True)
            yield Finding(
                program=program.stem,
                without=without,
                expected=BREAKS if without else HOLDS,
                found=read_output(done.stdout + done.stderr),
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all programs, or those whose names have a text in them; the exit status."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--only", default="", metavar="TEXT", help="programs with this in the name")
    add_json_flag(flags, __file__)
    chosen = flags.parse_args(arguments)
    programs = [path for path in sorted(PROGRAMS.glob("*.litmus")) if chosen.only in path.stem]
    if not programs:
        flags.error(f"--only {chosen.only!r}: no program has this in its name")
    start = command()
    if start is None:
        print(
            "verify_litmus: Dartagnan is not here: set DAT3M_HOME to a checkout of"
            " hernanponcedeleon/Dat3M that has been built, or DARTAGNAN to what starts it",
            file=sys.stderr,
        )
        return MISSING
    findings = []
    for program in programs:
        for finding in check(start, program):
            what = f"without {finding.without}" if finding.without else "as it is"
            wrong = "" if finding.passed else "  NOT AS EXPECTED"
            print(f"{finding.program:18} {what:38} {finding.found}{wrong}", flush=True)
            findings.append(finding)
    passed = all(finding.passed for finding in findings)
    if chosen.json:
        record = {"passed": passed, "findings": [asdict(finding) for finding in findings]}
        write_json(chosen.json, __file__, record)
    print("all as expected" if passed else "not all as expected")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_script(main))
