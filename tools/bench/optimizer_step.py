"""Optimizer step on owners against the two ways to run Muon on FSDP2 shards.

Five systems train the same stack of linear layers in one process group, interleaved, with one
formula (the standard Newton-Schulz form, Polar Express coefficients, FP32), so that only the
distribution differs:

  owners        this runtime, line C: every matrix is updated once, by its owner
  owners_d      line D: the same owners, gradients and weights moved by operators in shared memory
  owners_m      line M: the same with MatrixFSDP's planner, which gives owners single matrices by
                their size, and segments sent from owner to rank
  fsdp2_muon    the iteration on FSDP2 ``DTensor``s, as ``torch.optim.Muon`` runs it: every product
                is a DTensor operation
  gather_once   one all-gather of all momenta, then Newton-Schulz of every matrix on every rank

With ``--stock``, ``torch.optim.Muon`` itself (BF16) is timed beside them on the small setting, for
information: BF16 is emulated on most CPUs, which would flatter us. Collectives inside our step are
counted as torch dispatches them. ``--ranks`` takes a list: every number of ranks is run, the result
of each is under ``by_ranks``, and the figures at the top are those of the last.

    python tools/bench/optimizer_step.py --ranks 2,4,8 --json out.json

Tested by ``tests/tools/test_optimizer_step.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megamuon.console import run_script  # noqa: E402
from tools.bench.common import count_collectives, run_bench_ranks, warn_if_busy  # noqa: E402
from tools.bench.optimizer_systems import (  # noqa: E402
    Fsdp2,
    GatherOnce,
    Owners,
    OwnersD,
    OwnersM,
    StockMuon,
    System,
)

LINES = {"line_c": "owners", "line_d": "owners_d", "line_m": "owners_m"}
SETTINGS = {
    # name: (layers, [(out, in) of each layer's matrices])
    "many_small": (12, [(128, 128), (128, 128), (256, 128), (128, 256)]),
    "few_large": (4, [(1024, 1024), (1024, 1024)]),
}


def timed(system: System, rank: int, step: int) -> float:
    """Seconds of one optimizer step, the slowest rank's."""
    system.backward(rank, step)
    dist.barrier()
    start = time.perf_counter()
    system.step()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def work(
    rank: int,
    world: int,
    settings: dict[str, tuple[int, list[tuple[int, int]]]],
    repeats: int,
    stock: bool,
) -> dict[str, object]:
    """All settings on one rank; rank 0's result is used."""
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    kinds: dict[str, Callable[..., System]] = {
        "owners": Owners,
        "owners_d": OwnersD,
        "owners_m": OwnersM,
        "fsdp2_muon": Fsdp2,
        "gather_once": GatherOnce,
    }
    for name, (layers, shapes) in settings.items():
        systems = {kind: build(layers, shapes) for kind, build in kinds.items()}
        for index, system in enumerate(systems.values()):
            for _ in range(system.warm_up):  # on different data
                timed(system, rank, index)
        times: dict[str, list[float]] = {kind: [] for kind in systems}
        for step in range(repeats):
            for kind, system in systems.items():
                times[kind].append(timed(system, rank, 10 + step))
        systems["owners"].backward(rank, 99)
        with count_collectives() as counted:
            systems["owners"].step()
        for system in systems.values():
            if isinstance(system, Owners):
                system.close()
        medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
        entry: dict[str, object] = {
            "matrices": layers * len(shapes),
            "shapes": [list(shape) for shape in shapes],
            "seconds": medians,
            "speedup_vs_fsdp2_muon": medians["fsdp2_muon"] / medians["owners"],
            "speedup_vs_gather_once": medians["gather_once"] / medians["owners"],
            **{
                f"{line}_over_fsdp2_muon": ratio(times[kind], times["fsdp2_muon"])
                for line, kind in LINES.items()
            },
            "line_d_over_line_c": ratio(times["owners_d"], times["owners"]),
            "collectives_in_our_step": counted,
            "largest_weight_difference": _difference(layers, shapes, kinds, rank),
        }
        if stock and name == "many_small":
            system = StockMuon(layers, shapes)
            seconds = timed(system, rank, 50)
            entry["stock_muon_seconds"] = seconds
            for line, kind in LINES.items():
                entry[f"{line}_over_stock_muon"] = medians[kind] / seconds
        results[name] = entry
    return results


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over repeats of the ratio of times: drifts of the machine hit both alike."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _difference(
    layers: int, shapes: list[tuple[int, int]], kinds: dict[str, Callable[..., System]], rank: int
) -> float:
    """After one step from equal weights and gradients, how far the systems are apart: they compute
    the same.
    """
    ends = []
    for build in kinds.values():
        system = build(layers, shapes)
        system.backward(rank, 7)
        system.step()
        ends.append([w.detach().clone() for w in system.weights()])
        if isinstance(system, Owners):
            system.close()
    return max(
        float((a - b).abs().max())
        for other in ends[1:]
        for a, b in zip(ends[0], other, strict=True)
    )


def run(ranks: int, repeats: int, stock: bool) -> dict[str, Any]:
    """The result of one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_bench_ranks(work, ranks, SETTINGS, repeats, stock, folder=Path(folder))[0]
    norm_scalars = 1  # the one collective that a step may have on FSDP without TP
    counted = max(sum(r["collectives_in_our_step"].values()) for r in results.values())
    return {
        "ranks": ranks,
        "repeats": repeats,
        "settings": results,
        "speedup_vs_fsdp2_muon": min(r["speedup_vs_fsdp2_muon"] for r in results.values()),
        "speedup_vs_gather_once": min(r["speedup_vs_gather_once"] for r in results.values()),
        **{
            key: max(r[key] for r in results.values())
            for key in (f"{line}_over_fsdp2_muon" for line in LINES)
        },
        "optimizer_collectives": counted - norm_scalars,
    }


def print_document(document: dict[str, Any]) -> None:
    """The table of one number of ranks."""
    print(
        f"optimizer step, {document['ranks']} ranks, median of {document['repeats']} (seconds)",
        flush=True,
    )
    for name, entry in document["settings"].items():
        seconds = "  ".join(f"{kind} {value:.4f}" for kind, value in entry["seconds"].items())
        print(
            f"  {name:<11} {entry['matrices']:>3} matrices  {seconds}"
            f"  | owners are {entry['speedup_vs_fsdp2_muon']:.2f} x fsdp2_muon,"
            f" {entry['speedup_vs_gather_once']:.2f} x gather_once;"
            f" weights agree to {entry['largest_weight_difference']:.1e}"
        )
        print(
            f"              time over fsdp2_muon: {lines_over(entry, 'fsdp2_muon')};"
            f" line D over line C {entry['line_d_over_line_c']:.3f}"
        )
        if "stock_muon_seconds" in entry:
            print(
                f"              torch.optim.Muon (BF16): {entry['stock_muon_seconds']:.3f};"
                f" over it {lines_over(entry, 'stock_muon')}"
            )
    print(f"collectives in our step beyond the norm scalar: {document['optimizer_collectives']}")


def lines_over(entry: dict[str, Any], other: str) -> str:
    """``line C 0.123, ...``"""
    return ", ".join(
        f"line {line[-1].upper()} {entry[f'{line}_over_{other}']:.3f}" for line in LINES
    )


def rank_counts(text: str) -> list[int]:
    """``2,4,8``.  Raises ArgumentTypeError for what the settings cannot run on."""
    rows = min(out for _, shapes in SETTINGS.values() for out, _ in shapes)
    found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    for count in found:
        if count < 1 or rows % count:  # gather_once cuts matrices into equal shards
            raise argparse.ArgumentTypeError(
                f"{text}: choose divisors of {rows}, the fewest rows of a matrix"
            )
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the settings and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--ranks", type=rank_counts, default=[4], help="Gloo ranks on this machine, or a list")
    add("--repeats", type=int, default=5, help="timed steps per system")
    add("--stock", action="store_true", help="time torch.optim.Muon (BF16) too")
    add("--json", type=Path, help="write the result there")
    options = parser.parse_args(argv)
    warn_if_busy()
    found: dict[str, dict[str, Any]] = {}
    for ranks in options.ranks:
        found[str(ranks)] = run(ranks, options.repeats, options.stock)
        print_document(found[str(ranks)])
    if options.json:
        document = {**found[str(options.ranks[-1])], "by_ranks": found}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
