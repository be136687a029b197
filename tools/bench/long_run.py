"""Two lines compared over hundreds of steps: DMuon-2's long-horizon comparison (7.5).

Owns the long run: lines train one after the other on the same ranks, from the same weights on the
main job's corpus, and the first line once more from a second seed. FP32 arithmetic, gathers and
reductions in BF16. Invariants: all runs read the same samples in the same order under the same
schedule, so that lines differ by their runtime alone, and the second seed by its initial weights
alone. Tested by ``tests/tools/test_long_run.py``.

Example: ``python tools/bench/long_run.py --model nano --steps 300 --json long_run.json``
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from megamuon.baselines.fully_sharded import fully_shard_model  # noqa: E402
from megamuon.console import run_script  # noqa: E402
from megamuon.data.build import AnyDataset, DataSpec, build_train_valid_test, collate  # noqa: E402
from megamuon.data.tokenizer import ByteTokenizer  # noqa: E402
from megamuon.mesh import Mesh  # noqa: E402
from megamuon.models import GPT  # noqa: E402
from megamuon.optim import Schedule, ScheduleConfig  # noqa: E402
from megamuon.runtime import shard  # noqa: E402
from tools.bench.common import run_bench_ranks, warn_if_busy  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402
from tools.pretrain_default import ROOT, prepare_data  # noqa: E402
from tools.pretrain_default import Settings as Job  # noqa: E402
from tools.reference_training import Training, model_config  # noqa: E402
from tools.sharded_training import LINES, Case, not_applicable, runtime_config  # noqa: E402

# The main job's: tools/pretrain_default.py
MAX_LR, MIN_LR, WARMUP, WD = 1e-2, 5e-4, 20, 0.1
SPLIT = "95,4,1"
SEED, SECOND_SEED = 1234, 4321
LIMIT = 0.1  # of the difference between seeds


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: its name in the report, and what runs."""

    name: str
    case: Case


def train(run: Run, rank: int, dataset: AnyDataset) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All steps of one run on one rank; its figures, and the final weights on rank 0."""
    runtime, mesh = build(run.case, rank)
    training = run.case.training
    each = training.batch // mesh.sample_ranks
    schedule = Schedule(schedule_config(training))
    losses = torch.zeros(training.steps, dtype=torch.float64)
    clipped = skipped = 0
    began = time.perf_counter()
    for step in range(training.steps):
        first = step * training.batch + mesh.sample_rank * each
        batch = collate([dataset[index] for index in range(first, first + each)])
        loss = runtime.model(batch["tokens"], labels=batch["labels"]).mean()
        loss.backward()
        result = runtime.step(schedule.lr(), schedule.wd())
        if not result.skipped:
            schedule.advance(training.batch)
        losses[step] = loss.detach()
        clipped += result.gradient_norm > training.clip
        skipped += result.skipped
        if rank == 0 and (step + 1) % max(1, training.steps // 10) == 0:
            text = f"{run.name}: step {step + 1}, rank 0's loss {float(losses[step]):.4f}"
            print(text, f"{time.perf_counter() - began:.0f} s", sep=", ", file=sys.stderr)
    dist.all_reduce(losses)
    weights = {name: whole for name, whole in runtime.full_parameters() if rank == 0}
    runtime.close()
    figures = {
        "line": run.case.line,
        "seed": training.seed,
        "seconds": round(time.perf_counter() - began, 1),
        "clipped_steps": clipped,
        "skipped_steps": skipped,
        "losses": (losses / mesh.world_size).tolist(),
    }
    return figures, weights


def build(case: Case, rank: int) -> tuple[Any, Mesh]:
    """The case's runtime (its model is ``.model``) and mesh.  A collective."""
    mesh = Mesh(
        world_size=case.ranks,
        rank=rank,
        local_rank=rank,
        replicas=case.replicas,
        shards=case.shards,
        device=torch.device("cpu"),
        backend="gloo",
    )
    with torch.device("meta"):
        config = model_config(case.training.model)
        model, template = GPT(config), GPT(config)  # whole weights are made by the second
    make = fully_shard_model if case.line == "A" else shard
    runtime = make(
        model,
        layers=GPT.layer_classes,
        config=replace(
            runtime_config(case), gather_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
        ),
        mesh=mesh,
        initial=template.initialise_,
    )
    return runtime, mesh


def schedule_config(training: Training) -> ScheduleConfig:
    """The main job's schedule over the run's samples."""
    samples = training.steps * training.batch
    return ScheduleConfig(
        max_lr=MAX_LR,
        min_lr=MIN_LR,
        warmup_steps=min(WARMUP, training.steps // 10) * training.batch,
        decay_steps=samples,
        style="cosine",
        start_wd=training.wd,
        end_wd=training.wd,
        wd_steps=samples,
    )


def work(rank: int, world: int, runs: Sequence[Run], data: DataSpec) -> dict[str, Any]:
    """All runs on one rank, one after the other."""
    dataset, _, _ = build_train_valid_test(data)  # the caller has built its indices
    assert dataset is not None
    found: dict[str, Any] = {}
    first: dict[str, Tensor] = {}
    for run in runs:
        figures, weights = train(run, rank, dataset)
        first = first or weights
        figures["weight_difference"] = _distance(weights, first)
        found[run.name] = figures
    return found


def _distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Norm of the difference of two models over the norm of the second.  Not the largest
    difference: where a gradient is 0 but for rounding (key biases), AdamW steps by its sign.
    """
    apart = sum(float((ours[n] - whole).double().square().sum()) for n, whole in theirs.items())
    size = sum(float(whole.double().square().sum()) for whole in theirs.values())
    return math.sqrt(apart / size) if size else 0.0


# --- the report ----------------------------------------------------------------------------------


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Relative difference of each step's loss."""
    return [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]


def comparison(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """A run against the first line's.  Step 0, which no update precedes, is apart."""
    relative = differences(ours["losses"], theirs["losses"])
    later = relative[1:]
    size = max(1, len(later) // 4)
    equal = [relative.index(value) for value in relative if value]
    return {
        "median_relative_difference": median(later),
        "largest_relative_difference": max(later),
        "medians_of_quarters": [
            median(later[start : start + size]) for start in range(0, size * 4, size)
        ],
        "first_loss_identical": relative[0] == 0,
        "first_step_that_differs": equal[0] if equal else None,
        "steps_identical": sum(value == 0 for value in relative),
        "bit_for_bit": not any(relative) and ours["weight_difference"] == 0,
        "final_weight_difference": ours["weight_difference"],
    }


def document_of(runs: Sequence[Run], found: dict[str, Any]) -> dict[str, Any]:
    """All figures.  ``ratio``: the worst line's median over the median between seeds.

    Raises ValueError where a loss is not finite or the seeds do not differ: nothing could be told.
    """
    for name, figures in found.items():
        if not all(map(math.isfinite, figures["losses"])):
            raise ValueError(f"run {name}: a loss is not finite")
    first, *others, second = (run.name for run in runs)
    seeds = comparison(found[second], found[first])
    between = seeds["median_relative_difference"]
    if not between:
        raise ValueError(f"runs {first} and {second} have the same losses: take another --seed")
    lines = {name: comparison(found[name], found[first]) for name in others}
    for entry in lines.values():
        entry["ratio"] = entry["median_relative_difference"] / between
    case = runs[0].case
    training = case.training
    return {
        "model": training.model,
        "optimizer": training.optimizer,
        "steps": training.steps,
        "samples_per_step": training.batch,
        "sequence_length": training.length,
        "grid": f"{case.sharding} {case.replicas}x{case.shards}",
        "zero_stage": case.zero_stage,
        "compared_with": first,
        "seeds": seeds,
        "lines": lines,
        "ratio": max(entry["ratio"] for entry in lines.values()),
        "runs": {
            name: {**figures, "final_loss": figures["losses"][-1]}
            for name, figures in found.items()
        },
    }


def print_report(document: dict[str, Any]) -> None:
    """A few lines for people."""
    print(
        f"{document['model']}, {document['optimizer']}, {document['steps']} steps of"
        f" {document['samples_per_step']} x {document['sequence_length']} tokens,"
        f" {document['grid']}, ZeRO {document['zero_stage']},"
        " FP32 with BF16 gathers and reductions"
    )
    for name, run in document["runs"].items():
        print(
            f"  {name:<14} loss {run['losses'][0]:.4f} -> {run['final_loss']:.4f};"
            f" clipped in {run['clipped_steps']} steps, {run['seconds']:.0f} s"
        )
    first = document["compared_with"]
    print(f"relative difference of the loss from {first}, median over the steps (quarters):")
    entries = [(f"line {name}", entry) for name, entry in document["lines"].items()]
    for name, entry in [*entries, ("second seed", document["seeds"])]:
        quarters = " ".join(f"{100 * value:.5f}" for value in entry["medians_of_quarters"])
        ratio = f"; {entry['ratio']:.4f} of the seeds'" if "ratio" in entry else ""
        print(
            f"  {name:<14} {100 * entry['median_relative_difference']:.5f} % ({quarters}){ratio};"
            f" {entry['steps_identical']} steps to the last bit"
        )
        if entry["bit_for_bit"]:
            print(f"    {name} is {first} bit for bit, weights too: the ratio is 0 by equality")


def plot(document: dict[str, Any], path: Path) -> None:
    """Loss curves above, relative differences below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    first = document["runs"][document["compared_with"]]["losses"]
    for name, run in document["runs"].items():
        above.plot(run["losses"], label=name, linewidth=0.9)
        if run["losses"] is not first:
            relative = differences(run["losses"], first)
            label = f"{name} against {document['compared_with']}"
            below.plot([value or math.nan for value in relative], label=label, linewidth=0.7)
    above.set(ylabel="loss", title=f"{document['model']}, {document['grid']}")
    below.set(xlabel="step", ylabel="relative difference", yscale="log")
    for axes in (above, below):
        axes.legend()
    figure.savefig(path, dpi=130)


# --- the command ---------------------------------------------------------------------------------


def runs_of(options: argparse.Namespace) -> list[Run]:
    """The lines' runs and the first line's second seed.  ValueError where there is no such run."""
    lines = options.lines.split(",")
    if len(set(lines)) != len(lines) or len(lines) < 2 or set(lines) - set(LINES):
        raise ValueError(f"--lines {options.lines}: give two or more of {','.join(LINES)}")
    if "A" in lines and options.optimizer != "adam":
        raise ValueError("line A trains with AdamW: compare it under --optimizer adam")
    shards = options.ranks
    if options.sharding == "hsdp":
        shards = options.shard_size or options.ranks // 2
    elif options.shard_size not in (None, options.ranks):
        raise ValueError("--shard-size goes with --sharding hsdp")
    if shards < 1 or options.ranks % shards or options.samples % options.ranks:
        raise ValueError(
            f"--ranks {options.ranks} must be a multiple of the shard size {shards}, and"
            f" --samples {options.samples} one of --ranks"
        )
    if options.steps < 5:
        raise ValueError(f"--steps {options.steps}: take 5 or more")
    runs = []
    for line, seed in [*((line, SEED) for line in lines), (lines[0], options.seed)]:
        training = Training(
            model=options.model,
            optimizer=options.optimizer,
            steps=options.steps,
            dtype=torch.float32,
            wd=WD,
            batch=options.samples,
            length=options.length,
            seed=seed,
        )
        replicas = options.ranks // shards
        case = Case(
            line=line,
            replicas=replicas,
            shards=shards,
            zero_stage=options.zero_stage,
            training=training,
        )
        if reason := not_applicable(case):
            raise ValueError(reason)
        runs.append(Run(name=line if seed == SEED else f"{line}, seed {seed}", case=case))
    if options.seed == SEED:
        raise ValueError(f"--seed {SEED} is the seed of the lines: take another one")
    return runs


def corpus(options: argparse.Namespace) -> DataSpec:
    """The main job's training set; tokenized and indexed here where that is still to do."""
    prefix = prepare_data(Job(runs=options.runs.resolve(), files=options.files))
    tokenizer = ByteTokenizer()
    data = DataSpec(
        sequence_length=options.length,
        samples=(options.steps * options.samples, 0, 0),
        eod=tokenizer.eod,
        vocab_size=tokenizer.vocab_size,
        data_path=(prefix,),
        split=SPLIT,
    )
    build_train_valid_test(data)
    return data


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags.  Refuses a --png that nobody could draw before hours of training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", choices=("nano", "tiny"), default="nano")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lines", default="B,C", help="two or more; the first is compared with")
    parser.add_argument("--optimizer", choices=("muon", "adam"), default="muon", help="of matrices")
    parser.add_argument("--ranks", type=int, default=4, help="Gloo ranks on this machine")
    parser.add_argument("--sharding", choices=("fsdp", "hsdp"), default="fsdp")
    parser.add_argument(
        "--shard-size", type=int, help="ranks of a replica, with hsdp; default: half"
    )
    parser.add_argument("--zero-stage", type=int, choices=(2, 3), default=3)
    parser.add_argument("--samples", type=int, default=16, help="of a step, over all ranks")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--seed", type=int, default=SECOND_SEED, help="of the first line's rerun")
    parser.add_argument("--limit", type=float, default=LIMIT, help="exit 1 above this ratio")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where the corpus is kept")
    parser.add_argument("--files", type=int, help="use only so many source files")
    add_json_flag(parser, __file__)
    parser.add_argument("--png", type=Path, help="draw losses and differences there (matplotlib)")
    options = parser.parse_args(argv)
    if options.png:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--png needs matplotlib: pip install matplotlib, or leave it out")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare, report; 1 where a line is farther from the first than ``--limit`` allows."""
    options = parse(argv)
    try:
        runs = runs_of(options)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    warn_if_busy()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    data = corpus(options)
    with tempfile.TemporaryDirectory() as folder:
        # No result comes before all runs have ended.
        ranks = run_bench_ranks(work, options.ranks, runs, data, folder=Path(folder), timeout=1e6)
    document = document_of(runs, ranks[0])
    print_report(document)
    write_json(options.json, __file__, document)
    if options.png:
        plot(document, options.png)
    if document["ratio"] > options.limit:
        print(f"ratio {document['ratio']:.4f} is above {options.limit}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
