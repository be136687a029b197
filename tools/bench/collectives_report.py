"""What ``collectives.py`` makes of the ranks' measurements: figures, a table, a chart.

Owns the meaning of the keys in the bench's JSON; ``collectives.py`` states them. Invariant: pure
but for the file that the chart is written to. Tested by ``tests/tools/test_bench_collectives.py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.collectives_ranks import COPY, LARGE, SYSTEMS
from tools.bench.line_report import plotting

SMALL = 1 << 20  # up to here a message is small
Run = Mapping[str, Any]  # an entry of one operation and size


def merge(ranks: Sequence[Sequence[Run]]) -> tuple[list[dict[str, Any]], list[str]]:
    """An entry per operation and size, with medians over repeats of the slowest rank; and what
    differed, in words.
    """
    runs, wrong = [], []
    for parts in zip(*ranks, strict=True):
        first = parts[0]
        run = {"operation": first["operation"], "bytes": first["bytes"]}
        for system in first["seconds"]:
            by_rank = [part["seconds"][system] for part in parts]
            slowest = [max(times) for times in zip(*by_rank, strict=True)]
            run[f"{system}_ms"] = 1e3 * statistics.median(slowest)
        run["repeats"] = len(slowest)
        runs.append(run)
        wrong += [
            f"{first['operation']} of {first['bytes']} bytes by {name}: rank {rank} holds a wrong"
            " result"
            for rank, part in enumerate(parts)
            for name in part["wrong"]
        ]
    return runs, wrong


def speedup(runs: Iterable[Run], system: str) -> float | None:
    """Geometric mean of a system's time over ours; None of no runs."""
    ratios = [run[f"{system}_ms"] / run["ready_ms"] for run in runs]
    return statistics.geometric_mean(ratios) if ratios else None


def figures(runs: Sequence[Run], replicas: int, shards: int) -> dict[str, Any]:
    """The keys of the document that are computed from all runs."""
    small = [run for run in runs if run["bytes"] <= SMALL]
    large = [run for run in runs if run["bytes"] >= LARGE]
    operations = list(dict.fromkeys(run["operation"] for run in runs))
    copied = [run for run in large if f"{COPY}_ms" in run]
    fraction = speedup(copied, COPY)
    ranks = replicas * shards
    found: dict[str, Any] = {}
    for other in SYSTEMS[1:]:
        found[f"speedup_small_vs_{other}"] = speedup(small, other)
    for other in SYSTEMS[1:]:
        found[f"large_speedup_vs_{other}"] = speedup(large, other)
    found["by_operation"] = {
        operation: {
            f"{name}_vs_{other}": speedup((r for r in of if r["operation"] == operation), other)
            for name, of in (("speedup_small", small), ("large_speedup", large))
            for other in SYSTEMS[1:]
        }
        for operation in operations
    }
    found["large_fraction_of_copy_bandwidth"] = fraction
    found["large_fraction_of_copy_bandwidth_with_ring_slots"] = (
        fraction and fraction * (ranks + replicas - 1) / ranks
    )
    found["copies_of_payload"] = {"plain": ranks, "results": ranks - 1, "ring_slots": replicas - 1}
    return found


# --- what people read ----------------------------------------------------------------------------


def size_text(nbytes: int) -> str:
    """``16 KiB``, ``1 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def table(document: Mapping[str, Any]) -> str:
    """Times and ratios as text."""
    text = [
        f"{document['dtype']} payload, segments 1:2:3, {document['ranks']} ranks as"
        f" {document['grid']}; ms of the slowest rank, medians",
        f"  {'operation':<10}{'size':>9}{'ready':>11}{'per owner':>11}{'grouped':>11}"
        f"{'equal':>11}{'copies':>11}{'/owner':>9}{'/equal':>8}",
    ]
    for operation, runs in document["operations"].items():
        for run in runs:
            cells = "".join(f"{run[f'{system}_ms']:>11.3f}" for system in SYSTEMS)
            copies = f"{run['copy_ms']:.3f}" if "copy_ms" in run else "-"
            text.append(
                f"  {operation:<10}{size_text(run['bytes']):>9}{cells}{copies:>11}"
                f"{run['per_owner_ms'] / run['ready_ms']:>9.1f}"
                f"{run['equal_length_ms'] / run['ready_ms']:>8.1f}"
            )
    for key, what in (
        ("speedup_small_vs_per_owner", "up to 1 MiB, times as fast as per-owner calls"),
        ("speedup_small_vs_equal_length", "up to 1 MiB, times as fast as equal-length primitives"),
        ("large_speedup_vs_equal_length", "from 16 MiB on, as equal-length primitives"),
        ("large_fraction_of_copy_bandwidth", "from 16 MiB on, share of plain copies' bandwidth"),
    ):
        if document[key] is not None:
            text.append(f"  {document[key]:>7.2f}  {what}")
    if document["copies_of_payload"]["ring_slots"] and document["large_fraction_of_copy_bandwidth"]:
        value = document["large_fraction_of_copy_bandwidth_with_ring_slots"]
        text.append(f"  {value:>7.2f}  the same, counting the copies into ring slots")
    return "\n".join(text)


def chart(document: Mapping[str, Any], path: Path) -> None:
    """Speedups by size, a panel for each operation (as the paper's Figure 8)."""
    operations = document["operations"]
    figure = plotting()(figsize=(5 * len(operations), 3.8), layout="constrained")
    titles = {"gather": "AllGatherV", "reduce": "ReduceScatterV"}
    styles = (
        ("per_owner", "over per-owner calls", "#9ecae1"),
        ("equal_length", "over equal-length primitives", "#525252"),
    )
    panels = figure.subplots(1, len(operations), squeeze=False)[0]
    for axes, (operation, runs) in zip(panels, operations.items(), strict=True):
        for shift, (system, label, color) in zip((-0.2, 0.2), styles, strict=True):
            heights = [run[f"{system}_ms"] / run["ready_ms"] for run in runs]
            places = [place + shift for place in range(len(runs))]
            axes.bar(places, heights, width=0.38, color=color, label=label)
            for place, height in zip(places, heights, strict=True):
                axes.text(place, height, f"{height:.1f}", ha="center", va="bottom", fontsize=7)
        axes.axhline(1, color="black", linestyle="--", linewidth=1)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(range(len(runs)), [size_text(run["bytes"]) for run in runs], fontsize=8)
        axes.set_title(titles[operation], fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("speedup")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(f"{document['ranks']} ranks as {document['grid']} on one machine", fontsize=11)
    figure.savefig(path, dpi=130)
