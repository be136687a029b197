"""The planner's time for 70,000 units on 4,096 ranks.

Owns the benchmark of the planner alone: building units, costs, owners and the checked plan from a
synthetic mixture of experts.  Invariant: no device, no other rank and no file takes part, so the
figure is the planner's own. Tested by ``tests/tools/test_plan_owners.py``.

Example: ``python tools/bench/planner.py --json planner.json``
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megamuon.console import run_script  # noqa: E402
from megamuon.matrices import (  # noqa: E402
    Kind,
    LogicalParameter,
    Route,
    placements_for,
)
from megamuon.ownership import (  # noqa: E402
    POLICIES,
    PlannerSettings,
    Topology,
    build_plan,
    closed_form_cost,
    summarize,
)
from megamuon.placements import Placed  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402


def synthetic_model(units: int, layers: int) -> list[LogicalParameter]:
    """``units`` expert matrices of four shapes, spread evenly over ``layers`` layers."""
    shapes = ((2048, 4096), (4096, 2048), (768, 2048), (2048, 768))
    parameters = []
    for index in range(units):
        layer = f"model.layers.{index * layers // units}"
        shape = shapes[index % len(shapes)]
        parameters.append(
            LogicalParameter(
                name=f"{layer}.mlp.experts.{index}.weight",
                shape=shape,
                kind=Kind.MATRIX,
                route=Route.MATRIX,
                **placements_for(Route.MATRIX, Placed(shape=shape), owned=True),
                reason="synthetic",
                layer=layer,
                expert=True,
            )
        )
    return parameters


def main(arguments: list[str] | None = None) -> None:
    """Plan once and print or write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--units", type=int, default=70_000, help="assignment units (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=60, help="layers that they lie in (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=4096, help="ranks (default: %(default)s)")
    parser.add_argument(
        "--columns",
        type=int,
        default=None,
        help="shards of an HSDP grid (default: FSDP, one replica)",
    )
    parser.add_argument(
        "--policy", choices=POLICIES, default="lpt", help="policy (default: %(default)s)"
    )
    add_json_flag(parser, __file__)
    options = parser.parse_args(arguments)
    shards = options.columns or options.ranks
    if options.ranks % shards:
        parser.error(f"--columns {shards} does not divide --ranks {options.ranks}")
    parameters = synthetic_model(options.units, options.layers)
    topology = Topology(replicas=options.ranks // shards, shards=shards)
    start = time.perf_counter()
    settings = PlannerSettings(policy=options.policy)
    plan = build_plan(parameters, topology, closed_form_cost(), settings)
    seconds = time.perf_counter() - start
    figures = {"units": len(plan.units), "ranks": topology.world, "plan_seconds": round(seconds, 4)}
    report = summarize(plan)
    print(
        f"planned {figures['units']:,} units on {figures['ranks']:,} ranks"
        f" ({topology.replicas} replicas x {topology.shards} shards) in {seconds:.2f} s;"
        f" busiest over mean: time {report.busiest_over_mean_ns:.4f},"
        f" bytes {report.busiest_over_mean_bytes:.4f}"
    )
    write_json(options.json, __file__, figures)


if __name__ == "__main__":
    sys.exit(run_script(main))
