"""Optimizer step on owners against the ways to run Muon on FSDP2 shards.

Seven systems train the same stack of linear layers in one process group, interleaved, with one
formula (the standard Newton-Schulz form, Polar Express coefficients, FP32), so that only the
distribution differs:

  owners           this runtime, line C: every matrix is updated once, by its owner
  owners_d         line D: the same owners, bytes are moved by operators in shared memory
  owners_m         line M: the same with MatrixFSDP's planner, which gives owners single matrices
                   by their size, and segments sent from owner to rank
  dealt_muon       the usual way, as Moonlight's and Dion's: matrices are dealt to ranks by the
                   time of their iteration, one all-to-all brings each momentum whole to one rank,
                   one brings the updates back
  dealt_in_rounds  the same in four rounds whose messages and iterations overlap
  fsdp2_muon       the iteration on FSDP2 ``DTensor``s, as ``torch.optim.Muon`` runs it: every
                   product is a DTensor operation, which nobody has tuned
  gather_once      one all-gather of all momenta, then Newton-Schulz of every matrix on every rank

The figure to read is ``speedup_vs_dealt_muon``: the time of the faster dealt system over that of
owners. The optimizer step is not all that they pay: owners' gathers and reductions are uneven, and
dealt Muon sends two all-to-alls more. So the forward and backward pass is timed too, and the bytes
of both are counted, as the algorithms need them and as Gloo sends them (``rest`` and ``step``);
``whole_step_speedup_vs_dealt_muon`` is that of both together. On Gloo FSDP2's ``rest`` is dearer
than on NCCL: ``reduce_scatter_tensor`` moves an all-reduce's bytes there, and FSDP2 gathers
synchronously on CPUs.

With ``--stock``, ``torch.optim.Muon`` itself (BF16) is timed beside them on the small setting, for
information: on CPUs without AMX or AVX512-BF16 its BF16 is emulated, which flatters us.
Collectives inside our step are counted as torch dispatches them. ``--ranks`` takes a list: every
number of ranks is run, the result of each is under ``by_ranks``, and the figures at the top are
those of the last.

    python tools/bench/optimizer_step.py --ranks 2,4,8 --json out.json

Tested by ``tests/tools/test_optimizer_step.py``.
"""

from __future__ import annotations

import argparse
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
from tools.bench.common import run_bench_ranks, warn_if_busy  # noqa: E402
from tools.bench.optimizer_systems import (  # noqa: E402
    Dealt,
    DealtInRounds,
    Fsdp2,
    GatherOnce,
    Owners,
    OwnersD,
    OwnersM,
    StockMuon,
    System,
)
from tools.bench.wire import count_bytes  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

LINES = {"line_c": "owners", "line_d": "owners_d", "line_m": "owners_m"}
SETTINGS = {
    # name: (layers, [(out, in) of each layer's matrices])
    "many_small": (12, [(128, 128), (128, 128), (256, 128), (128, 256)]),
    "few_large": (4, [(1024, 1024), (1024, 1024)]),
}


KINDS: dict[str, Callable[..., System]] = {
    "owners": Owners,
    "owners_d": OwnersD,
    "owners_m": OwnersM,
    "dealt_muon": Dealt,
    "dealt_in_rounds": DealtInRounds,
    "fsdp2_muon": Fsdp2,
    "gather_once": GatherOnce,
}
DEALT = ("dealt_muon", "dealt_in_rounds")
# Line D's bytes go through shared memory, and DTensors' through functional collectives.
COUNTED = [kind for kind in KINDS if kind not in ("owners_d", "fsdp2_muon")]
PHASES = ("rest", "step")


def timed(system: System, rank: int, step: int) -> dict[str, float]:
    """Seconds of the forward and backward pass with its gathers and reductions (``rest``) and of
    the optimizer step (``step``), the slowest rank's each.
    """
    marks = []
    for work in (lambda: system.backward(rank, step), system.step):
        dist.barrier()
        start = time.perf_counter()
        work()
        marks.append(time.perf_counter() - start)
    seconds = torch.tensor(marks, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return dict(zip(PHASES, seconds.tolist(), strict=True))


def sent(system: System, rank: int) -> dict[str, dict[str, float]]:
    """Bytes of one step by phase, the mean over ranks: as the algorithms need them, and as Gloo
    sends them.
    """
    found = {}
    for phase, work in (("rest", lambda: system.backward(rank, 98)), ("step", system.step)):
        with count_bytes() as counter:
            work()
        total = torch.tensor(
            [sum(call.nbytes for call in counter.calls), sum(call.wire for call in counter.calls)],
            dtype=torch.float64,
        )
        dist.all_reduce(total)
        needed, wire = (total / dist.get_world_size()).tolist()
        found[phase] = {"needed": needed, "on_the_wire": wire}
    return found


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
    for name, (layers, shapes) in settings.items():
        systems = {kind: build(layers, shapes) for kind, build in KINDS.items()}
        for index, system in enumerate(systems.values()):
            for _ in range(system.warm_up):  # on different data
                timed(system, rank, index)
        times: dict[str, dict[str, list[float]]] = {
            phase: {kind: [] for kind in systems} for phase in PHASES
        }
        for step in range(repeats):
            for kind, system in systems.items():
                for phase, seconds in timed(system, rank, 10 + step).items():
                    times[phase][kind].append(seconds)
        systems["owners"].backward(rank, 99)
        with count_bytes() as counted:
            systems["owners"].step()
        moved = {kind: sent(systems[kind], rank) for kind in COUNTED}
        for system in systems.values():
            if isinstance(system, Owners):
                system.close()
        entry = entry_of(times)
        entry.update(
            matrices=layers * len(shapes),
            shapes=[list(shape) for shape in shapes],
            bytes=moved,
            collectives_in_our_step=counted.by_operation(),
            largest_weight_difference=_difference(layers, shapes, KINDS, rank),
        )
        if stock and name == "many_small":
            system = StockMuon(layers, shapes)
            seconds = timed(system, rank, 50)["step"]
            entry["stock_muon_seconds"] = seconds
            for line, kind in LINES.items():
                entry[f"{line}_over_stock_muon"] = entry["seconds"][kind] / seconds
        results[name] = entry
    return results


def entry_of(times: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Medians, and ratios paired by repeat, of one setting."""
    steps, rest = times["step"], times["rest"]
    whole = {kind: [a + b for a, b in zip(steps[kind], rest[kind], strict=True)] for kind in steps}
    medians = {kind: statistics.median(seconds) for kind, seconds in steps.items()}
    tuned = min(DEALT, key=lambda kind: medians[kind])
    return {
        "seconds": medians,
        "rest_seconds": {kind: statistics.median(seconds) for kind, seconds in rest.items()},
        "whole_seconds": {kind: statistics.median(seconds) for kind, seconds in whole.items()},
        "faster_dealt": tuned,
        "speedup_vs_dealt_muon": ratio(steps[tuned], steps["owners"]),
        "whole_step_speedup_vs_dealt_muon": ratio(whole[tuned], whole["owners"]),
        "line_d_speedup_vs_dealt_muon": ratio(steps[tuned], steps["owners_d"]),
        "speedup_vs_fsdp2_muon": medians["fsdp2_muon"] / medians["owners"],
        "speedup_vs_gather_once": medians["gather_once"] / medians["owners"],
        **{
            f"{line}_over_fsdp2_muon": ratio(steps[kind], steps["fsdp2_muon"])
            for line, kind in LINES.items()
        },
        "line_d_over_line_c": ratio(steps["owners_d"], steps["owners"]),
    }


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
        "speedup_vs_dealt_muon": min(r["speedup_vs_dealt_muon"] for r in results.values()),
        "whole_step_speedup_vs_dealt_muon": min(
            r["whole_step_speedup_vs_dealt_muon"] for r in results.values()
        ),
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
        print(
            f"  {name}, {entry['matrices']} matrices: owners are"
            f" {entry['speedup_vs_dealt_muon']:.2f} x {entry['faster_dealt']} (line D"
            f" {entry['line_d_speedup_vs_dealt_muon']:.2f}), with the forward and backward pass"
            f" {entry['whole_step_speedup_vs_dealt_muon']:.2f} x;"
            f" {entry['speedup_vs_fsdp2_muon']:.2f} x fsdp2_muon,"
            f" {entry['speedup_vs_gather_once']:.2f} x gather_once"
        )
        print(
            f"              weights agree to {entry['largest_weight_difference']:.1e}; seconds, and"
            " MiB that a rank sends (as Gloo sends them):"
        )
        for kind in KINDS:
            print(f"              {kind:<16}" + "".join(_phase(entry, kind, p) for p in PHASES))
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


def _phase(entry: dict[str, Any], kind: str, phase: str) -> str:
    """``step 0.0123 s, 0.50 MiB (0.75)``"""
    seconds = entry["seconds" if phase == "step" else "rest_seconds"][kind]
    text = f"{phase} {seconds:.4f} s"
    if kind in entry["bytes"]:
        moved = entry["bytes"][kind][phase]
        text += f", {moved['needed'] / 2**20:.2f} MiB ({moved['on_the_wire'] / 2**20:.2f})"
    return f"{text:<36}"


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
    add_json_flag(parser, __file__)
    options = parser.parse_args(argv)
    warn_if_busy()
    found: dict[str, dict[str, Any]] = {}
    for ranks in options.ranks:
        found[str(ranks)] = run(ranks, options.repeats, options.stock)
        print_document(found[str(ranks)])
    if options.json:
        document = {**found[str(options.ranks[-1])], "by_ranks": found}
        write_json(options.json, __file__, document)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
