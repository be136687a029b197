"""Summary figures on plans small enough to add up by hand."""

from __future__ import annotations

import pytest

from megamuon.matrices import Route
from megamuon.ownership import OwnershipPlan, PlannerSettings, Topology, build_plan, summarize
from tests.support.ownership import golden_plan, parameter, table

MIB = 1 << 20


def plan_of_two_replicas(**settings: object) -> OwnershipPlan:
    parameters = [
        table("embedding", 6, 4),
        parameter("a", 4, 4, layer="l0"),
        parameter("b", 2, 4, layer="l1"),
        parameter("norm", 4),
        parameter("frozen", 10, 4, layer="l2", route=Route.FROZEN),
    ]
    rule = PlannerSettings(policy="round_robin", **settings)
    grid = Topology(replicas=2, shards=2)
    return build_plan(parameters, grid, lambda rows, cols: rows + cols, rule, threshold=5)


def test_figures_of_each_rank() -> None:
    """Units in turn: a, b, norm, frozen on ranks 0, 1, 2, 3."""
    report = summarize(plan_of_two_replicas())
    assert report.rank_ns_ms == (8.0, 6.0, 0.0, 0.0)
    assert report.rank_bytes == (32, 16, 8, 80)
    assert report.rank_parameters == (1, 1, 1, 1)
    # each replica holds 3 rows of the embedding per shard: 12 elements of 8 bytes
    assert report.rank_optimizer_bytes == (96 + 64, 96 + 32, 96 + 32, 96)
    assert report.optimizer_state_gib_busiest == 160 / 2**30
    assert report.routes == {"matrix": 2, "adamw_owner": 1, "adamw_sharded": 1, "frozen": 1}
    assert report.busiest_over_mean_ns == 8 / 3.5
    assert report.busiest_over_mean_bytes == 80 / 34
    assert report.busiest_over_mean_muon_bytes_nonempty_owners == 32 / 24
    assert report.owner_window_mib == 80 / MIB


def test_rails_are_shards() -> None:
    report = summarize(plan_of_two_replicas())
    assert [(r.parameters, r.mib * MIB, r.ns_ms) for r in report.rails] == [
        (2, 40.0, 8.0),
        (2, 96.0, 6.0),
    ]
    assert report.heaviest_rail_over_mean == 96 / 68


def test_bytes_follow_the_compute_dtype() -> None:
    assert summarize(plan_of_two_replicas(bytes_per_element=4)).rank_bytes == (64, 32, 16, 160)


def test_rails_add_up_and_may_be_fewer_than_shards() -> None:
    plan = golden_plan("appendixB cap")
    report = summarize(plan, rails=8)
    assert len(report.rails) == 8
    assert sum(rail.parameters for rail in report.rails) == 337
    assert sum(rail.mib for rail in report.rails) == pytest.approx(sum(report.rank_bytes) / MIB)
    assert sum(rail.ns_ms for rail in report.rails) == pytest.approx(sum(plan.costs))
    with pytest.raises(ValueError, match="32 ranks do not lie evenly on 5 rails"):
        summarize(plan, rails=5)


def test_idle_ranks_are_counted() -> None:
    plan = build_plan([parameter("m", 4, 4)], Topology(replicas=1, shards=5), lambda *shape: 1.0)
    report = summarize(plan)
    assert report.idle_ranks == 4
    assert report.busiest_over_mean_ns == 5.0
