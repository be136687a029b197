"""Plan owners for a model and a cluster that need not be here, and print how balanced the plan is.

Owns the command line around ``megamuon.ownership``: routing report, rails, busiest rank, optimizer
state.  Invariant: it computes nothing itself, so its figures are those that a run of the same
settings would have. Tested by ``tests/tools/test_plan_owners.py``.

Example: ``python tools/plan_owners.py --model qwen2.5-1.5b --sharding hsdp --nodes 8
--gpus-per-node 8``
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from megamuon.arguments import ModelFlags, RecomputeFlags  # noqa: E402
from megamuon.matrices import LogicalParameter, collect, routing_report  # noqa: E402
from megamuon.models import GPT, PRESETS, gpt_config_from_flags  # noqa: E402
from megamuon.ownership import (  # noqa: E402
    POLICY_NAMES,
    UNIT_THRESHOLD,
    CostFunction,
    OwnershipPlan,
    PlannerSettings,
    PlanReport,
    Topology,
    build_plan,
    closed_form_cost,
    file_cost,
    muon_shapes,
    summarize,
)
from megamuon.ownership.inventory import (  # noqa: E402
    ShapeTableError,
    inventory,
    inventory_names,
    parameters_from_table,
    unknown_model,
)

JSON_KEYS = (
    "rails",
    "heaviest_rail_over_mean",
    "busiest_over_mean_ns",
    "busiest_over_mean_bytes",
    "owner_window_mib",
    "optimizer_state_gib_busiest",
    "routes",
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
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument(
        "--sharding",
        choices=("fsdp", "hsdp"),
        default="fsdp",
        help="shard over all ranks or per node (%(default)s)",
    )
    cluster.add_argument("--nodes", type=int, default=1, help="nodes (%(default)s)")
    cluster.add_argument(
        "--gpus-per-node", type=int, default=8, help="ranks of a node (%(default)s)"
    )
    rule = parser.add_argument_group("planner")
    rule.add_argument(
        "--owner-planner", choices=POLICY_NAMES, default="lpt", help="policy (%(default)s)"
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
        default=0.1,
        metavar="SHARE|none",
        help="bytes that a rank may hold above the mean, as a share (%(default)s); none: no cap",
    )
    rule.add_argument(
        "--no-owner-layer-spreading", action="store_true", help="let units of a layer share a rank"
    )
    rule.add_argument(
        "--no-owner-column-balance",
        action="store_true",
        help="HSDP: choose among all ranks at once, not by column",
    )
    rule.add_argument(
        "--merge-experts", action="store_true", help="merge small expert matrices like the rest"
    )
    rule.add_argument(
        "--ns-cost",
        choices=("closed-form", "file"),
        default="closed-form",
        help="Newton-Schulz times (%(default)s)",
    )
    rule.add_argument(
        "--ns-cost-file",
        metavar="FILE",
        help="JSON list of [[rows, cols], milliseconds]; with closed-form: object of constants",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write the figures")
    output.add_argument("--plan", metavar="FILE", help="write the ownership plan itself")
    return parser


def model_names() -> tuple[str, ...]:
    """Names that ``parameters_for`` knows: presets that can be trained, then tables of shapes."""
    return (*PRESETS, *(name for name in inventory_names() if name not in PRESETS))


def parameters_for(name: str) -> tuple[LogicalParameter, ...]:
    """Parameters of a model by name: of the modules themselves where there is a preset.

    Raises UnknownModelError with the nearest name.
    """
    if name in PRESETS:
        return preset_parameters(name)
    if name not in inventory_names():
        raise unknown_model(name, model_names())
    return inventory(name)


def preset_parameters(name: str) -> tuple[LogicalParameter, ...]:
    """Parameters that a run of the preset would have, from a model without storage."""
    preset = PRESETS[name]
    known = {field.name for field in fields(ModelFlags)}
    flags = ModelFlags(**{key: value for key, value in preset.items() if key in known})
    multiple = flags.make_vocab_size_divisible_by
    rows = -(-preset["vocab_size"] // multiple) * multiple
    config = gpt_config_from_flags(flags, padded_vocab_size=rows, recompute=RecomputeFlags())
    with torch.device("meta"):
        model = GPT(config)
    return collect(model, layers=GPT.layer_classes)


def threshold_for(options: argparse.Namespace) -> int:
    """``--owner-unit-threshold``, else the preset's own, else the rule's."""
    if options.owner_unit_threshold is not None:
        return options.owner_unit_threshold
    return PRESETS.get(options.model, {}).get("owner_unit_threshold", UNIT_THRESHOLD)


def parameters_of_file(path: str) -> tuple[LogicalParameter, ...]:
    """Parameters of a user's table of shapes.  Raises ShapeTableError naming the file."""
    try:
        return parameters_from_table(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ShapeTableError(f"{path}: {error}") from error


def cost_for(options: argparse.Namespace, parameters: tuple[LogicalParameter, ...]) -> CostFunction:
    """The cost source of ``--ns-cost``; a file must know every shape of the model."""
    if options.ns_cost == "closed-form":
        return closed_form_cost(options.ns_cost_file)
    if not options.ns_cost_file:
        raise ValueError("--ns-cost file needs --ns-cost-file FILE")
    return file_cost(options.ns_cost_file, muon_shapes(parameters))


def topology_for(options: argparse.Namespace) -> Topology:
    """The grid: one row of all ranks under FSDP, one row per node under HSDP."""
    for flag, value in (("--nodes", options.nodes), ("--gpus-per-node", options.gpus_per_node)):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if options.sharding == "hsdp":
        return Topology(rows=options.nodes, columns=options.gpus_per_node)
    return Topology(rows=1, columns=options.nodes * options.gpus_per_node)


def describe(plan: OwnershipPlan, report: PlanReport, seconds: float) -> str:
    """The text that the command prints below the routing report."""
    grid = plan.topology
    lines = [
        f"{report.units} units on {grid.world} ranks ({grid.rows} rows x {grid.columns} columns),"
        f" policy {plan.settings.policy}, planned in {seconds:.3f} s",
        f"  ranks without a unit: {report.idle_ranks}",
        f"{'rail':>6} {'parameters':>11} {'MiB':>11} {'NS ms':>11}",
    ]
    for index, rail in enumerate(report.rails):
        lines.append(f"{index:>6} {rail.parameters:>11} {rail.mib:>11.2f} {rail.ns_ms:>11.3f}")
    muon_ratio = report.busiest_over_mean_muon_bytes_nonempty_owners
    lines += [
        f"heaviest rail over mean, bytes           {report.heaviest_rail_over_mean:8.4f}",
        f"busiest rank over mean, NS time          {report.busiest_over_mean_ns:8.4f}",
        f"busiest rank over mean, bytes            {report.busiest_over_mean_bytes:8.4f}",
        f"busiest over mean Muon owner, Muon bytes {muon_ratio:8.4f}",
        f"largest owner window                     {report.owner_window_mib:8.2f} MiB",
        f"optimizer state of the busiest rank      {report.optimizer_state_gib_busiest:8.4f} GiB",
        f"digest {plan.digest}",
    ]
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Plan, print and write.  Raises ValueError or OSError on input that cannot be planned."""
    settings = PlannerSettings(
        policy=options.owner_planner,
        byte_cap=options.owner_byte_cap,
        spread_layers=not options.no_owner_layer_spreading,
        balance_columns=not options.no_owner_column_balance,
    )
    topology = topology_for(options)
    if options.shapes:
        parameters = parameters_of_file(options.shapes)
    else:
        parameters = parameters_for(options.model)
    cost = cost_for(options, parameters)
    start = time.perf_counter()
    plan = build_plan(
        parameters,
        topology,
        cost,
        settings,
        threshold=threshold_for(options),
        merge_experts=options.merge_experts,
    )
    seconds = time.perf_counter() - start
    report = summarize(plan, rails=options.gpus_per_node)
    print(routing_report(parameters))
    print(describe(plan, report, seconds))
    if options.json:
        content = asdict(report)
        figures = {key: content[key] for key in JSON_KEYS} | {"plan_seconds": round(seconds, 4)}
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
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
    main()
