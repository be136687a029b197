"""An ownership plan in tables for people, and as JSON figures.

Owns the wording of ``tools/plan_owners.py`` and the keys of its JSON: rails, fan-out per block,
resource estimate, moves, sweep.  Invariant: it formats figures that ``report``, ``estimate`` and
``update_plan`` computed and computes none. Tested by ``tests/tools/test_plan_owners.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from megamuon.ownership.estimate import BlockFanout, ResourceEstimate
from megamuon.ownership.plan import OwnershipPlan
from megamuon.ownership.report import MIB, PlanReport
from megamuon.ownership.update_plan import Move

SHOWN_BLOCKS = 8
SHOWN_NAMES = 3
_LOOSE = "outside the layers"
_REPORT_KEYS = (
    "rails",
    "heaviest_rail_over_mean",
    "heaviest_rail_over_mean_ns",
    "busiest_over_mean_ns",
    "busiest_over_mean_bytes",
    "busiest_over_mean_muon_bytes_nonempty_owners",
    "owner_window_mib",
    "optimizer_state_gib_busiest",
    "routes",
)


def plan_figures(
    report: PlanReport,
    fanouts: Sequence[BlockFanout],
    resources: ResourceEstimate,
    seconds: float,
) -> dict[str, object]:
    """Everything that a plan's figures are, as one JSON object."""
    content = asdict(report)
    # The JSON's keys are older than the word for replicas.
    kinds = {key.replace("_replicas", "_rows"): held for key, held in asdict(resources).items()}
    return {
        **{key: content[key] for key in _REPORT_KEYS},
        "plan_seconds": round(seconds, 4),
        "gamma": [{**asdict(fanout), "block": fanout.block or _LOOSE} for fanout in fanouts],
        "bytes_per_rank": kinds,
        "estimate_mib": {
            kind: {"busiest": max(values) / MIB, "mean": sum(values) / len(values) / MIB}
            for kind, values in kinds.items()
        },
    }


def describe_plan(plan: OwnershipPlan, report: PlanReport, seconds: float) -> str:
    """Grid, rails and balance of a plan."""
    grid = plan.topology
    tp = f", each {grid.tp} tensor-parallel ranks" if grid.tp > 1 else ""
    lines = [
        f"{report.units} units on {grid.world} ranks"
        f" ({grid.replicas} replicas x {grid.shards} shards{tp}),"
        f" policy {plan.settings.policy}, planned in {seconds:.3f} s",
        f"  ranks without a unit: {report.idle_ranks}",
        f"{'rail':>6} {'parameters':>11} {'MiB':>11} {'NS ms':>11}",
    ]
    for index, rail in enumerate(report.rails):
        lines.append(f"{index:>6} {rail.parameters:>11} {rail.mib:>11.2f} {rail.ns_ms:>11.3f}")
    muon_ratio = report.busiest_over_mean_muon_bytes_nonempty_owners
    lines += [
        f"heaviest rail over mean, bytes           {report.heaviest_rail_over_mean:8.4f}",
        f"heaviest rail over mean, NS time         {report.heaviest_rail_over_mean_ns:8.4f}",
        f"busiest rank over mean, NS time          {report.busiest_over_mean_ns:8.4f}",
        f"busiest rank over mean, bytes            {report.busiest_over_mean_bytes:8.4f}",
        f"busiest over mean Muon owner, Muon bytes {muon_ratio:8.4f}",
        f"largest owner window                     {report.owner_window_mib:8.2f} MiB",
        f"slowest rank, NS time                    {max(report.rank_ns_ms):8.3f} ms",
        f"optimizer state of the busiest rank      {report.optimizer_state_gib_busiest:8.4f} GiB",
    ]
    return "\n".join(lines)


def describe_publish(report: PlanReport) -> str:
    """What each rail publishes first and last; empty where nothing is published."""
    lines = []
    for index, rail in enumerate(report.rails):
        order = rail.publish_order
        if order:
            tail = (
                f", ... {len(order)} in all, last {order[-1]}" if len(order) > SHOWN_NAMES else ""
            )
            lines.append(f"  rail {index}: {', '.join(order[:SHOWN_NAMES])}{tail}")
    return "\n".join(["publish order (--json has all of it):", *lines]) if lines else ""


def describe_fanouts(fanouts: Sequence[BlockFanout]) -> str:
    """The blocks with the largest gamma, and the mean."""
    if not fanouts:
        return "no block has owned parameters"
    fanouts = [fanout for fanout in fanouts if fanout.block] or fanouts  # layers, where there are
    worst = sorted(fanouts, key=lambda fanout: -fanout.gamma)[:SHOWN_BLOCKS]
    mean = sum(fanout.gamma for fanout in fanouts) / len(fanouts)
    lines = [
        f"{'gamma':>8} {'MiB':>9} {'busiest':>9}  block (the busiest shard rank over the mean)"
    ]
    for fanout in worst:
        lines.append(
            f"{fanout.gamma:>8.3f} {fanout.bytes / MIB:>9.2f} {fanout.busiest_bytes / MIB:>9.2f}"
            f"  {fanout.block or _LOOSE}"
        )
    rest = len(fanouts) - len(worst)
    lines.append(f"{mean:>8.3f} {'':>9} {'':>9}  mean of {len(fanouts)} blocks, {rest} not shown")
    return "\n".join(lines)


def describe_estimate(resources: ResourceEstimate, zero_stage: int, micro_batches: int) -> str:
    """Busiest and mean rank by kind of bytes."""
    batches = f"{micro_batches} micro-batch" + ("es" if micro_batches > 1 else "")
    lines = [
        f"bytes per rank at ZeRO-{zero_stage}, {batches} a step, in MiB",
        f"{'':>24} {'busiest':>12} {'mean':>12}",
    ]
    for field in fields(resources):
        values = getattr(resources, field.name)
        lines.append(
            f"{field.name.replace('_', ' '):>24} {max(values) / MIB:>12.2f}"
            f" {sum(values) / len(values) / MIB:>12.2f}"
        )
    return "\n".join(lines)


def move_figures(moves: Sequence[Move]) -> list[dict[str, object]]:
    """Axis, kind, parameters and bytes of every move, in the order of a step."""
    return [
        {
            "axis": move.axis.value,
            "kind": move.kind.value,
            "parameters": list(move.parameters),
            "bytes": move.nbytes,
        }
        for move in moves
    ]


def describe_moves(moves: Sequence[Move]) -> str:
    """Moves of a step by axis and kind."""
    if not moves:
        return "moves of the update: none, every matrix is whole where it is updated"
    lines = [f"{'moves':>7} {'matrices':>9} {'MiB a step':>11}  of the update, all ranks together"]
    for axis, kind in dict.fromkeys((move.axis, move.kind) for move in moves):
        alike = [move for move in moves if (move.axis, move.kind) == (axis, kind)]
        matrices = sum(len(move.parameters) for move in alike)
        size = sum(move.nbytes for move in alike) / MIB
        lines.append(f"{len(alike):>7} {matrices:>9} {size:>11.2f}  {axis}: {kind}")
    return "\n".join(lines)


def describe_sweep(points: Sequence[Mapping[str, float]]) -> str:
    """One line per number of nodes, as DMuon-2's table 3."""
    head = ("nodes", "ranks", "state GiB", "slowest ms", "window MiB", "rail/mean")
    lines = [" ".join(f"{word:>11}" for word in head)]
    for point in points:
        lines.append(
            f"{point['nodes']:>11} {point['ranks']:>11}"
            f" {point['optimizer_state_gib_busiest']:>11.4f} {point['slowest_rank_ns_ms']:>11.3f}"
            f" {point['owner_window_mib']:>11.2f} {point['heaviest_rail_over_mean']:>11.4f}"
        )
    return "\n".join(lines)
