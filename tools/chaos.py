"""Fuzzes the schedules of the operators, and shows that the fuzzer notices broken rules.

Each schedule runs AllGatherV, ReduceScatterV and the persistent publish, as they are in training,
over a simulated fabric that delays and reorders everything the fabric contract leaves open, on a
random shape; contents, sums, credit and every access to a pool are checked. Then one rule at a time
is broken, and each mutant must be caught within ``MUTANT_SCHEDULES`` schedules. A schedule is a
function of the seed and its number: a failure says how to replay it.

    python tools/chaos.py --schedules 100000 --jobs 2 --json chaos.json

``--tsan-seconds`` also runs the host library among real threads under ThreadSanitizer. The exit
status is 0 only if nothing failed and every mutant was caught; 3 where there is no compiler.

Owns the division of the work and the report; ``csrc/tests/chaos.cpp`` and ``threads.cpp`` do it.
Tested by ``tests/collectives/test_chaos.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megamuon.console import run_script  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402
from tools.native_build import build_driver  # noqa: E402

TESTS = ROOT / "csrc" / "tests"
CHAOS_FLAGS = ("-O1",)  # as fast as -O2 here, and built in half the time
THREAD_FLAGS = ("-O1", "-g1", "-fsanitize=thread")
MUTANT_SCHEDULES = 3000  # within which each mutant must be caught
BATCH = 2500  # schedules between two lines of progress
MISSING = 3  # exit status without a compiler
Report = dict[str, Any]


def chaos_program() -> Path:
    """The schedule fuzzer, built when a source is newer."""
    return build_driver(TESTS / "chaos.cpp", CHAOS_FLAGS)


def threads_program() -> Path:
    """The threads' driver with ThreadSanitizer; RuntimeError where it does not link."""
    also = [ROOT / "csrc" / "bindings" / "host_api.cpp", ROOT / "csrc" / "pool" / "segment.cpp"]
    return build_driver(TESTS / "threads.cpp", THREAD_FLAGS, also)


def run_driver(program: Path, *arguments: str) -> Any:
    """What the fuzzer prints; RuntimeError with its last words where it dies."""
    answer = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if answer.returncode:
        words = (answer.stderr or answer.stdout).strip() or "no message"
        raise RuntimeError(
            f"{program.name} {' '.join(arguments)}: exit status {answer.returncode}: {words}"
        )
    return json.loads(answer.stdout)


def run_batch(program: Path, seed: int, first: int, count: int) -> Report:
    """``count`` schedules from number ``first`` on."""
    arguments = ("--seed", str(seed), "--first", str(first), "--schedules", str(count))
    return run_driver(program, *arguments)


def fuzz(program: Path, schedules: int, seed: int, jobs: int, say: Callable[[str], None]) -> Report:
    """Sums over all schedules, and the first failure of each batch that has one."""
    start, found = time.monotonic(), []
    total: Report = {"schedules": 0, "failures": 0, "cpu_seconds": 0.0}
    with ThreadPoolExecutor(jobs) as pool:
        batches = [
            pool.submit(run_batch, program, seed, first, min(BATCH, schedules - first))
            for first in range(0, schedules, BATCH)
        ]
        for batch in as_completed(batches):
            result = batch.result()
            total = {key: total[key] + result[key] for key in total}
            if "first" in result:
                found.append(result["first"])
            done, seconds = total["schedules"], time.monotonic() - start
            say(
                f"{done} of {schedules} schedules, {total['failures']} failures, "
                f"{done / seconds:.0f} schedules/s, {rate(total):.0f} for each core in use"
            )
    total["seconds"] = time.monotonic() - start
    total["first_failures"] = sorted(found, key=lambda first: first["schedule"])
    return total


def rate(total: Report) -> float:
    """Schedules per second of processor time."""
    return total["schedules"] / total["cpu_seconds"] if total["cpu_seconds"] else 0.0


def try_mutant(program: Path, mutant: Report, seed: int, schedules: int) -> Report:
    """What became of one mutant: ``passed`` if it was caught, or needed not to be and was not."""
    arguments = ("--mutant", mutant["name"], "--seed", str(seed), "--schedules", str(schedules))
    result = run_driver(program, *arguments, "--stop")
    first = result.get("first", {})
    return {
        "name": mutant["name"],
        "must_be_caught": mutant["caught"],
        "caught": bool(result["failures"]),
        "schedules": result["schedules"],
        "by": first.get("failure", ""),
        "scenario": first.get("scenario", ""),
        "passed": mutant["caught"] == bool(result["failures"]),
    }


def try_mutants(
    program: Path, seed: int, jobs: int, say: Callable[[str], None], schedules: int
) -> list[Report]:
    """All mutants, each until it is caught or ``schedules`` schedules are over."""
    mutants = run_driver(program, "--list")
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda m: try_mutant(program, m, seed, schedules), mutants))
    for result in results:
        what = f"caught at schedule {result['schedules']}" if result["caught"] else "not caught"
        verdict = "" if result["passed"] else "  <- WRONG"
        say(f"{result['name']}: {what}{verdict}{': ' + result['by'] if result['by'] else ''}")
    return results


def run_threads(program: Path, seconds: float, seed: int) -> Report:
    """The host library among threads; races are failures, with the sanitizer's words."""
    command = [str(program), "--seconds", str(seconds), "--seed", str(seed)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300)
    except subprocess.TimeoutExpired:
        return {"scenarios": 0, "failures": 1, "text": f"no end after {seconds + 300:.0f} s"}
    try:
        result: Report = json.loads(answer.stdout)
    except json.JSONDecodeError:
        result = {"scenarios": 0, "failures": 1}
    if answer.returncode or result["failures"]:
        result["failures"] = max(1, result["failures"])
        result["text"] = answer.stderr[-6000:]
    return result


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description="fuzzes the schedules of the operators")
    flags.add_argument("--schedules", type=int, default=20000, help="how many (default 20000)")
    flags.add_argument("--seed", type=int, default=0, help="of all random choices (default 0)")
    flags.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    flags.add_argument(
        "--tsan-seconds",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="also run the host library among threads, for so long",
    )
    flags.add_argument("--replay", type=int, metavar="NUMBER", help="run this schedule alone")
    flags.add_argument("--mutant", help="with --replay: of this mutant")
    add_json_flag(flags, __file__)
    flags.add_argument("--quiet", action="store_true", help="print the last line alone")
    return flags.parse_args(arguments)


def replay(program: Path, options: argparse.Namespace) -> int:
    """Run one schedule and print what it was and how it went."""
    command = [str(program), "--replay", str(options.replay), "--seed", str(options.seed)]
    if options.mutant:
        command += ["--mutant", options.mutant]
    return subprocess.run(command).returncode


def report(options: argparse.Namespace, program: Path, say: Callable[[str], None]) -> Report:
    """Everything that the options ask for, as it is written to the file."""
    total = fuzz(program, options.schedules, options.seed, options.jobs, say)
    for first in total["first_failures"]:
        say(f"schedule {first['schedule']}: {first['failure']} [{first['scenario']}]")
        say(f"  --replay {first['schedule']} --seed {options.seed}")
    mutants = try_mutants(program, options.seed, options.jobs, say, MUTANT_SCHEDULES)
    harmful = [m for m in mutants if m["must_be_caught"]]
    false_alarms = sum(not m["passed"] for m in mutants if not m["must_be_caught"])
    result: Report = {
        "schedules": total["schedules"],
        "failures": total["failures"] + false_alarms,
        "mutations": len(harmful),
        "mutations_caught": sum(m["caught"] for m in harmful),
        "seed": options.seed,
        "seconds": round(total["seconds"], 2),
        "schedules_per_cpu_second": round(rate(total), 1),
        "first_failures": total["first_failures"],
        "mutants": mutants,
    }
    if options.tsan_seconds > 0:
        result["threads"] = run_threads(threads_program(), options.tsan_seconds, options.seed)
        result["failures"] += result["threads"]["failures"]
        say(f"threads: {json.dumps(result['threads'])}")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)

    def say(text: str) -> None:
        if not options.quiet:
            print(text, flush=True)

    try:
        program = chaos_program()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return MISSING
    if options.replay is not None:
        return replay(program, options)
    result = report(options, program, say)
    write_json(options.json, __file__, result)
    passed = result["failures"] == 0 and result["mutations_caught"] == result["mutations"]
    print(
        f"{result['schedules']} schedules, {result['failures']} failures, "
        f"{result['mutations_caught']} of {result['mutations']} mutations caught, "
        f"{result['schedules_per_cpu_second']:.0f} schedules per core and second"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_script(main))
