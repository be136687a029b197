"""Plan owners for a model and a cluster that need not be here, and print how balanced the plan is.

Owns the command line around ``megamuon.ownership``: routing report, rails, busiest rank, optimizer
state, fan-out per block, bytes per rank, moves of the update, and a sweep over nodes.  Invariant:
it computes nothing itself, so its figures are those that a run of the same settings would have.
Tested by ``tests/tools/test_plan_owners.py``.

Example: ``python tools/plan_owners.py --model qwen2.5-1.5b --sharding hsdp --nodes 8
--gpus-per-node 8``
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from megamuon.console import run_script  # noqa: E402
from megamuon.matrices import (  # noqa: E402
    LogicalParameter,
    Route,
    placed_anew,
    routing_report,
)
from megamuon.models import PRESETS  # noqa: E402
from megamuon.optim import RECIPES  # noqa: E402
from megamuon.ownership import (  # noqa: E402
    POLICIES,
    UNIT_THRESHOLD,
    CostFunction,
    OwnershipPlan,
    PlannerSettings,
    PlanReport,
    Topology,
    block_fanouts,
    build_plan,
    estimate,
    file_cost,
    muon_shapes,
    summarize,
    tp_rank_times,
)
from megamuon.ownership.describe import (  # noqa: E402
    describe_estimate,
    describe_fanouts,
    describe_moves,
    describe_plan,
    describe_publish,
    describe_sweep,
    move_figures,
    plan_figures,
)
from megamuon.ownership.inventory import routers_as_matrices  # noqa: E402
from megamuon.ownership.owners import tp_owners  # noqa: E402
from megamuon.ownership.update_plan import update_moves  # noqa: E402
from megamuon.runtime.config import OptimizerSettings  # noqa: E402
from megamuon.runtime.measure import planned_cost  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402
from tools.planned_models import (  # noqa: E402
    model_names,
    parameters_for,
    parameters_of_file,
)


def _byte_cap(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_argument_group("model")
    what = model.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help="name of a model, see --list-models")
    what.add_argument(
        "--shapes", metavar="FILE", help='JSON list of {"name", "shape", "kind", ...} to plan for'
    )
    what.add_argument(
        "--list-models", action="store_true", help="print the names of models and stop"
    )
    model.add_argument(
        "--routers",
        choices=("adamw", "muon"),
        default="adamw",
        help="maps onto experts; muon counts them as matrices, as DMuon-2 does (%(default)s)",
    )
    _add_cluster(parser.add_argument_group("cluster"))
    _add_rules(parser.add_argument_group("planner"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), default=3, help="of the estimate (%(default)s)"
    )
    output.add_argument(
        "--micro-batches", type=int, default=1, help="of the estimate, a step (%(default)s)"
    )
    output.add_argument(
        "--sweep-nodes",
        type=_integers,
        metavar="N,N,...",
        help="plan for these numbers of nodes as well and print state and time of each",
    )
    output.add_argument(
        "--moves",
        action="store_true",
        help="print what a step sends so that whole matrices are updated, and back",
    )
    add_json_flag(parser, __file__, output)
    output.add_argument("--plan", metavar="FILE", help="write the ownership plan itself")
    return parser


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _add_cluster(cluster: argparse._ArgumentGroup) -> None:
    cluster.add_argument(
        "--sharding",
        choices=("fsdp", "hsdp"),
        default="fsdp",
        help="shard over all ranks or over --shard-size of them (%(default)s)",
    )
    cluster.add_argument("--nodes", type=int, default=1, help="nodes (%(default)s)")
    cluster.add_argument(
        "--gpus-per-node", type=int, default=8, help="ranks of a node (%(default)s)"
    )
    cluster.add_argument(
        "--shard-size",
        type=int,
        default=None,
        help="HSDP: data-parallel ranks that shard one replica (default: those of a node)",
    )
    cluster.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel ranks of each replica (%(default)s)"
    )
    cluster.add_argument(
        "--param-layout",
        choices=("owner", "even"),
        default="owner",
        help="even: slices on all ranks of a replica, which all gather the matrices that they"
        " update (%(default)s)",
    )


def _add_rules(rule: argparse._ArgumentGroup) -> None:
    rule.add_argument(
        "--owner-planner",
        "--policy",
        choices=POLICIES,
        default=PlannerSettings.policy,
        help="policy; those with role_, scope_ and cost_ are MatrixFSDP's (%(default)s)",
    )
    rule.add_argument(
        "--owner-unit-threshold",
        type=int,
        default=None,
        help=f"elements from which a parameter is a unit of its own ({UNIT_THRESHOLD}, or what the"
        " preset says)",
    )
    rule.add_argument(
        "--owner-byte-cap",
        type=_byte_cap,
        default=PlannerSettings.byte_cap,
        metavar="SHARE|none",
        help="bytes that a rank may hold above the mean, as a share (%(default)s); none: no cap",
    )
    rule.add_argument(
        "--no-owner-layer-spreading", action="store_true", help="let units of a layer share a rank"
    )
    rule.add_argument(
        "--no-owner-column-balance",
        action="store_true",
        help="HSDP: choose among all ranks at once, not by rail",
    )
    rule.add_argument(
        "--merge-experts", action="store_true", help="merge small expert matrices like the rest"
    )
    rule.add_argument(
        "--balance-gain",
        type=float,
        default=PlannerSettings.balance_gain,
        help="cost_aware: least fall of the heaviest load, as a share (%(default)s)",
    )
    rule.add_argument(
        "--workspace-growth",
        type=float,
        default=PlannerSettings.workspace_growth,
        help="cost_aware: share by which the largest owner window may grow (%(default)s)",
    )
    rule.add_argument(
        "--workspace-cap-mib",
        type=float,
        default=None,
        help="cost_aware: most MiB of the largest owner window (default: no limit)",
    )
    rule.add_argument(
        "--optimizer",
        choices=tuple(RECIPES),
        default=OptimizerSettings.matrices,
        help="of matrices: cost of an update and bytes of state, by its defaults (%(default)s)",
    )
    rule.add_argument(
        "--ns-cost",
        choices=("closed-form", "file"),
        default="closed-form",
        help="times of updates (%(default)s)",
    )
    rule.add_argument(
        "--ns-cost-file",
        metavar="FILE",
        help="JSON list of [[rows, cols], milliseconds]; with closed-form: object of constants",
    )


def threshold_for(options: argparse.Namespace) -> int:
    """``--owner-unit-threshold``, else the preset's own, else the rule's."""
    if options.owner_unit_threshold is not None:
        return options.owner_unit_threshold
    return PRESETS.get(options.model, {}).get("owner_unit_threshold", UNIT_THRESHOLD)


def optimizer_of(options: argparse.Namespace) -> OptimizerSettings:
    """The optimizer of ``--optimizer``."""
    return OptimizerSettings(matrices=options.optimizer)


def cost_for(options: argparse.Namespace, parameters: tuple[LogicalParameter, ...]) -> CostFunction:
    """The cost source of ``--ns-cost``; a file must know every shape of the model."""
    if options.ns_cost == "closed-form":
        return planned_cost(optimizer_of(options), options.ns_cost_file)
    if not options.ns_cost_file:
        raise ValueError("--ns-cost file needs --ns-cost-file FILE")
    return file_cost(options.ns_cost_file, muon_shapes(parameters))


def topology_for(options: argparse.Namespace, nodes: int | None = None) -> Topology:
    """The data-parallel grid: one replica of all ranks under FSDP, replicas of the shard size under
    HSDP.

    Raises ValueError that names the flags whose sizes do not fit.
    """
    nodes = options.nodes if nodes is None else nodes
    sizes = {"--nodes": nodes, "--gpus-per-node": options.gpus_per_node, "--tp": options.tp}
    if options.shard_size is not None:
        sizes["--shard-size"] = options.shard_size
        if options.sharding == "fsdp":
            raise ValueError("--shard-size goes with --sharding hsdp; FSDP shards over all ranks")
    for flag, value in sizes.items():
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if options.gpus_per_node % options.tp:
        raise ValueError(
            f"--tp {options.tp} does not divide --gpus-per-node {options.gpus_per_node}: the pieces"
            " of a matrix stay inside a node"
        )
    world = nodes * options.gpus_per_node // options.tp
    if options.sharding == "fsdp":
        return Topology(replicas=1, shards=world, tp=options.tp)
    shards = options.shard_size or options.gpus_per_node // options.tp
    if world % shards:
        raise ValueError(f"--shard-size {shards} does not divide the {world} data-parallel ranks")
    return Topology(replicas=world // shards, shards=shards, tp=options.tp)


def settings_for(options: argparse.Namespace) -> PlannerSettings:
    """The planner's settings.  Raises ValueError that names the one which is out of range."""
    return PlannerSettings(
        policy=options.owner_planner,
        byte_cap=options.owner_byte_cap,
        spread_layers=not options.no_owner_layer_spreading,
        balance_rails=not options.no_owner_column_balance,
        balance_gain=options.balance_gain,
        workspace_growth=options.workspace_growth,
        workspace_cap_mib=options.workspace_cap_mib,
    )


def chosen_parameters(options: argparse.Namespace) -> tuple[LogicalParameter, ...]:
    """What is to be planned, as the tensor-parallel ranks would hold it."""
    if options.shapes:
        parameters = parameters_of_file(options.shapes, options.tp)
    else:
        parameters = parameters_for(options.model, options.tp)
    if options.routers == "muon":
        parameters = routers_as_matrices(parameters)
    if not optimizer_of(options).whole_matrices:
        parameters = tuple(
            replace(p, route=Route.ADAMW_OWNER, reason=f"--optimizer {options.optimizer}")
            if p.route is Route.MATRIX
            else p
            for p in parameters
        )
    if options.param_layout == "even":
        parameters = tuple(
            placed_anew(p, route=p.route, owned=False) if p.shape else p for p in parameters
        )
    return parameters


def plan_for(
    options: argparse.Namespace, parameters: tuple[LogicalParameter, ...], topology: Topology
) -> OwnershipPlan:
    """The plan of the flags on a grid."""
    settings = settings_for(options)
    if settings.policy == "lpt" and not muon_shapes(parameters):
        settings = replace(settings, policy="numel")  # as a run does: no time tells ranks apart
    return build_plan(
        parameters,
        topology,
        cost_for(options, parameters),
        settings,
        threshold=threshold_for(options),
        merge_experts=options.merge_experts,
    )


def report_for(options: argparse.Namespace, plan: OwnershipPlan) -> PlanReport:
    """Figures by rail: shards of the grid under HSDP, places in a node under FSDP."""
    hsdp = options.sharding == "hsdp"
    rails = None if hsdp else options.gpus_per_node // options.tp
    return summarize(plan, rails=rails, state=optimizer_of(options).state_bytes())


def sweep(
    options: argparse.Namespace, parameters: tuple[LogicalParameter, ...]
) -> list[dict[str, float]]:
    """Figures of the busiest rank for each number of nodes of ``--sweep-nodes``."""
    points = []
    for nodes in options.sweep_nodes or ():
        plan = plan_for(options, parameters, topology_for(options, nodes))
        report = report_for(options, plan)
        points.append(
            {
                "nodes": nodes,
                "ranks": plan.topology.world * plan.topology.tp,
                "optimizer_state_gib_busiest": report.optimizer_state_gib_busiest,
                "slowest_rank_ns_ms": max(report.rank_ns_ms),
                "owner_window_mib": report.owner_window_mib,
                "heaviest_rail_over_mean": report.heaviest_rail_over_mean,
            }
        )
    return points


def run(options: argparse.Namespace) -> None:
    """Plan, print and write.  Raises ValueError or OSError on input that cannot be planned."""
    topology, parameters = topology_for(options), chosen_parameters(options)
    start = time.perf_counter()
    plan = plan_for(options, parameters, topology)
    seconds = time.perf_counter() - start
    report, fanouts = report_for(options, plan), block_fanouts(plan)
    resources = estimate(
        plan,
        zero_stage=options.zero_stage,
        micro_batches=options.micro_batches,
        state=optimizer_of(options).state_bytes(),
    )
    moves = update_moves(plan, torch.float32) if options.moves else ()
    points = sweep(options, parameters)
    print(routing_report(parameters))
    texts = [
        describe_plan(plan, report, seconds),
        describe_publish(report),
        describe_fanouts(fanouts),
        describe_estimate(resources, options.zero_stage, options.micro_batches),
        describe_moves(moves) if options.moves else "",
        describe_sweep(points) if points else "",
    ]
    print("\n".join(text for text in texts if text))
    figures = plan_figures(report, fanouts, resources, seconds)
    if options.tp > 1:
        times = tp_rank_times(plan, cost_for(options, parameters))
        on_tp = tp_owners(plan.parameters)
        figures["tp"] = {
            "owners": on_tp,
            "slowest_rank_ns_ms": float(times.max()),
            "slowest_over_mean_ns": float(times.max() / times.mean()) if times.any() else 0.0,
        }
        print(
            f"tensor parallelism: {len(on_tp)} matrices cut, slowest rank"
            f" {times.max():.3f} ms, over mean {figures['tp']['slowest_over_mean_ns']:.4f}"
        )
    if options.moves:
        figures["moves"] = move_figures(moves)
    if points:
        figures["sweep"] = points
    print(f"digest {plan.digest}")
    write_json(options.json, __file__, figures)
    if options.plan:
        Path(options.plan).write_text(plan.to_json() + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Entry point; bad input is one message on stderr and exit code 2."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.list_models:
        print("\n".join(model_names()))
        return
    try:
        run(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(run_script(main))
