"""Parameters and golden cases for the tests of the ownership room.

Owns the short way to write a logical parameter in a test and the reading of the golden planner
cases.  Invariant: the cases come from ``tests/data`` alone.  Used by ``tests/ownership`` and
``tests/tools``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megamuon.matrices import Kind, LogicalParameter, Route, placements_for
from megamuon.ownership import CostTable, OwnershipPlan, PlannerSettings, Topology, build_plan
from megamuon.ownership.inventory import inventory
from megamuon.ownership.owners import tp_owners, with_owners, without_owners
from megamuon.placements import Axis, Partial, Placed, Placement, Shard

DATA = Path(__file__).resolve().parents[1] / "data"
GOLDENS = json.loads((DATA / "planner_goldens.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDENS["cases"]}
POLICY_OF = {"time": "lpt", "numel": "numel"}
INVENTORY_OF = {
    "Qwen2.5-1.5B": "qwen2.5-1.5b",
    "Qwen2.5-7B": "qwen2.5-7b",
    "Qwen1.5-MoE-A2.7B": "qwen1.5-moe-a2.7b",
    "pi0.5 (fused, as in Table 7)": "pi0.5-fused",
}


def parameter(
    name: str,
    *shape: int,
    layer: str = "",
    owned: bool = True,
    cut: Shard | None = None,
    tp_partial: bool = False,
    **changes: object,
) -> LogicalParameter:
    """An owned Muon matrix; AdamW on the owner where it is not 2-D.

    ``owned=False``: in slices. ``cut``: by tensor parallelism; ``tp_partial``: a whole of which
    each tp rank's gradient is a summand.
    """
    matrix = len(shape) == 2
    compute = gradient = Placement() if cut is None else Placement.of({Axis.TP: cut})
    if tp_partial:
        gradient = Placement.of({Axis.TP: Partial()})
    route = changes.get("route", Route.MATRIX if matrix else Route.ADAMW_OWNER)
    placed = Placed(shape=shape, compute=compute, gradient=gradient)
    values: dict[str, object] = {
        "name": name,
        "shape": shape,
        "kind": Kind.MATRIX if matrix else Kind.VECTOR,
        "route": route,
        **placements_for(route, placed, owned=owned),
        "reason": "test",
        "layer": layer,
    }
    return LogicalParameter(**{**values, **changes})


def table(name: str, *shape: int, **changes: object) -> LogicalParameter:
    """An embedding: sharded AdamW on slices."""
    even = {"kind": Kind.EMBEDDING, "route": Route.ADAMW_SHARDED, "owned": False}
    return parameter(name, *shape, **{**even, **changes})


def other_owners(
    plan: OwnershipPlan,
    owners: Sequence[int] | None = None,
    tp: Mapping[str, int] | None = None,
) -> OwnershipPlan:
    """The same plan with other owners of its units, by data-parallel rank, or other tp owners."""
    units = zip(plan.units, plan.owners if owners is None else owners, strict=True)
    by_name = {name: owner for unit, owner in units for name in unit.members}
    on_tp = tp_owners(plan.parameters) if tp is None else tp
    asked = without_owners(plan.parameters)
    return replace(plan, parameters=with_owners(asked, plan.topology, by_name, on_tp))


def random_model(generator: random.Random) -> list[LogicalParameter]:
    """A small random model with few distinct sizes, so that ties are common."""
    sizes = (1, 2, 4, 8)
    found = []
    for layer in range(generator.randint(1, 5)):
        path = f"layers.{layer}"
        for index in range(generator.randint(1, 6)):
            shape = (generator.choice(sizes), generator.choice(sizes))
            expert = generator.random() < 0.2
            name = f"{path}.matrix{index}"
            found.append(parameter(name, *shape, layer=path, expert=expert))
        found.append(parameter(f"{path}.norm", generator.choice(sizes), layer=path))
    found.append(parameter("norm", 8))
    found.append(table("embedding", generator.randint(1, 20), 4))
    return found


def golden_costs(case: str) -> CostTable:
    """The cost table of a golden case."""
    return CostTable(
        times={tuple(shape): time for shape, time in CASES[case]["ns_ms"]}, source=case
    )


def golden_topology(case: str) -> Topology:
    """The grid of a golden case; its one FSDP shard is our one replica."""
    shards, depth = CASES[case]["columns"], CASES[case]["ranks_per_column"]
    if CASES[case]["sharding"] == "fsdp":
        return Topology(replicas=1, shards=shards * depth)
    return Topology(replicas=depth, shards=shards)


def golden_plan(case: str, topology: Topology | None = None, **changes: object) -> OwnershipPlan:
    """The plan of a golden case; ``changes`` override its planner settings."""
    entry = CASES[case]
    settings: dict[str, object] = {
        "policy": POLICY_OF[entry["assign_by"]],
        "byte_cap": GOLDENS["rule"]["eps"] if entry["byte_cap"] else None,
    }
    return build_plan(
        inventory(INVENTORY_OF[entry["model"]], routers=Kind.MATRIX),
        topology or golden_topology(case),
        golden_costs(case),
        PlannerSettings(**{**settings, **changes}),
        merge_experts=entry["merge_experts"],
    )
