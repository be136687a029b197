"""Fan-out and bytes per rank, against closed forms and sums done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megamuon.matrices import LogicalParameter, Route
from megamuon.ownership import (
    OwnershipPlan,
    PlannerSettings,
    ResourceEstimate,
    Topology,
    block_fanouts,
    build_plan,
    closed_form_cost,
    estimate,
)
from megamuon.ownership.inventory import inventory
from megamuon.placements import Shard
from tests.support.ownership import parameter, table


def plan_of(
    parameters: list[LogicalParameter], replicas: int, shards: int, **settings: object
) -> OwnershipPlan:
    rule = PlannerSettings(policy="round_robin", **settings)
    grid = Topology(replicas=replicas, shards=shards)
    return build_plan(parameters, grid, lambda *_: 1.0, rule, threshold=1)


def small(replicas: int, shards: int) -> OwnershipPlan:
    """Units in turn: a, b, norm on ranks 0, 1, 2; the table in slices of two rows."""
    return plan_of(
        [
            table("embedding", 2 * shards, 4),
            parameter("a", 4, 4, layer="l0"),
            parameter("b", 2, 4, layer="l1"),
            parameter("norm", 4),
        ],
        replicas,
        shards,
    )


def total(resources: ResourceEstimate, kind: str) -> int:
    return sum(getattr(resources, kind))


def test_gamma_is_the_busiest_over_the_mean() -> None:
    parameters = [parameter(f"l.{i}", 2, size, layer="l") for i, size in enumerate((3, 2, 1, 4))]
    (fanout,) = block_fanouts(plan_of(parameters, 1, 3))
    # units in turn on ranks 0, 1, 2, 0: 14, 4 and 2 of 20 elements of 2 bytes
    assert (fanout.block, fanout.bytes, fanout.busiest_bytes) == ("l", 40, 28)
    assert fanout.gamma == pytest.approx(28 / (40 / 3))
    # two replicas of two: shard 0 leads l.0 and l.2 (8 elements), shard 1 l.1 and l.3 (12)
    (fanout,) = block_fanouts(plan_of(parameters, 2, 2))
    assert fanout.busiest_bytes == 24
    assert fanout.gamma == pytest.approx(24 / (40 / 2))


def test_gamma_is_one_on_one_rank_and_the_span_for_one_owner() -> None:
    one = [parameter("l.0", 4, 4, layer="l")]
    assert [f.gamma for f in block_fanouts(plan_of(one, 1, 1))] == [1.0]
    assert [f.gamma for f in block_fanouts(plan_of(one, 1, 8))] == [8.0]
    assert block_fanouts(plan_of([table("t", 8, 2)], 1, 2)) == ()


def test_bytes_of_each_rank_by_hand() -> None:
    found = estimate(small(1, 3), zero_stage=3)
    # per rank: 8 elements of the table, and 16, 8 or 4 owned ones; FP32 masters, no other copy
    assert found.parameters == (96, 64, 48)
    assert found.gradients == (96, 64, 48)
    assert found.optimizer_state == (64 + 64, 64 + 32, 64 + 32)
    # gathered: the table and layer a at a time, and the norm for good; slots of the first two
    fixed = (24 + 16 + 4 + 24 + 16) * 2
    assert found.workspace == (fixed + 16 * 4, fixed + 8 * 4, fixed + 8 * 4)
    # two gathers of the table and the layers, one of the norm, one reduction in FP32
    gathered = [2 * (8 + 16), 2 * (8 + 8), 2 * 8 + 4]
    whole = 2 * (24 + 16 + 8) + 4
    mine = [24, 16, 12]
    assert found.sent_inside_replicas == tuple(
        2 * 2 * g + 4 * (52 - m) for g, m in zip(gathered, mine, strict=True)
    )
    assert found.received_inside_replicas == tuple(
        2 * (whole - g) + 4 * 2 * m for g, m in zip(gathered, mine, strict=True)
    )
    assert set(found.sent_across_replicas) == set(found.received_across_replicas) == {0}


def test_leaders_hold_copies_and_publish_across_replicas() -> None:
    """2 x 2 ranks: a on rank 0, b on rank 1, norm on rank 2 (shard 0, replica 1)."""
    found = estimate(small(2, 2), zero_stage=3)
    # slices of 8 elements in every rank; shard 0 leads a and norm (20 elements), shard 1 b (8)
    assert found.parameters == (24 * 4 + 40, 16 * 4 + 16, 12 * 4 + 40, 8 * 4 + 16)
    ring = 2 * 1 * 8 * 4 // 2
    assert found.sent_across_replicas == (
        4 * 4 + 16 * 2 + ring,  # the norm's gradient to rank 2; a published
        8 * 2 + ring,
        16 * 4 + 4 * 2 + ring,
        8 * 4 + ring,
    )
    assert found.received_across_replicas == (
        16 * 4 + 4 * 2 + ring,
        8 * 4 + ring,
        4 * 4 + 16 * 2 + ring,
        8 * 2 + ring,
    )


@pytest.mark.parametrize(("replicas", "shards"), [(1, 8), (2, 4), (4, 2), (8, 8)])
@pytest.mark.parametrize(("stage", "gathers"), [(1, 1), (2, 1), (3, 2)])
def test_volumes_are_the_closed_forms(replicas: int, shards: int, stage: int, gathers: int) -> None:
    """2(N-1)P and 3(N-1)P inside the replicas, 2(R-1)P across them, for one dtype on the wire."""
    parameters = [p for p in inventory("qwen2.5-7b") if p.name != "model.norm.weight"]
    grid = Topology(replicas=replicas, shards=shards)
    plan = build_plan(parameters, grid, closed_form_cost())
    found = estimate(plan, zero_stage=stage, reduce_bytes=2, master_bytes=2)
    size = 2 * sum(p.numel for p in parameters)
    inside = (gathers + 1) * (shards - 1) * size * replicas
    across = 2 * (replicas - 1) * size
    for direction in ("sent", "received"):
        assert total(found, f"{direction}_inside_replicas") == inside
        assert total(found, f"{direction}_across_replicas") == across


def test_micro_batches_multiply_gathers_and_reductions_but_not_the_publish() -> None:
    plan = small(2, 2)
    one, four = (estimate(plan, zero_stage=2, micro_batches=n) for n in (1, 4))
    assert total(four, "sent_inside_replicas") == 4 * total(one, "sent_inside_replicas")
    published = 2 * (16 + 8 + 4)
    reduced = total(one, "sent_across_replicas") - published
    assert total(four, "sent_across_replicas") == 4 * reduced + published
    resident = [estimate(plan, zero_stage=1, micro_batches=n) for n in (1, 4)]
    whole = 2 * 44 * 2  # gathered once a step by the two replicas, whatever the micro-batches
    sums = [total(found, "sent_inside_replicas") for found in resident]
    assert sums[1] - whole == 4 * (sums[0] - whole)


@pytest.mark.parametrize(("replicas", "shards"), [(1, 8), (2, 8), (4, 8), (32, 8)])
def test_mean_bytes_are_those_of_section_4_4(replicas: int, shards: int) -> None:
    """Parameters 2M/K + 4M/(RK), gradients and momentum 4M/(RK): DMuon-2, section 4.4."""
    owned = [p for p in inventory("qwen2.5-7b") if p.route is Route.MATRIX]
    plan = build_plan(owned, Topology(replicas=replicas, shards=shards), closed_form_cost())
    found, size = estimate(plan), sum(p.numel for p in owned)
    ranks = replicas * shards
    copies = 2 * size / shards if replicas > 1 else 0
    assert np.mean(found.parameters) == pytest.approx(copies + 4 * size / ranks)
    assert np.mean(found.gradients) == pytest.approx(4 * size / ranks)
    assert np.mean(found.optimizer_state) == pytest.approx(4 * size / ranks)


def test_stages_trade_workspace_for_volume() -> None:
    plan = small(1, 3)
    one, two, three = (estimate(plan, zero_stage=stage) for stage in (1, 2, 3))
    assert max(three.workspace) < max(two.workspace)
    assert total(three, "sent_inside_replicas") > total(two, "sent_inside_replicas")
    assert one.parameters == tuple(held + 2 * 52 for held in three.parameters)


def test_frozen_parameters_are_gathered_but_never_reduced_or_published() -> None:
    frozen = [parameter("f", 4, 4, layer="l", route=Route.FROZEN)]
    found = estimate(plan_of(frozen, 2, 2))
    assert set(found.gradients) == set(found.optimizer_state) == {0}
    assert set(found.sent_across_replicas) == {0}
    assert total(found, "sent_inside_replicas") == 2 * 2 * 16 * 2


def test_a_tied_table_stays_gathered() -> None:
    tied = parameter("t", 4, 4, owned=False, route=Route.ADAMW_SHARDED, aliases=("head",))
    loose = parameter("t", 4, 4, owned=False, route=Route.ADAMW_SHARDED)
    sums = [
        total(estimate(plan_of([p], 1, 2), reduce_bytes=2), "sent_inside_replicas")
        for p in (tied, loose)
    ]
    assert sums == [2 * 32, 3 * 32]


def test_pieces_of_tensor_parallelism_are_what_is_counted() -> None:
    cut = parameter("a", 5, 4, layer="l", cut=Shard(0, (0, 3, 5)))
    plan = build_plan([cut], Topology(replicas=1, shards=1, tp=2), lambda *_: 1.0)
    assert estimate(plan).parameters == (12 * 4,)
    assert block_fanouts(plan)[0].bytes == 12 * 2


def test_nothing_to_estimate_and_bad_input() -> None:
    assert estimate(plan_of([], 1, 2)).parameters == (0, 0)
    with pytest.raises(ValueError, match="zero_stage 4: choose 1, 2 or 3"):
        estimate(small(1, 2), zero_stage=4)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        estimate(small(1, 2), micro_batches=0)
