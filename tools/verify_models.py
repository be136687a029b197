"""Checks the operators' protocol models with spin: what must hold holds, what must break breaks.

The models in ``csrc/verification`` describe the rings of AllGatherV and ReduceScatterV and the
persistent publish. Each is run as it is at several bounds, and once for every rule that is taken
away, in which case spin has to find the breach: a model that cannot fail proves nothing. A variant
that is not found as expected makes the exit status 1; where spin or a C compiler is missing the
exit status is 3.

    python tools/verify_models.py --json models.json

Owns the table of variants (``VARIANTS``) and how a run of spin is read. Tested by
``tests/tools/test_verify_models.py``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megamuon.console import run_script  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

MODELS = ROOT / "csrc" / "verification"
MISSING = 3  # exit status without spin
MEMORY_MIB = 1500

HOLDS = "holds"  # all states were visited, none is wrong
ASSERTION = "assertion"
DEADLOCK = "deadlock"
INCOMPLETE = "incomplete"  # a limit ended the search


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model under macros, and what spin has to find.

    ``witness`` is an array that the violated assertion must name, so that a rule that is taken away
    is seen to break what it protects. ``slow`` variants have the larger bounds.
    """

    model: str
    macros: str
    expected: str
    witness: str = ""
    slow: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.macros}".strip()

    def flags(self) -> list[str]:
        return [f"-D{macro}" for macro in self.macros.split()]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What spin found of a variant; ``detail`` is its own line where something is wrong."""

    name: str
    expected: str
    found: str
    states: int
    seconds: float
    detail: str
    passed: bool


def holds(model: str, *rows: str, slow: bool = False) -> list[Variant]:
    """Variants that must hold, by their macros."""
    return [Variant(model=model, macros=row, expected=HOLDS, slow=slow) for row in rows]


def breaks(model: str, expected: str, witness: str, *rows: str) -> list[Variant]:
    """Variants that must fail in one way, by their macros."""
    return [Variant(model=model, macros=row, expected=expected, witness=witness) for row in rows]


VARIANTS: tuple[Variant, ...] = (
    *holds(
        "queue_ring",
        "S=1 ONE_HEAVY",
        "S=2 ONE_HEAVY",
        "S=1 ONE_HEAVY FORWARD_FROM_POOL",
        "S=2 ONE_HEAVY FORWARD_FROM_POOL",
        "S=1 ONE_HEAVY WEAK_SIGNALS",
        "S=2 UNEVEN SPLIT_SIGNAL",
        "S=2 R=2 K=2",
        "S=1 C=1 K=2",
    ),
    *breaks("queue_ring", ASSERTION, "slot[", "S=1 ACK_BEFORE_DONE", "S=2 WEAK_SIGNALS"),
    *breaks("queue_ring", ASSERTION, "entry[", "S=1 K=2 NO_ENTRY_WAIT"),
    *breaks("queue_ring", ASSERTION, "call[", "S=1 TAKES_NEXT_CALL"),
    *breaks("queue_ring", ASSERTION, "done[", "S=1 NO_DRAIN"),
    *breaks("queue_ring", DEADLOCK, "", "S=1 BLOCKING_GROUP", "S=1 SHARED_CREDIT"),
    *breaks("queue_ring", DEADLOCK, "", "S=2 SHARED_CREDIT", "S=1 RESET_ARRIVALS"),
    *holds("reduce_ring", "S=2 OUT=1 ONE_HEAVY"),
    *breaks("reduce_ring", ASSERTION, "outbox[", "S=1 OUT=1 OUTBOX_REUSED"),
    *breaks("reduce_ring", ASSERTION, "slot[", "S=1 OUT=1 ACK_BEFORE_READ"),
    *breaks("reduce_ring", ASSERTION, "entry[", "S=1 OUT=1 K=2 NO_ENTRY_WAIT"),
    *breaks("reduce_ring", ASSERTION, "freed[", "S=1 OUT=1 K=2 NO_DONE_WAIT"),
    *holds("publish", "P=2 T=2", "P=1 T=2 ROUNDS=3"),
    *breaks("publish", ASSERTION, "copy[", "BOOLEAN_FLAG", "RELAY_BEFORE_FLAG", "NO_BARRIER"),
    *breaks("publish", ASSERTION, "copy[", "FLAG_BEFORE_DATA", "ARRIVAL_AT_FIRST", "EARLY_TASK"),
    *holds(
        "queue_ring",
        "S=1",
        "S=1 FORWARD_FROM_POOL",
        "S=2 FORWARD_FROM_POOL",
        "S=1 WEAK_SIGNALS",
        "S=1 SPLIT_SIGNAL",
        "S=2 C=3 ONE_HEAVY",
        "S=1 K=2",
        "S=2 R=4 C=3 ONE_HEAVY LIGHT=0",
        slow=True,
    ),
    *holds(
        "reduce_ring",
        "S=1 OUT=1",
        "S=1 OUT=1 K=2 C=1",
        "S=1 OUT=2 C=1",
        "S=2 OUT=2 ONE_HEAVY",
        slow=True,
    ),
    *holds("publish", "P=3 T=1", "P=3 T=1 ROUNDS=3", slow=True),
)


def missing() -> str | None:
    """Why models cannot be checked here, as a sentence; ``None`` if they can."""
    for program, package in (("spin", "spin"), ("gcc", "gcc")):
        if shutil.which(program) is None:
            return (
                f"{program} is not on PATH, so the models cannot be checked; "
                f"on Debian and Ubuntu the package {package} has it"
            )
    return None


def read_output(text: str) -> tuple[str, int, str]:
    """What a run of pan found, the states that it stored, and its line about what is wrong."""
    stored = re.search(r"([\d.e+]+) states, stored", text)
    states = int(float(stored.group(1))) if stored else 0
    wrong = re.search(r"^pan:\d+: (.*?)(?: \(at depth -?\d+\))?$", text, re.MULTILINE)
    if wrong:
        line = wrong.group(1)
        if line.startswith("assertion violated"):
            return ASSERTION, states, line
        return (DEADLOCK if line == "invalid end state" else INCOMPLETE), states, line
    cut = re.search(r"^.*(?:MEMLIM|max search depth too small|not completed).*$", text, re.M)
    if cut or "errors: 0" not in text or not states:
        return INCOMPLETE, states, cut.group(0).strip() if cut else "no result"
    return HOLDS, states, ""


def check(variant: Variant, limit: float) -> Finding:
    """Generate, compile and run the checker of a variant, in a folder that goes away."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verify_models_") as folder:
        model = MODELS / f"{variant.model}.pml"
        # Compiling takes longer than a small search, and all steps touch what processes share, so
        # that partial-order reduction would leave out nothing worth its code.
        compiler = ["gcc", "-O2" if variant.slow else "-O0", "-w", "-DSAFETY", "-DNOREDUCE"]
        compiler += ["-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}"]
        for command in (
            ["spin", *variant.flags(), "-a", str(model)],
            [*compiler, "-o", "pan", "pan.c"],
        ):
            made = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if made.returncode:
                raise RuntimeError(
                    f"{variant.name}: {command[0]} ended with {made.returncode}:\n"
                    f"{(made.stdout + made.stderr).strip()}"
                )
        # A missing rule may also block somebody; what it must corrupt is what is looked for.
        only_assertions = ["-E"] if variant.expected == ASSERTION else []
        try:
            run = subprocess.run(
                ["./pan", "-m100000", "-n", *only_assertions],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=limit,
            )
            found, states, detail = read_output(run.stdout + run.stderr)
        except subprocess.TimeoutExpired:
            found, states, detail = INCOMPLETE, 0, f"not over after {limit:g} s"
    return Finding(
        name=variant.name,
        expected=variant.expected,
        found=found,
        states=states,
        seconds=round(time.monotonic() - begin, 2),
        detail=detail,
        passed=found == variant.expected and variant.witness in detail,
    )


def check_all(variants: Sequence[Variant], *, jobs: int, limit: float) -> list[Finding]:
    """Check variants, ``jobs`` at a time, and print a line for each in their order."""
    width = max((len(variant.name) for variant in variants), default=0)
    print(f"{'variant':{width}}  expected   found          states  seconds")
    findings = []
    with ThreadPoolExecutor(jobs) as pool:
        for finding in pool.map(lambda variant: check(variant, limit), variants):
            print(
                f"{finding.name:{width}}  {finding.expected:9}  {finding.found:10}"
                f"  {finding.states:9}  {finding.seconds:7.2f}"
                + ("" if finding.passed else f"  NOT AS EXPECTED: {finding.detail}"),
                flush=True,
            )
            findings.append(finding)
    return findings


def parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--quick", action="store_true", help="leave out the larger bounds")
    flags.add_argument("--only", default="", metavar="TEXT", help="variants with this in the name")
    flags.add_argument("--jobs", type=int, default=1, help="variants at a time (default 1)")
    flags.add_argument(
        "--limit", type=float, default=300.0, help="seconds for one search (default 300)"
    )
    add_json_flag(flags, __file__)
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the variants that were asked for; the exit status."""
    flags = parser()
    chosen = flags.parse_args(arguments)
    if chosen.jobs < 1:
        flags.error(f"--jobs {chosen.jobs}: at least one variant at a time")
    variants = [v for v in VARIANTS if chosen.only in v.name and not (chosen.quick and v.slow)]
    if not variants:
        flags.error(f"--only {chosen.only!r}: no variant has this in its name")
    reason = missing()
    if reason is not None:
        print(f"verify_models: {reason}", file=sys.stderr)
        return MISSING
    findings = check_all(variants, jobs=chosen.jobs, limit=chosen.limit)
    passed = all(finding.passed for finding in findings)
    if chosen.json:
        record = {"passed": passed, "variants": [asdict(finding) for finding in findings]}
        write_json(chosen.json, __file__, record)
    wrong = sum(not finding.passed for finding in findings)
    print("all as expected" if passed else f"{wrong} of {len(findings)} not as expected")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_script(main))
