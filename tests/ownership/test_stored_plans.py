"""Plans that were stored in version 1: read with the same owners and the same segments.

``tests/data/ownership_plans_v1.json`` was written by the last code that stored version 1: the plans
of presets as a run makes them (``collect`` with the sharding plan's placements, closed-form costs,
units of 2,000 elements), and the SHA-256 of all their segments.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megamuon.matrices import collect
from megamuon.models import GPT
from megamuon.ownership import (
    OwnershipPlan,
    PlannerSettings,
    Topology,
    build_plan,
    closed_form_cost,
)
from megamuon.ownership.owners import tp_owners, without_owners
from megamuon.placements import Axis, Partial, Placement
from megamuon.sharding import plan_sharding
from tools.reference_training import model_config

STORED: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "ownership_plans_v1.json").read_text("utf-8")
)
OWNED = [name for name in STORED if "even" not in name]


def stored(name: str) -> tuple[OwnershipPlan, dict[str, Any]]:
    content = STORED[name]["plan"]
    return OwnershipPlan.from_json(json.dumps(content)), content


def old_segments(plan: OwnershipPlan) -> dict[str, list[list[list[int]]]]:
    """All segments as version 1 gave them: a data-parallel rank, or a shard of what lies in
    slices, before the interval.
    """
    found: dict[str, list[list[list[int]]]] = {}
    for parameter in plan.parameters:
        cut = parameter.compute != Placement()
        pieces = [plan.segments(parameter.name, t) for t in range(plan.topology.tp if cut else 1)]
        found[parameter.name] = [
            [[(s.replica or 0) * plan.topology.shards + s.shard, s.start, s.stop] for s in piece]
            for piece in pieces
        ]
    return found


@pytest.mark.parametrize("name", list(STORED))
def test_every_owner_and_every_segment_is_the_same(name: str) -> None:
    plan, content = stored(name)
    assert content["version"] == 1
    assert plan.owners == tuple(unit["owner"] for unit in content["units"])
    for unit in content["units"]:
        assert {plan.owner_of(member) for member in unit["members"]} == {unit["owner"]}
    text = json.dumps(old_segments(plan), sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == STORED[name]["segments"]
    partial = {p.name for p in plan.parameters if p.gradient.on(Axis.TP) == Partial()}
    assert partial == {entry["name"] for entry in content["parameters"] if entry["tp_partial"]}


@pytest.mark.parametrize("name", list(STORED))
def test_tp_owners_are_the_same_and_slices_have_none(name: str) -> None:
    plan, content = stored(name)
    old = dict(content["tp_owners"])
    assert bool(old) == ("tp" in name)
    # In slices every tp rank works on the whole; version 1 named one that nobody asked for.
    assert tp_owners(plan.parameters) == ({} if name not in OWNED else old)


@pytest.mark.parametrize("name", list(STORED))
def test_it_is_the_plan_that_a_run_makes_now(name: str) -> None:
    plan, _ = stored(name)
    asked = STORED[name]["arguments"]
    with torch.device("meta"):
        model = GPT(model_config(asked["model"]))
    sharding = plan_sharding(model, tp=asked["tp"], sequence_parallel=asked.get("sp", False))
    even = asked.get("even", False)
    made = build_plan(
        collect(
            model,
            layers=GPT.layer_classes,
            owner_layout=not even,
            gathered_update=even,
            placements=sharding.placements,
        ),
        Topology(replicas=asked["rows"], shards=asked["columns"], tp=asked["tp"]),
        closed_form_cost(),
        PlannerSettings(policy=plan.settings.policy),
        threshold=2000,
    )
    assert made.first_difference(plan) is None
    assert made == plan
    assert made.digest == plan.digest
    again = OwnershipPlan.from_json(plan.to_json())
    assert json.loads(plan.to_json())["version"] == 2
    assert again == plan


def test_without_owners_undoes_the_choice() -> None:
    plan, _ = stored("nano-moe fsdp tp")
    with torch.device("meta"):
        model = GPT(model_config("nano-moe"))
    placements = plan_sharding(model, tp=2).placements
    asked = collect(model, layers=GPT.layer_classes, placements=placements)
    assert without_owners(plan.parameters) == asked != plan.parameters
