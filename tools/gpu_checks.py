"""The device code on GPUs: what ``tools/gpu_checks.sh`` runs after it has built the libraries.

Owns the list of loopback cases, the attempts to run NCCL's device interface with several ranks (one
for each GPU, or two on the only one), with and without multicast, and the verdict over all parts. A
case is a process of its own, because a fault on a GPU spoils the process that caused it.
Invariants: a line says "ok" only after every element was compared; a part that did not run is
never counted as passed. Its list of cases and its verdicts are tested by
``tests/tools/test_gpu_checks.py``.

    python tools/gpu_checks.py loopback --json FILE     the operators on virtual places of one GPU
    python tools/gpu_checks.py sanitize --json FILE     some of them under compute-sanitizer
    python tools/gpu_checks.py nccl --multicast on|off --json FILE    ranks of NCCL on these GPUs
    python tools/gpu_checks.py join FILE ... --json FILE              the verdict over all parts

Exit status: 0 passed; 1 failed; 3 without the libraries or a GPU; 4 nothing failed, and this or
some part of it did not run, for the reason that is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from ctypes import c_double, c_int, c_uint64
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import gpu_ranks  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402
from tools.gpu_ranks import FAILED, NOT_RUN, PASSED, Report  # noqa: E402

LIBRARY = ROOT / "megamuon" / "_native" / "libmegamuon_loopback.so"
GATHER, REDUCE, PUBLISH = 0, 1, 2
KINDS = {GATHER: "gather", REDUCE: "reduce", PUBLISH: "publish"}
F32, F64, BF16, F16 = 0, 1, 2, 3
DTYPES = {F32: "f32", F64: "f64", BF16: "bf16", F16: "f16"}
MIB = 1 << 20
MAX_BLOCKS = 16
STATUS = {PASSED: 0, FAILED: 1, NOT_RUN: 4}  # exit status of a part, and of all
MISSING = 3
SANITIZER = "compute-sanitizer"
SANITIZERS = ("memcheck", "racecheck", "synccheck")


class NativeCase(ctypes.Structure):
    """mm_loopback_case of csrc/bindings/loopback_api.h."""

    _fields_ = (
        *((name, c_int) for name in ("kind", "nodes", "columns", "pipelines", "groups", "slots")),
        *((name, c_int) for name in ("segments", "slot_dtype", "wire_dtype", "window_dtype")),
        *((name, c_int) for name in ("granule", "calls", "timed", "shuffle")),
        *((name, c_uint64) for name in ("chunk_bytes", "star_bytes", "bytes", "seed")),
        ("deadline_seconds", c_double),
    )


class NativeResult(ctypes.Structure):
    """mm_loopback_result of csrc/bindings/loopback_api.h."""

    _fields_ = (
        *((name, c_uint64) for name in ("bytes", "checked", "mismatches")),
        *((name, c_int) for name in ("blocks", "star")),
        *((name, c_double) for name in ("call_seconds", "copy_seconds")),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One loopback case; the fields of mm_loopback_case."""

    kind: int
    nodes: int
    columns: int
    pipelines: int = 1
    groups: int = 1
    slots: int = 8
    segments: int = 2
    slot_dtype: int = F32
    wire_dtype: int = F32
    window_dtype: int = F32
    granule: int = 16
    calls: int = 6
    timed: int = 0
    shuffle: int = 1
    chunk_bytes: int = 64 * 1024
    star_bytes: int = 0
    bytes: int = MIB
    seed: int = 1
    deadline_seconds: float = 10.0

    def name(self) -> str:
        """For the table."""
        parts = [f"{KINDS[self.kind]:8}{self.nodes:2} x {self.columns}"]
        parts.append(f"{self.pipelines:2}p{self.groups:2}g")
        size = self.bytes
        parts.append(f"{size // MIB:5} MiB" if size >= MIB else f"{size // 1024:5} KiB")
        if self.kind == REDUCE:
            names = (DTYPES[d] for d in (self.slot_dtype, self.wire_dtype, self.window_dtype))
            parts.append("/".join(names))
        if self.star_bytes:
            parts.append("star")
        if self.granule % 16:
            parts.append("unaligned")
        return "  ".join(parts)


def checked_cases() -> list[Case]:
    """Small cases of every kind: ring and star, all dtypes, odd sizes, few slots, small chunks."""
    cases = []
    for nodes, columns in ((1, 2), (1, 4), (2, 1), (2, 2), (3, 2), (4, 2), (4, 1), (5, 3)):
        groups = min(nodes, 4)
        pipelines = max(1, min(MAX_BLOCKS // groups, 128 // (nodes * columns * groups)))
        shape = {"nodes": nodes, "columns": columns, "groups": groups, "seed": nodes * 10 + columns}
        for kind in (GATHER, REDUCE):
            cases.append(Case(kind=kind, pipelines=pipelines, **shape))
            cases.append(Case(kind=kind, chunk_bytes=4096, slots=1, bytes=MIB // 2, **shape))
            if nodes > 1:
                cases.append(Case(kind=kind, star_bytes=64 * MIB, bytes=MIB // 4, **shape))
    grid = {"nodes": 3, "columns": 2, "groups": 3}
    for slot, wire, window in (
        *((BF16, BF16, F32), (F32, BF16, F32), (BF16, F32, F32), (F16, F16, F32)),
        (F64, F64, F64),
    ):
        dtypes = {"slot_dtype": slot, "wire_dtype": wire, "window_dtype": window}
        cases.append(Case(kind=REDUCE, **grid, **dtypes))
        cases.append(Case(kind=REDUCE, star_bytes=64 * MIB, bytes=MIB // 4, **grid, **dtypes))
    cases.append(Case(kind=GATHER, granule=1, bytes=300_000, **grid))
    cases.append(Case(kind=REDUCE, granule=2, slot_dtype=BF16, bytes=300_000, **grid))
    for nodes in (1, 2, 4, 8):
        cases.append(Case(kind=PUBLISH, nodes=nodes, columns=1, segments=6, bytes=4 * MIB))
    return cases


def timed_cases() -> list[Case]:
    """Larger cases, timed; gathers are checked as well."""
    cases = []
    for size in (MIB // 4, 16 * MIB, 64 * MIB):
        for nodes, columns, pipelines, groups in ((1, 8, 16, 1), (2, 4, 8, 2), (4, 2, 4, 4)):
            shape = {"nodes": nodes, "columns": columns, "pipelines": pipelines, "groups": groups}
            common = {"bytes": size, "timed": 20, "calls": 2 if size <= 16 * MIB else 0}
            cases.append(Case(kind=GATHER, **shape, **common))
            dtypes = {"slot_dtype": BF16, "wire_dtype": BF16}
            calls = common | {"calls": 1 if size <= MIB else 0}
            cases.append(Case(kind=REDUCE, **shape, **dtypes, **calls))
    cases.append(Case(kind=PUBLISH, nodes=8, columns=1, segments=6, bytes=64 * MIB, timed=5))
    return cases


# --- loopback ------------------------------------------------------------------------------------


def run_here(case: Case) -> dict[str, object]:
    """Run one case in this process."""
    library = ctypes.CDLL(str(LIBRARY))
    native, result = NativeCase(**asdict(case)), NativeResult()
    text = ctypes.create_string_buffer(2048)
    status = library.mm_loopback_run(ctypes.byref(native), ctypes.byref(result), text, len(text))
    found = {name: getattr(result, name) for name, _ in NativeResult._fields_}
    return {**found, "error": text.value.decode(errors="replace") if status < 0 else ""}


def run_apart(case: Case, under: Sequence[str] = (), limit: float = 90) -> dict[str, object]:
    """Run one case in a process of its own, ``under`` another command, at most ``limit`` s."""
    command = [*under, sys.executable, __file__, "case", json.dumps(asdict(case))]
    # One hardware queue for all streams would put the publish's tasks behind its waiting kernel.
    environment = {**os.environ, "CUDA_MODULE_LOADING": "EAGER"}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {limit:g} s"}
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not said:
        words = (done.stderr.strip() or done.stdout.strip())[-400:]
        return {"error": f"exit status {done.returncode}: {words}"}
    return json.loads(said[-1])


def verdict(case: Case, result: dict[str, object]) -> tuple[bool, str]:
    """Whether a case passed, and its cell of the table."""
    if result.get("error"):
        return False, f"FAILED: {result['error']}"
    if result["mismatches"]:
        return False, f"FAILED: {result['mismatches']} of {result['checked']} elements differ"
    if case.calls and not result["checked"]:
        return False, "FAILED: nothing was compared"
    text = f"ok  {result['checked']} compared" if case.calls else "not compared"
    if seconds := float(result["call_seconds"]):
        places = case.nodes * case.columns
        rate = int(result["bytes"]) / seconds / 1e9
        text += f"  {seconds * 1e6:9.1f} us  {rate:7.1f} GB/s per place"
        if copy := float(result["copy_seconds"]):
            text += f"  {seconds / copy:6.2f} x the copy of its {places} results"
    return True, text


def loopback(seconds: float) -> Report:
    """Run all cases until ``seconds`` are over."""
    started, rows, good, left_out = time.monotonic(), [], True, 0
    cases = checked_cases() + timed_cases()
    for number, case in enumerate(cases):
        if time.monotonic() - started > seconds:
            left_out = len(cases) - number
            print(f"gpu_checks: out of time, {left_out} cases were not run")
            break
        result = run_apart(replace(case, seed=case.seed + 1000 * number))
        passed, text = verdict(case, result)
        good = good and passed
        rows.append({"case": asdict(case), "passed": passed, **result})
        print(f"{case.name():58}{text}", flush=True)
    passed = sum(bool(row["passed"]) for row in rows)
    print(f"gpu_checks: loopback: {passed} of {len(rows)} cases passed, {len(cases)} in all")
    reason = f"out of time: {left_out} of {len(cases)} cases" if left_out else ""
    status = FAILED if not good else NOT_RUN if reason else PASSED
    return {"status": status, "reason": reason, "rows": rows, "cases": len(cases)}


def sanitized_cases() -> list[Case]:
    """Small cases of each kind: a sanitizer slows a kernel down a hundredfold."""
    small = {"nodes": 2, "columns": 2, "bytes": 64 * 1024, "chunk_bytes": 4096, "calls": 2}
    patient = {"deadline_seconds": 120.0}
    return [
        Case(kind=GATHER, **small, **patient),
        Case(kind=GATHER, star_bytes=MIB, **small, **patient),
        Case(kind=REDUCE, slot_dtype=BF16, wire_dtype=BF16, **small, **patient),
        Case(kind=PUBLISH, **(small | {"columns": 1}), **patient),
    ]


def sanitize(seconds: float) -> Report:
    """Some cases under compute-sanitizer, until ``seconds`` are over."""
    if shutil.which(SANITIZER) is None:
        return {"status": NOT_RUN, "reason": f"there is no {SANITIZER} on the PATH"}
    started, rows, good = time.monotonic(), [], True
    wanted = [(tool, case) for tool in SANITIZERS for case in sanitized_cases()]
    for tool, case in wanted:
        if time.monotonic() - started > seconds:
            break
        under = [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
        result = run_apart(case, under, limit=180)
        passed, text = verdict(case, result)
        good = good and passed
        rows.append({"tool": tool, "case": asdict(case), "passed": passed, **result})
        print(f"{tool:10}{case.name():48}{text}", flush=True)
    left_out = len(wanted) - len(rows)
    reason = f"out of time: {left_out} of {len(wanted)} cases" if left_out else ""
    status = FAILED if not good else NOT_RUN if reason else PASSED
    return {"status": status, "reason": reason, "rows": rows}


# --- the verdict over all parts ------------------------------------------------------------------


def join(paths: Sequence[Path]) -> Report:
    """All parts by the names of their files; a part without a file did not run."""
    parts: dict[str, Report] = {}
    for path in paths:
        part: Report = {"status": NOT_RUN, "reason": "it left no result"}
        if path.is_file():
            part = json.loads(path.read_text())
        if "differs" in part:  # gpu_training.py's
            part["status"] = FAILED if part["differs"] else PASSED
        parts[path.stem] = part
        print(f"gpu_checks: {path.stem:28} {part['status']:8} {part.get('reason', '')}".rstrip())
    found = {part["status"] for part in parts.values()}
    status = FAILED if FAILED in found else NOT_RUN if NOT_RUN in found or not parts else PASSED
    return {"status": status, "parts": parts}


# --- command line --------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = ("loopback", "sanitize", "nccl", "join", "case", "rank")
    parser.add_argument(
        "command", choices=commands, help="command: what to run; case and rank are parts of others"
    )
    parser.add_argument("rest", nargs="*")
    add_json_flag(parser, __file__)
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no case after so many")
    parser.add_argument(
        "--multicast", choices=("on", "off"), default="off", help="nccl: gathers by the switch"
    )
    options = parser.parse_args(arguments)
    if options.command == "case":
        print(json.dumps(run_here(Case(**json.loads(options.rest[0])))))
        return 0
    if options.command == "rank":
        rank, ranks, store, multicast = options.rest
        print(json.dumps(gpu_ranks.run_rank(int(rank), int(ranks), store, multicast == "1")))
        return 0
    if options.command == "join":
        report = join([Path(path) for path in options.rest])
    elif not LIBRARY.is_file():
        print(
            f"gpu_checks: {LIBRARY} is not there: run tools/gpu_checks.sh on a machine with a GPU"
        )
        return MISSING
    elif options.command == "nccl":
        report = gpu_ranks.nccl(options.multicast == "on")
    else:
        report = {"loopback": loopback, "sanitize": sanitize}[options.command](options.seconds)
    if options.command != "join" and report["status"] != PASSED:
        print(f"gpu_checks: {options.command}: {report['status']}: {report['reason']}")
    write_json(options.json, __file__, report)
    return STATUS[str(report["status"])]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from megamuon.console import run_script

    sys.exit(run_script(main))
