"""Loads of single rails: those of DMuon-2's Table 7, and what it measured on them.

Owns the reading of ``publish_rails.json``: units of each model that add up to the published count
and bytes, layers spread evenly, and the published times.  Invariant: names and sizes come from the
inventory and owners from the planner, so a load is a function of the model and the number of nodes.
Tested by ``tests/tools/test_publish_replay.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megamuon.matrices import Kind, LogicalParameter
from megamuon.ownership import Topology, build_plan, build_units, closed_form_cost
from megamuon.ownership.inventory import inventory

MIB = 2**20
NODES = (2, 4, 8, 16, 32)


@cache
def table() -> dict[str, Mapping[str, Any]]:
    """The published rails by model name."""
    text = Path(__file__).with_name("publish_rails.json").read_text(encoding="utf-8")
    return {rail["model"]: rail for rail in json.loads(text)["rails"]}


def rail_entry(model: str) -> Mapping[str, Any]:
    """The table's entry of a model.  Raises ValueError with the names that there are."""
    try:
        return table()[model]
    except KeyError:
        raise ValueError(f"no rail of {model!r}; there are {', '.join(table())}") from None


@cache
def rail_parameters(model: str) -> tuple[LogicalParameter, ...]:
    """The parameters of a model's rail, in registration order."""
    rail = rail_entry(model)
    parameters = inventory(rail["inventory"], routers=Kind.MATRIX)
    units = {unit.name: unit for unit in build_units(parameters)}
    chosen: set[str] = set()
    for place, (pattern, count) in enumerate(rail["units"]):
        for name in _spread(pattern, count, units, (place + 1) / (len(rail["units"]) + 1)):
            chosen.update(units[name].members)
    return tuple(p for p in parameters if p.name in chosen)


def _spread(pattern: str, count: int, units: Iterable[str], start: float) -> list[str]:
    """``count`` of the units that ``pattern`` names, at even distances from ``start`` (of one)."""
    known = set(units)
    layer = 0
    names = []
    while (name := pattern.format(layer)) in known and name not in names:
        names.append(name)
        layer += 1
    if len(names) < count:
        raise ValueError(f"{count} units {pattern} wanted, there are {len(names)}")
    return [names[int((i + start) * len(names) / count)] for i in range(count)]


@cache
def rail_load(model: str, nodes: int) -> tuple[tuple[int, int], ...]:
    """Owner node and bytes (BF16) of each parameter of the rail, on ``nodes`` nodes."""
    parameters = rail_parameters(model)
    plan = build_plan(parameters, Topology(replicas=nodes, shards=1), closed_form_cost())
    return tuple((plan.owner_of(p.name), 2 * p.numel) for p in parameters)


def rail_facts(model: str) -> dict[str, float]:
    """Parameters, MiB and largest MiB of the rail that is replayed, to compare with the table."""
    sizes = [2 * p.numel / MIB for p in rail_parameters(model)]
    return {
        "parameters": len(sizes),
        "mib": round(sum(sizes), 2),
        "largest_mib": round(max(sizes), 2),
    }


def planned_rail(model: str) -> dict[str, float]:
    """The same of the rail of rank 0 that our planner makes on 8 nodes of 8 with its own costs."""
    parameters = inventory(rail_entry(model)["inventory"], routers=Kind.MATRIX)
    plan = build_plan(parameters, Topology(replicas=8, shards=8), closed_form_cost())
    rail = [
        unit
        for unit, owner in zip(plan.units, plan.owners, strict=True)
        if plan.topology.shard_of(owner) == 0
    ]
    return {
        "parameters": sum(len(unit.members) for unit in rail),
        "mib": round(sum(2 * unit.numel for unit in rail) / MIB, 2),
    }
