"""Publish of five real rails, replayed on 2 to 32 nodes: our schedule against the usual calls.

Owns the calibrated link, the closed forms of the two baselines and the driving of
``csrc/tests/replay.cpp``, in which the production scheduler runs on a virtual clock or moves real
bytes between threads. Invariant: ``publish_replay`` is a function of its arguments, the same on
every machine. Tested by ``tests/tools/test_publish_replay.py``.

[Note: what is replayed]

A load is the parameters of one rail, see ``publish_rails.py``, in registration order. The owners on
R nodes are those that our planner gives a column of R ranks. All tasks of a step are handed over
at once, each owner's in order: that is what the published times say, of which at 32 nodes all but a
twelfth (Qwen2.5-32B) is the rail's bandwidth, with no room for an optimizer between tasks.

[Note: the link and the baselines]

The link and both baselines are fitted to the same 75 measured times (H100, 400 Gb/s per rail):

  link        46.56 GB/s; 20 us from a tile's last byte to the next node's forwarding it (109 us per
              hop are fitted, of which a tile of 4 MiB, the size that fits, takes 89); 10.08 us
              of every link for each parameter. A put in itself costs nothing here: large tiles
              cannot show what small ones cost, hence ``put_us``, and the break-even in the table:
              the time per put at which our tile would only equal the better baseline.
  per-owner   P / 46.56 GB/s + n (18.17 us + (R - 1) 5.618 us mean_MiB ** 0.315)
  coalesced   P (24.11 + 9.17 R) / 2491 GB/s + 55.32 us n, linear in R: the fixed ring order

with P bytes in n parameters. The forms miss single cells (``baseline_median``, ``baseline_max``),
so the table has a second ratio: the best *measured* baseline over our time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench.publish_rails import (  # noqa: E402
    MIB,
    NODES,
    planned_rail,
    rail_entry,
    rail_facts,
    rail_load,
    table,
)
from tools.native_build import build_driver  # noqa: E402

OUR_TILE = 512 * 1024  # of the publish
PUBLISHED_TILE = 4 * MIB  # what fits the published times
MEMORY_LIMIT = 8 * 2**30  # of a run with real bytes
Load = Sequence[tuple[int, int]]  # (owner node, bytes) of each parameter, in publish order


@dataclass(frozen=True, kw_only=True)
class Link:
    """A rail's link, see [Note: the link and the baselines]."""

    gigabytes_per_second: float = 46.56
    hop_us: float = 20.0
    parameter_us: float = 10.08
    put_us: float = 0.0
    outstanding: int = 16  # puts of a node whose sources are still being read

    def __post_init__(self) -> None:
        if self.gigabytes_per_second <= 0 or self.outstanding < 1:
            raise ValueError(
                f"Link: gigabytes_per_second {self.gigabytes_per_second} and outstanding"
                f" {self.outstanding} must be positive"
            )


# --- baselines -----------------------------------------------------------------------------------


def per_owner_ms(load: Load, nodes: int) -> float:
    """One call per parameter."""
    total, count = sum(size for _, size in load), len(load)
    hop_us = 5.618 * (total / count / MIB) ** 0.315
    return total / 46.56e6 + count * (18.17 + (nodes - 1) * hop_us) / 1e3


def coalesced_ms(load: Load, nodes: int) -> float:
    """One grouped call per layer."""
    total, count = sum(size for _, size in load), len(load)
    return total * (24.11 + 9.17 * nodes) / 2491e6 + count * 55.32 / 1e3


# --- the scheduler -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A publish of one load on a clock; ``rounds``: how many steps, one after the other."""

    nodes: int
    load: tuple[tuple[int, int], ...]
    tile_bytes: int = OUR_TILE
    link: Link = Link()
    rounds: int = 1

    def text(self) -> str:
        """What the driver reads."""
        link = self.link
        times = [round(1e3 * us) for us in (link.hop_us, link.put_us, link.parameter_us)]
        head = [self.nodes, self.tile_bytes, link.gigabytes_per_second, *times, link.outstanding]
        return _lines([*head, self.rounds], self.load)


def _lines(head: Sequence[float], load: Load) -> str:
    rows = [[*head, len(load)], *load]
    return "\n".join(" ".join(repr(value) for value in row) for row in rows) + "\n"


def _drive(mode: str, text: str, timeout: float) -> list[dict[str, Any]]:
    """Run the driver on scenarios.  Raises RuntimeError with its own word for what went wrong."""
    program = build_driver(ROOT / "csrc" / "tests" / "replay.cpp", ("-O2",))
    answer = subprocess.run(
        [str(program), mode], input=text, capture_output=True, text=True, timeout=timeout
    )
    if answer.returncode:
        raise RuntimeError(f"{program.name} {mode}: {answer.stderr.strip() or answer.returncode}")
    return [json.loads(line) for line in answer.stdout.splitlines()]


def run_clock(scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
    """``rounds_ns`` of each scenario, and ``busiest_link_ns``, below which no round can be."""
    return _drive("clock", "".join(s.text() for s in scenarios), timeout=600)


# --- the table -----------------------------------------------------------------------------------


def publish_replay(
    *,
    models: Sequence[str] | None = None,
    nodes: Sequence[int] = NODES,
    link: Link | None = None,
    tile_bytes: int = OUR_TILE,
) -> dict[str, Any]:
    """Times and ratios of each model and node count, and what they were made from.

    ``rails`` is the table; ``geometric_mean``, ``least`` and ``largest`` are over its
    ``speedup_vs_best``; ``check_median`` and ``check_max`` say how far the replay with the
    published tile is from the published times of the persistent kernel, as shares of these;
    ``baseline_median`` and ``baseline_max`` the same of the baselines' closed forms.
    """
    link = link or Link()
    cells = [(model, count) for model in models or table() for count in nodes]
    loads = [rail_load(model, count) for model, count in cells]
    costly = Link(**{**asdict(link), "put_us": link.put_us + 1.0})
    ours, published_tile, with_put = (
        [
            run["rounds_ns"][0] / 1e6
            for run in run_clock(
                [
                    Scenario(nodes=count, load=load, tile_bytes=size, link=chosen)
                    for (_, count), load in zip(cells, loads, strict=True)
                ]
            )
        ]
        for size, chosen in ((tile_bytes, link), (PUBLISHED_TILE, link), (tile_bytes, costly))
    )
    rows = [
        _row(model, count, load, *times)
        for (model, count), load, *times in zip(
            cells, loads, ours, published_tile, with_put, strict=True
        )
    ]
    ratios = [row["speedup_vs_best"] for row in rows]
    errors = [abs(r["check_error"]) for r in rows if r["check_error"] is not None]
    forms = [abs(error) for r in rows for error in r["baseline_errors"]]
    return {
        "rails": rows,
        "geometric_mean": statistics.geometric_mean(ratios),
        "least": min(ratios),
        "largest": max(ratios),
        "check_median": statistics.median(errors) if errors else None,
        "check_max": max(errors, default=None),
        "baseline_median": statistics.median(forms) if forms else None,
        "baseline_max": max(forms, default=None),
        "tile_bytes": tile_bytes,
        "published_tile_bytes": PUBLISHED_TILE,
        "link": asdict(link),
        "tasks": "all at once",
        "loads": {
            model: {
                "replayed": rail_facts(model),
                "published": dict(table()[model]["published"]),
                "planned": planned_rail(model),
            }
            for model in models or table()
        },
    }


def _row(
    model: str, nodes: int, load: Load, ours: float, published_tile: float, with_put: float
) -> dict[str, Any]:
    per_owner, coalesced = per_owner_ms(load, nodes), coalesced_ms(load, nodes)
    best = min(per_owner, coalesced)
    row: dict[str, Any] = {
        "model": model,
        "nodes": nodes,
        "ours_ms": ours,
        "per_owner_ms": per_owner,
        "coalesced_ms": coalesced,
        "speedup_vs_best": best / ours,
        "ours_published_tile_ms": published_tile,
        "speedup_published_tile": best / published_tile,
        "put_break_even_us": (best - ours) / (with_put - ours) if with_put > ours else None,
        "paper_ms": None,
        "paper_speedup": None,
        "speedup_vs_paper_best": None,
        "check_error": None,
        "baseline_errors": [],
    }
    for count, measured_owner, measured_coalesced, measured in rail_entry(model)["rows"]:
        if count == nodes:
            measured_best = min(measured_owner, measured_coalesced)
            row["paper_ms"] = measured
            row["paper_speedup"] = measured_best / measured
            row["speedup_vs_paper_best"] = measured_best / ours
            row["check_error"] = published_tile / measured - 1
            row["baseline_errors"] = [
                per_owner / measured_owner - 1,
                coalesced / measured_coalesced - 1,
            ]
    return row


def describe(figures: Mapping[str, Any]) -> str:
    """The table as text."""
    tile = figures["tile_bytes"] // 1024
    lines = [
        f"publish of one rail on a clock, ms; ours with tiles of {tile} KiB, all tasks at once",
        f"{'model':<14}{'nodes':>6}{'ours':>9}{'4 MiB':>9}{'/owner':>9}{'coalesced':>11}"
        f"{'speedup':>9}{'4 MiB':>7}{'paper':>7}{'vs paper':>10}{'put us':>8}",
    ]
    for row in figures["rails"]:
        paper = [row["paper_speedup"], row["speedup_vs_paper_best"], row["put_break_even_us"]]
        texts = ["-" if value is None else f"{value:.2f}" for value in paper]
        lines.append(
            f"{row['model']:<14}{row['nodes']:>6}{row['ours_ms']:>9.2f}"
            f"{row['ours_published_tile_ms']:>9.2f}{row['per_owner_ms']:>9.2f}"
            f"{row['coalesced_ms']:>11.2f}{row['speedup_vs_best']:>9.2f}"
            f"{row['speedup_published_tile']:>7.2f}{texts[0]:>7}{texts[1]:>10}{texts[2]:>8}"
        )
    lines.append(
        f"speedup over the better baseline: {figures['least']:.2f} to {figures['largest']:.2f},"
        f" geometric mean {figures['geometric_mean']:.2f}"
    )
    if figures["check_median"] is not None:
        lines.append(
            f"replay with 4 MiB tiles against the published kernel:"
            f" {100 * figures['check_median']:.1f} % off at the median,"
            f" {100 * figures['check_max']:.1f} % at most; closed forms of the baselines"
            f" {100 * figures['baseline_median']:.1f} and {100 * figures['baseline_max']:.1f} %"
        )
    lines += [_describe_load(model, facts) for model, facts in figures["loads"].items()]
    return "\n".join(lines)


def _describe_load(model: str, facts: Mapping[str, Mapping[str, float]]) -> str:
    texts = [
        f"{kind} {entry['parameters']:.0f} parameters, {entry['mib']:.1f} MiB"
        + (f", largest {entry['largest_mib']:.1f}" if "largest_mib" in entry else "")
        for kind, entry in facts.items()
    ]
    return f"  {model}: " + "; ".join(texts)


# --- real bytes ----------------------------------------------------------------------------------


def publish_bytes(
    *,
    models: Sequence[str] | None = None,
    nodes: Sequence[int] = NODES,
    scale: int = 64,
    repeats: int = 3,
    slowdown: float = 10.0,
) -> dict[str, Any]:
    """Publish the rails' parameters at 1/``scale`` of their size between threads of this machine.

    Each node is a thread with its own memory, under the scheduler and the host fabric of a run;
    every copy is compared with its owner's bit for bit. Timed in turn: the whole rail as one
    publish, and one publish per parameter, each node beginning the next when it is done with the
    last; medians of ``repeats``. The fabric injects the calibrated link, slowed so that times are
    ``slowdown`` times those of full size and the cores keep up with the copies; ``clock_ms`` is
    what the virtual clock says of the same. ``slowdown`` 0: no link, memory speed, which the
    cores bound and not the order of sends. Raises ValueError where the copies would take more
    than 8 GiB.
    """
    rows = []
    for model in models or table():
        for count in nodes:
            load = tuple((node, -(-size // scale)) for node, size in rail_load(model, count))
            need = count * sum(size for _, size in load)
            if need > MEMORY_LIMIT:
                raise ValueError(
                    f"{model} on {count} nodes at 1/{scale} needs {need / 2**30:.1f} GiB, the limit"
                    f" is {MEMORY_LIMIT / 2**30:.0f}: raise scale"
                )
            rows.append({"model": model, "nodes": count, "memory_mib": need / MIB})
            rows[-1].update(_bytes_times(load, count, scale, repeats, slowdown))
    return {
        "rails": rows,
        "geometric_mean": statistics.geometric_mean([row["speedup"] for row in rows]),
        "scale": scale,
        "slowdown": slowdown,
        "tile_bytes": OUR_TILE // scale,
        "repeats": repeats,
    }


def _bytes_times(
    load: Load, nodes: int, scale: int, repeats: int, slowdown: float
) -> dict[str, float | None]:
    full, tile = Link(), OUR_TILE // scale
    slow = Link(
        gigabytes_per_second=full.gigabytes_per_second / scale / (slowdown or 1.0),
        hop_us=full.hop_us * slowdown,
        parameter_us=0.0,
        outstanding=1_000_000_000,  # the host fabric sets no limit
    )
    speed = 1e9 * slow.gigabytes_per_second if slowdown else 0
    head = [nodes, tile, speed, round(1e3 * slow.hop_us), repeats]
    (run,) = _drive("bytes", _lines(head, load), timeout=3600)
    publish = statistics.median(run["publish_ns"]) / 1e6
    alone = statistics.median(run["per_parameter_ns"]) / 1e6
    clock = None
    if slowdown:
        scenario = Scenario(nodes=nodes, load=tuple(load), tile_bytes=tile, link=slow)
        clock = run_clock([scenario])[0]["rounds_ns"][0] / 1e6
    return {
        "publish_ms": publish,
        "per_parameter_ms": alone,
        "speedup": alone / publish,
        "clock_ms": clock,
        "compared_bytes": run["compared_bytes"],
    }


def describe_bytes(figures: Mapping[str, Any]) -> str:
    """The figures of ``publish_bytes`` as text."""
    link = f"link slowed {figures['slowdown']:g} x" if figures["slowdown"] else "memory speed"
    lines = [
        f"publish with real bytes, nodes as threads, 1/{figures['scale']} of the size, {link}, ms",
        f"{'model':<14}{'nodes':>6}{'publish':>10}{'clock':>9}{'/parameter':>12}{'speedup':>9}",
    ]
    for row in figures["rails"]:
        clock = "-" if row["clock_ms"] is None else f"{row['clock_ms']:.1f}"
        lines.append(
            f"{row['model']:<14}{row['nodes']:>6}{row['publish_ms']:>10.1f}{clock:>9}"
            f"{row['per_parameter_ms']:>12.1f}{row['speedup']:>9.2f}"
        )
    lines.append(
        f"geometric mean {figures['geometric_mean']:.2f};"
        f" {sum(row['compared_bytes'] for row in figures['rails']) / 2**30:.1f} GiB compared"
    )
    return "\n".join(lines)
