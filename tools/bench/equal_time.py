"""Muon against AdamW at equal time, by validation loss.

Both train the same decoders (``tiny`` and ``nano``) on the same ranks and line, from the same
weights on the main job's corpus, under the same batch, clipping, decay and shape of schedule. Time
is steps times the time of a step, and that is measured apart, in interleaved blocks of both in one
process group, so that other load hits both alike and the training itself may run beside it. AdamW
gets a number of steps; Muon gets the steps that fit into the same time, fewer ones, and its
schedule ends there. Each takes the best of five learning rates, found on the first seed, and is
compared over three: seeds differ by initial weights and samples.

    python tools/bench/equal_time.py --json equal_time.json

Beside the figures it draws the curves, ``equal_time.png`` here (matplotlib). A sweep takes some 40
minutes of one core; with ``--resume FILE`` every finished run is kept there and a sweep that was
ended goes on. Invariant: a run is taken from that file only if all that decides it is equal.
Tested by ``tests/tools/test_equal_time.py``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megamuon.console import run_script  # noqa: E402
from megamuon.data.build import DataSpec, build_train_valid_test  # noqa: E402
from megamuon.data.tokenizer import ByteTokenizer  # noqa: E402
from tools.bench.common import machine_facts, run_bench_ranks, warn_if_busy  # noqa: E402
from tools.bench.equal_time_ranks import OPTIMIZERS, Budget, Plan, work  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402
from tools.pretrain_default import Settings as Job  # noqa: E402
from tools.pretrain_default import prepare_data  # noqa: E402

SPLIT = "95,4,1"
STEPS = {"tiny": 120, "nano": 300}  # of AdamW
# Of each optimizer five, a factor of 2 apart, around its best.
RATES = {
    "tiny": {
        "muon": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2),
        "adamw": (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2),
    },
    "nano": {"muon": (1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1), "adamw": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)},
}
SEEDS = 3
VALIDATION = 64  # samples


def corpus(options: argparse.Namespace, plan: Plan, budget: Budget) -> DataSpec:
    """Samples enough for each seed to see its own; tokenized and indexed here if need be."""
    prefix = prepare_data(Job(runs=options.runs.resolve(), files=options.files))
    tokenizer = ByteTokenizer()
    data = DataSpec(
        sequence_length=plan.length,
        samples=(plan.seeds * budget.steps * plan.samples, plan.validation, 0),
        eod=tokenizer.eod,
        vocab_size=tokenizer.vocab_size,
        data_path=(prefix,),
        split=SPLIT,
    )
    build_train_valid_test(data)
    return data


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The runs of one model, by the key of ``equal_time_ranks.key``, and the times of a step."""

    times: dict[str, Any]
    runs: dict[str, dict[str, Any]]


def compared(done: Finished) -> dict[str, Any]:
    """The best rate of each optimizer on the first seed, its losses over the seeds, their ratio."""
    entry: dict[str, Any] = {"step_time": done.times}
    for name in OPTIMIZERS:
        runs = [run for run in done.runs.values() if run["optimizer"] == name]
        by_rate = {run["rate"]: run["curve"][-1][1] for run in runs if run["seed"] == 0}
        best = min(by_rate, key=lambda rate: _or_infinity(by_rate[rate]))
        chosen = sorted((run for run in runs if run["rate"] == best), key=lambda run: run["seed"])
        losses = [_or_infinity(run["curve"][-1][1]) for run in chosen]
        entry[name] = {
            "steps": chosen[0]["steps"],
            "seconds": chosen[0]["curve"][-1][0],
            "loss_by_rate": {f"{rate:g}": loss for rate, loss in sorted(by_rate.items())},
            "best_rate": best,
            "best_is_at_the_edge": best in (min(by_rate), max(by_rate)),
            "losses": losses,
            "loss": fmean(losses),
            "curves": [run["curve"] for run in chosen],
        }
    muon, adamw = entry["muon"], entry["adamw"]
    pairs = zip(muon["losses"], adamw["losses"], strict=True)
    entry["muon_over_adamw_by_seed"] = [ours / theirs for ours, theirs in pairs]
    entry["muon_over_adamw"] = muon["loss"] / adamw["loss"]
    return entry


def _or_infinity(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def document_of(plan: Plan, models: dict[str, dict[str, Any]], png: Path | None) -> dict[str, Any]:
    """All figures."""
    return {
        "muon_over_adamw": {name: entry["muon_over_adamw"] for name, entry in models.items()},
        "png": None if png is None else str(png),
        **asdict(plan),
        "machine": machine_facts(),
        "models": models,
    }


def print_report(document: dict[str, Any]) -> None:
    """A few lines for people."""
    print(
        f"{document['samples']} x {document['length']} tokens a step, {document['ranks']} ranks,"
        f" line {document['line']}; validation loss at equal time, mean over {document['seeds']}"
        " seeds"
    )
    for name, entry in document["models"].items():
        times = entry["step_time"]
        print(
            f"  {name}: a step of Muon takes {times['muon_over_adamw']:.3f} x AdamW's"
            f" {1e3 * times['adamw_seconds']:.1f} ms (--ns-dtype auto is {times['ns_dtype']})"
        )
        for optimizer in OPTIMIZERS:
            own = entry[optimizer]
            edge = ", the edge of the rates" if own["best_is_at_the_edge"] else ""
            losses = " ".join(f"{loss:.4f}" for loss in own["losses"])
            print(
                f"    {optimizer:<6} {own['steps']:>4} steps, {own['seconds']:.1f} s:"
                f" {own['loss']:.4f} ({losses}) at {own['best_rate']:g}{edge}"
            )
        print(f"    muon over adamw: {entry['muon_over_adamw']:.4f}")


def plot(document: dict[str, Any], path: Path) -> None:
    """A column for each model: validation loss over time above, loss over the rate below."""
    from matplotlib.figure import Figure

    models = document["models"]
    figure = Figure(figsize=(5.5 * len(models), 7.5), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False)
    colours = {"muon": "tab:red", "adamw": "tab:blue"}
    for column, (name, entry) in enumerate(models.items()):
        above, below = axes[0][column], axes[1][column]
        for optimizer in OPTIMIZERS:
            own, colour = entry[optimizer], colours[optimizer]
            for index, curve in enumerate(own["curves"]):
                seconds, losses = zip(*curve, strict=True)
                label = f"{optimizer}, rate {own['best_rate']:g}: {own['loss']:.4f}"
                label = None if index else label
                above.plot(seconds, losses, color=colour, linewidth=1, marker=".", label=label)
            rates = [float(rate) for rate in own["loss_by_rate"]]
            finals = list(own["loss_by_rate"].values())
            below.plot(rates, finals, color=colour, marker="o", label=optimizer)
        # The first points would hide the rest of the curves.
        losses = [loss for o in OPTIMIZERS for c in entry[o]["curves"] for _, loss in c[1:]]
        finite = [loss for loss in losses if math.isfinite(loss)]
        if finite:
            above.set_ylim(min(finite) - 0.05, max(finite) + 0.05)
        above.set(
            title=f"{name}: {document['seeds']} seeds at equal time",
            xlabel="seconds (steps x time of a step)",
            ylabel="validation loss (nats per byte)",
        )
        below.set(
            title="the rates, first seed",
            xlabel="peak learning rate",
            ylabel="final validation loss",
            xscale="log",
        )
        above.legend()
        below.legend()
        rates = sorted({float(rate) for o in OPTIMIZERS for rate in entry[o]["loss_by_rate"]})
        below.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
        below.set_xticks([], minor=True)
    figure.savefig(path, dpi=130)


# --- the command ---------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags.  Refuses curves that nobody could draw before the training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--models", default="tiny,nano", help="one or both")
    add("--ranks", type=int, default=2, help="Gloo ranks on this machine")
    add("--line", choices=("C", "D"), default="D")
    add("--rates", help="of both optimizers, as 0.01,0.02; default: five of each")
    add("--seeds", type=int, default=SEEDS)
    add("--samples", type=int, default=8, help="of a step, over all ranks")
    add("--length", type=int, default=256, help="tokens of a sample")
    add("--steps", help="of AdamW, for each of --models; default: 120 of tiny, 300 of nano")
    add("--blocks", type=int, default=8, help="interleaved blocks of steps that are timed")
    add("--runs", type=Path, default=ROOT / "runs", help="where the corpus is kept")
    add("--files", type=int, help="use only so many source files")
    add("--resume", type=Path, metavar="FILE", help="keep finished runs there, and go on from it")
    add_json_flag(parser, __file__)
    add("--png", type=Path, help="draw there; default: beside --json")
    options = parser.parse_args(argv)
    options.models = options.models.split(",")
    if set(options.models) - set(STEPS) or len(set(options.models)) != len(options.models):
        parser.error(f"--models {','.join(options.models)}: choose of {','.join(STEPS)}")
    try:
        if options.rates is not None:
            options.rates = tuple(sorted({float(rate) for rate in options.rates.split(",")}))
    except ValueError:
        parser.error(f"--rates {options.rates}: give numbers, as 0.01,0.02")
    if options.ranks < 1 or options.samples % options.ranks or options.seeds < 1:
        parser.error("--samples must be a multiple of --ranks, and --seeds at least 1")
    given = options.steps.split(",") if options.steps else [str(STEPS[m]) for m in options.models]
    if len(given) != len(options.models) or not all(n.isdecimal() and int(n) > 9 for n in given):
        parser.error(f"--steps {options.steps}: give a number of 10 or more for each of --models")
    options.steps = dict(zip(options.models, map(int, given), strict=True))
    if options.png is None and options.json is not None:
        options.png = options.json.with_suffix(".png")
    if options.png is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error('the curves need matplotlib: pip install "matplotlib>=3.8"')
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Time the steps, train, compare, draw; 1 where Muon's loss is above AdamW's."""
    options = parse(argv)
    warn_if_busy()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    plan = Plan(
        ranks=options.ranks,
        line=options.line,
        seeds=options.seeds,
        samples=options.samples,
        length=options.length,
        validation=VALIDATION,
        blocks=options.blocks,
    )
    models: dict[str, dict[str, Any]] = {}
    for name in options.models:
        rates = RATES[name]
        if options.rates is not None:
            rates = dict.fromkeys(OPTIMIZERS, options.rates)
        budget = Budget(model=name, steps=options.steps[name], rates=rates)
        data = corpus(options, plan, budget)
        with tempfile.TemporaryDirectory() as folder:
            arguments = (plan, budget, data, options.resume)
            found = run_bench_ranks(work, plan.ranks, *arguments, folder=Path(folder), timeout=1e6)[
                0
            ]
        models[name] = compared(Finished(**found))
    document = document_of(plan, models, options.png)
    print_report(document)
    if options.png:
        plot(document, options.png)
    write_json(options.json, __file__, document)
    worse = [name for name, ratio in document["muon_over_adamw"].items() if not ratio <= 1]
    if worse:
        print(f"muon's loss is above adamw's on {', '.join(worse)}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
