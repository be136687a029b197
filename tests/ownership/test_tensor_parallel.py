"""The second owner of a matrix that tensor parallelism cuts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megamuon.matrices import LogicalParameter, Route
from megamuon.ownership import (
    OwnershipPlan,
    PlanError,
    PlannerSettings,
    Topology,
    build_plan,
    closed_form_cost,
    muon_shapes,
    tp_rank_times,
)
from megamuon.ownership.inventory import cut_by_name, inventory
from megamuon.ownership.owners import tp_owners
from megamuon.ownership.tensor_parallel import choose_tp_owners
from megamuon.placements import Axis, Owned, Placement, Shard
from tests.support.ownership import other_owners, parameter


def cut(name: str, rows: int, cols: int, tp: int = 2, **changes: object) -> LogicalParameter:
    share = -(-rows // tp)
    bounds = tuple(min(piece * share, rows) for piece in range(tp + 1))
    return parameter(name, rows, cols, cut=Shard(0, bounds), **changes)


def area(rows: int, cols: int) -> float:
    return float(rows * cols)


def small_plan(**changes: object) -> OwnershipPlan:
    parameters = [
        cut("a", 8, 8),
        cut("b", 6, 8),
        cut("c", 5, 4),
        parameter("whole", 3, 3),
        cut("adam", 9, 9, route=Route.ADAMW_OWNER),
        parameter("bias", 5, cut=Shard(0, (0, 3, 5))),
    ]
    settings = PlannerSettings(byte_cap=None)
    grid = Topology(replicas=1, shards=1, tp=2)
    return replace(build_plan(parameters, grid, area, settings, threshold=1), **changes)


def test_longest_first_inside_the_bucket() -> None:
    plan = small_plan()
    # 64 to tp rank 0, then 48 and 20 to tp rank 1 (48 < 64)
    assert tp_owners(plan.parameters) == {"a": 0, "b": 1, "c": 1}
    assert plan.update("a").on(Axis.TP) == Owned(0)
    assert plan.update("whole") == plan.storage("whole")
    assert plan.update("adam") == plan.storage("adam")


def test_ties_go_to_more_elements_then_the_name() -> None:
    matrices = [cut("y", 2, 2), cut("x", 2, 2), cut("big", 4, 4), cut("z", 2, 2)]
    times = {(2, 2): 1.0, (4, 4): 1.0}
    chosen = choose_tp_owners(matrices, dict.fromkeys(("x", "y", "z", "big"), 0), times, 2)
    # big, x, y, z: times are level after big and x, and tp rank 1 holds fewer elements
    assert chosen == (("big", 0), ("x", 1), ("y", 1), ("z", 0))


def test_each_data_parallel_owner_is_a_bucket_of_its_own() -> None:
    matrices = [cut(name, 4, 4) for name in "abcd"]
    chosen = choose_tp_owners(matrices, {"a": 3, "b": 0, "c": 3, "d": 0}, {(4, 4): 1.0}, 2)
    assert chosen == (("a", 0), ("b", 0), ("c", 1), ("d", 1))


def test_slices_are_worked_on_by_every_tp_rank_and_need_no_costs() -> None:
    matrices = [cut(f"layers.{i}.w", 4, 4, layer=f"layers.{i}", owned=False) for i in range(4)]
    assert muon_shapes(matrices) == ()
    plan = build_plan(matrices, Topology(replicas=2, shards=2, tp=2), area)
    assert tp_owners(plan.parameters) == {}
    assert {plan.update(p.name) for p in matrices} == {Placement()}
    times = tp_rank_times(plan, area)
    assert (times == 4 * area(4, 4)).all()
    assert plan.owners == ()


def test_no_tp_owner_without_tensor_parallelism() -> None:
    plan = build_plan([parameter("a", 4, 4)], Topology(replicas=1, shards=2), area)
    assert tp_owners(plan.parameters) == {}
    assert plan.update("a") == plan.storage("a")


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_ranks_share_the_work_of_a_real_model(tp: int) -> None:
    parameters = cut_by_name(inventory("qwen2.5-7b"), tp)
    cost = closed_form_cost()
    plan = build_plan(parameters, Topology(replicas=2, shards=4, tp=tp), cost)
    wanted = sorted(
        p.name for p in parameters if p.route is Route.MATRIX and p.compute != Placement()
    )
    assert list(tp_owners(plan.parameters)) == wanted
    times = tp_rank_times(plan, cost)
    whole = np.zeros(8)
    for owner, ms in zip(plan.owners, plan.costs, strict=True):
        whole[owner] += ms
    np.testing.assert_allclose(times.sum(axis=1), whole)
    longest = max(cost(*p.shape) for p in parameters if p.route is Route.MATRIX)
    assert (times.max(axis=1) - times.min(axis=1) <= longest).all()


def test_a_plan_with_tp_owners_survives_json() -> None:
    plan = small_plan()
    again = OwnershipPlan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    stored = {entry["name"]: entry for entry in json.loads(plan.to_json())["parameters"]}
    assert stored["b"]["update"]["tp"] == ["owned", 1]
    assert stored["b"]["storage"]["tp"] == ["shard", 0, [0, 3, 6]]


def test_a_different_tp_owner_changes_the_digest_and_is_named() -> None:
    plan = small_plan()
    other = other_owners(plan, tp={"a": 0, "b": 0, "c": 1})
    assert other.digest != plan.digest
    assert plan.first_difference(other) == "tp owner of b: 1 here, 0 there"
    assert other.first_difference(plan) == "tp owner of b: 0 here, 1 there"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": 2}, "tp owner of a is tp rank 2, of 2 tp ranks"),
        ({"a": -1}, "tp owner of a is tp rank -1"),
        ({"whole": 0}, "whole has tp owner 0 but is no matrix"),
        ({"adam": 0}, "adam has tp owner 0 but is no matrix"),
        ({"d": 1}, "d has tp owner 1 but is no"),
        ({"c": None}, r"c \[5, 4\] is updated by nobody of the 2 ranks on the tp axis"),
    ],
)
def test_tp_owners_that_contradict_the_plan_are_refused(
    change: dict[str, int | None], message: str
) -> None:
    chosen = {"a": 0, "b": 1, "c": 1} | change
    owners = {name: rank for name, rank in chosen.items() if rank is not None}
    with pytest.raises(PlanError, match=message):
        other_owners(small_plan(), tp=owners)


def test_a_cut_that_does_not_make_one_piece_per_tp_rank_is_refused() -> None:
    for wrong in (
        Shard(0, (0, 8)),
        Shard(0, (0, 3, 7)),
        Shard(2, (0, 4, 8)),
        Shard(0),
    ):
        with pytest.raises(PlanError, match=r"a \[8, 8\] is cut along dim \d at .*2 pieces"):
            build_plan(
                [parameter("a", 8, 8, cut=wrong)], Topology(replicas=1, shards=1, tp=2), area
            )
    with pytest.raises(PlanError, match="3 tp ranks|3 pieces"):
        small_plan(topology=Topology(replicas=1, shards=1, tp=3))


def test_segments_are_those_of_the_piece() -> None:
    plan = small_plan()
    assert [plan.segments("c", tp_rank)[0][:2] for tp_rank in (0, 1)] == [(0, 12), (0, 8)]
    even = cut("w", 5, 2, owned=False)
    plan = build_plan([even], Topology(replicas=1, shards=2, tp=2), area)
    assert [s[:2] for s in plan.segments("w", 0)] == [(0, 4), (4, 6)]
    assert [s[:2] for s in plan.segments("w", 1)] == [(0, 2), (2, 4)]
