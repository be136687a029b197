"""Every line on every grid against one single-process reference: losses, norms, weights.

Trains a model for some steps on each combination of line, sharding, ZeRO stage, tensor parallelism
and further choices, all from the same initial weights on the same tokens, and compares with a plain
loop over whole parameters in one process that uses the same optimizer (``reference_training.py``).
Prints a line per case; exits with 1 on a difference above the tolerance or when a rank fails.

    python tools/equivalence.py --model nano --lines A,B,C,D,M --sharding fsdp,hsdp \\
        --zero-stage 2,3 --tp 1,2 --ranks 4 --steps 20 --dtype fp64 --json out.json

A choice with several values takes them all, separated by commas. Combinations that do not exist
(line M with hsdp, say) are listed with the reason. Ranks are processes on this machine's CPUs.
Tested by ``tests/tools/test_equivalence_tool.py``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from megamuon.collectives import TRANSPORTS  # noqa: E402
from megamuon.console import run_script  # noqa: E402
from megamuon.models import PRESETS  # noqa: E402
from megamuon.ownership import POLICIES  # noqa: E402
from tools.equivalence_ranks import Outcome, run_on_ranks  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402
from tools.reference_training import OPTIMIZERS, Training, reference_run  # noqa: E402
from tools.sharded_training import FAULTS, LINES, Case, not_applicable  # noqa: E402

COLLECTIVES = tuple(sorted(TRANSPORTS))
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest differences that pass; None: reported, not judged."""

    loss: float  # relative
    norm: float | None
    weight: float | None  # absolute, as the norm's

    def breaches(self, outcome: Outcome) -> list[str]:
        """What is too large, in words; an error is one."""
        difference = outcome.difference
        if difference is None:
            return [outcome.error]
        found = []
        for name in ("loss", "norm", "weight"):
            value, limit = getattr(difference, name), getattr(self, name)
            if limit is not None and not value <= limit:
                place = f" of {difference.weight_name}" if name == "weight" else ""
                found.append(f"{name} difference{place} {value:.3g} above {limit:g}")
        return found


TOLERANCES = {
    "fp64": Tolerance(loss=1e-9, norm=1e-9, weight=1e-9),
    # Rounding grows from step to step through Newton-Schulz, so only losses say something.
    "fp32": Tolerance(loss=1e-4, norm=None, weight=None),
}


# --- the command line ----------------------------------------------------------------------------


def _listed(convert: Callable[[str], Any], choices: Sequence[Any] = ()) -> Callable[[str], list]:
    def parse(text: str) -> list:
        try:
            values = [convert(word) for word in text.split(",") if word]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: numbers separated by commas") from None
        for value in values:
            if choices and value not in choices:
                listed = ", ".join(str(choice) for choice in choices)
                raise argparse.ArgumentTypeError(f"{value!r}: choose from {listed}")
            if not choices and value < 1:
                raise argparse.ArgumentTypeError(f"{value}: must be 1 or more")
        if not values:
            raise argparse.ArgumentTypeError("give at least one value")
        return values

    return parse


def _positive(text: str) -> int:
    (value,) = _listed(int)(text)
    return value


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    whole, switch = _listed(int), _listed(str, ("off", "on"))
    add("--model", default="nano", help="a preset: nano, nano-moe, tiny, ...")
    add("--lines", type=_listed(str, LINES), default=list(LINES), help="of A, B, C, D, M")
    add("--sharding", type=_listed(str, ("fsdp", "hsdp")), default=["fsdp"], help="fsdp, hsdp")
    add(
        "--shard-size",
        type=whole,
        help="hsdp: data-parallel ranks of a replica; half of them when not given, so two replicas",
    )
    add("--zero-stage", type=_listed(int, (1, 2, 3)), default=[3], help="of 1, 2, 3")
    add("--tp", type=whole, default=[1], help="tensor-parallel ranks")
    add("--ranks", type=_positive, default=4, help="processes")
    add("--steps", type=_positive, default=20)
    add("--dtype", choices=DTYPES, default="fp64", help="of weights, gradients and arithmetic")
    add("--optimizer", choices=OPTIMIZERS, default="muon", help="of matrices; line A has adam")
    add("--accumulation", type=whole, default=[1], help="micro-batches of a step")
    add(
        "--gradient-reduction",
        type=_listed(str, ("micro-batch", "step")),
        default=["micro-batch"],
        help="micro-batch, step: when accumulated gradients are reduced",
    )
    add("--recompute", type=switch, nargs="?", const=["on"], default=["off"], help="all layers")
    add("--sequence-parallel", type=switch, nargs="?", const=["on"], default=["off"])
    add(
        "--publish",
        type=_listed(str, ("async", "sync")),
        default=["async"],
        help="async, sync: how owners on hsdp send new weights",
    )
    add(
        "--collectives",
        type=_listed(str, COLLECTIVES),
        default=[None],
        help=f"of {', '.join(COLLECTIVES)}; the line's own when not given",
    )
    add("--owner-planner", type=_listed(str, POLICIES), default=[None])
    add("--owner-unit-threshold", type=int, help="the preset's when not given")
    add("--batch", type=_positive, help="samples of a step; as few as divide when not given")
    add("--length", type=_positive, default=16, help="tokens of a sample")
    add("--loss-tolerance", type=float, help="relative; 1e-9 in fp64, 1e-4 in fp32")
    add("--norm-tolerance", type=float, help="absolute; 1e-9 in fp64, not judged in fp32")
    add("--weight-tolerance", type=float, help="absolute; 1e-9 in fp64, not judged in fp32")
    add("--timeout", type=float, default=600.0, help="seconds of silence that count as hung")
    add("--fault", choices=FAULTS, help="break rank 0 in the first case, to see it noticed")
    add_json_flag(parser, __file__)
    return parser


def tolerance_of(options: argparse.Namespace) -> Tolerance:
    """The defaults of the dtype, with what was given."""
    values = asdict(TOLERANCES[options.dtype])
    for name in values:
        given = getattr(options, f"{name}_tolerance")
        values[name] = values[name] if given is None else given
    return Tolerance(**values)


# --- the cases -----------------------------------------------------------------------------------


def grids(options: argparse.Namespace, sharding: str, tp: int) -> Iterator[tuple[int, int] | str]:
    """(replicas, shards) of the grids that were asked for, or why there is none."""
    places, rest = divmod(options.ranks, tp)
    if rest:
        yield f"{sharding} tp {tp}: does not divide {options.ranks} ranks"
    elif sharding == "fsdp":
        yield 1, places
    elif places == 1:
        yield f"hsdp tp {tp}: one data-parallel rank has no replica"
    else:
        for size in options.shard_size or [places // 2]:
            if places % size:
                yield f"hsdp tp {tp} shard size {size}: does not divide {places} ranks"
            else:
                yield places // size, size


def build_cases(options: argparse.Namespace) -> tuple[list[Case], list[dict[str, str]]]:
    """The cases to run, each once, and those that do not exist: ``case`` and ``reason``."""
    cases: dict[Case, None] = {}
    missing: dict[str, str] = {}
    layouts = itertools.product(options.lines, options.sharding, options.zero_stage, options.tp)
    for line, sharding, stage, tp in layouts:
        for grid in grids(options, sharding, tp):
            if isinstance(grid, str):
                missing[f"line {line} {grid.partition(':')[0]}"] = grid.partition(": ")[2]
                continue
            for case in _variants(options, line, stage, tp, *grid):
                reason = not_applicable(case)
                if reason is None:
                    cases[case] = None
                else:
                    missing[case.name] = reason
    return list(cases), [{"case": name, "reason": why} for name, why in missing.items()]


def _variants(
    options: argparse.Namespace, line: str, stage: int, tp: int, replicas: int, shards: int
) -> Iterator[Case]:
    """Everything that is not the grid; what a case has no use for is left out of it."""
    for (
        accumulation,
        reduction,
        recompute,
        sequence,
        publish,
        collectives,
        planner,
    ) in itertools.product(
        options.accumulation,
        options.gradient_reduction,
        options.recompute,
        options.sequence_parallel,
        options.publish,
        options.collectives,
        options.owner_planner,
    ):
        yield Case(
            line=line,
            replicas=replicas,
            shards=shards,
            tp=tp,
            zero_stage=stage,
            sequence_parallel=sequence == "on" and tp > 1,
            publish=publish if replicas > 1 and line in "CD" else None,
            collectives=collectives,
            planner=planner,
            gradient_reduction=reduction if accumulation > 1 else "micro-batch",
            unit_threshold=options.owner_unit_threshold,
            training=Training(
                model=options.model,
                optimizer=options.optimizer,
                steps=options.steps,
                accumulation=accumulation,
                recompute=recompute == "on",
                dtype=DTYPES[options.dtype],
                batch=options.batch,
                length=options.length,
            ),
        )


# --- figures -------------------------------------------------------------------------------------


def case_figures(outcome: Outcome, tolerance: Tolerance) -> dict[str, Any]:
    """The entry of a case; a difference that is not finite, or that an error prevented, is null."""
    difference = outcome.difference
    values = [None, None, None, None]
    if difference is not None:
        values = [difference.loss, difference.norm, difference.weight, difference.seconds]
    loss, norm, weight, seconds = (
        value if value is not None and math.isfinite(value) else None for value in values
    )
    breaches = tolerance.breaches(outcome)
    return {
        **outcome.case.as_dict(),
        "max_relative_loss_difference": loss,
        "max_norm_difference": norm,
        "max_weight_difference": weight,
        "largest_weight_difference_in": difference.weight_name if difference else None,
        "reference": "its own update of whole matrices"
        if outcome.case.reference.borrowed
        else "textbook",
        "seconds": seconds,
        "passed": not breaches,
        "breaches": breaches,
    }


def print_outcome(outcome: Outcome, tolerance: Tolerance, width: int) -> None:
    """One line of the table; reasons below it."""
    breaches, difference = tolerance.breaches(outcome), outcome.difference
    figures = f"{'':9}  {'':9}  {'':9}  {'':6}"
    if difference is not None:
        figures = (
            f"{difference.loss:9.2e}  {difference.norm:9.2e}  {difference.weight:9.2e}"
            f"  {difference.seconds:6.1f}"
        )
    print(f"{outcome.case.name:<{width}}  {figures}  {'FAILED' if breaches else 'passed'}")
    for breach in breaches:
        print(f"  {breach}")
    sys.stdout.flush()


def write_references(cases: Sequence[Case], folder: Path) -> dict[Training, str]:
    """Run and store the reference of every case, each once."""
    files: dict[Training, str] = {}
    for case in cases:
        if case.reference not in files:
            path = folder / f"reference-{len(files)}.pt"
            torch.save(reference_run(case.reference), path)
            files[case.reference] = str(path)
    return files


def _checked(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> Any:
    options = parser.parse_args(arguments)
    if options.model not in PRESETS:
        parser.error(f"--model {options.model}: choose from {', '.join(PRESETS)}")
    needed = options.ranks * math.lcm(*options.accumulation)
    if options.batch is None:
        options.batch = needed * max(1, 8 // needed)
    if options.batch % needed:
        parser.error(
            f"--batch {options.batch}: not a multiple of {needed} (ranks times micro-batches)"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if all cases passed, 1 if not; 2 for a wrong command line."""
    parser = build_parser()
    options = _checked(parser, arguments)
    tolerance, started = tolerance_of(options), time.perf_counter()
    cases, missing = build_cases(options)
    for entry in missing:
        print(f"not applicable: {entry['case']}: {entry['reason']}")
    if not cases:
        parser.error("no combination of these choices exists")
    width = max(len(case.name) for case in cases)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="references-") as folder:
        references = write_references(cases, Path(folder))
        print(
            f"{'largest difference in':<{width}}  {'loss':>9}  {'norm':>9}  {'weight':>9}  {'s':>6}"
        )
        outcomes = run_on_ranks(
            cases,
            references,
            timeout=options.timeout,
            fault=options.fault,
            done=lambda outcome: print_outcome(outcome, tolerance, width),
        )
    figures = [case_figures(outcome, tolerance) for outcome in outcomes]
    failed = [entry["name"] for entry in figures if not entry["passed"]]
    seconds = time.perf_counter() - started
    print(f"{len(cases) - len(failed)} of {len(cases)} cases passed in {seconds:.0f} s")
    if failed:
        print("FAILED: " + "; ".join(failed), file=sys.stderr)
    if options.json:
        document = {
            "model": options.model,
            "ranks": options.ranks,
            "steps": options.steps,
            "dtype": options.dtype,
            "tolerance": asdict(tolerance),
            "passed": not failed,
            "seconds": seconds,
            "cases": figures,
            "not_applicable": missing,
        }
        write_json(options.json, __file__, document)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
