"""MatrixFSDP's roles and policies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megamuon.matrices import Kind, LogicalParameter, Route
from megamuon.ownership import (
    POLICIES,
    ROLE_POLICIES,
    PlanError,
    PlannerSettings,
    Segment,
    Topology,
    Unit,
    assign,
    block_fanouts,
    build_plan,
    build_units,
    planned_units,
    summarize,
)
from tests.support.ownership import parameter, random_model, table


def unit(name: str, size: int, layer: str) -> Unit:
    return Unit(name=name, layer=layer, members=(name,), numel=size)


def owners(policy: str, units: list[Unit], ranks: int, **settings: object) -> tuple[int, ...]:
    rule = PlannerSettings(policy=policy, **settings)
    return assign(units, [0.0] * len(units), Topology(replicas=1, shards=ranks), rule)


def block(layer: str) -> list[LogicalParameter]:
    return [
        parameter(f"{layer}.q", 4, 4, layer=layer),
        parameter(f"{layer}.q.bias", 4, layer=layer),
        parameter(f"{layer}.router", 2, 4, layer=layer, kind=Kind.ROUTER, route=Route.ADAMW_OWNER),
        parameter(f"{layer}.expert", 2, 2, layer=layer, expert=True),
        parameter(f"{layer}.frozen", 3, 3, layer=layer, route=Route.FROZEN),
        parameter(f"{layer}.norm", 4, layer=layer),
    ]


def test_each_matrix_is_a_role_and_the_rest_of_a_block_one_tail() -> None:
    parameters = [
        table("embed", 8, 4),
        *block("layers.0"),
        *block("layers.1"),
        parameter("norm", 4),
    ]
    for merge in (False, True):
        units = build_units(parameters, threshold=1, merge_experts=merge, rule="roles")
        assert [u.members for u in units if u.layer == "layers.1"] == [
            ("layers.1.q",),
            ("layers.1.q.bias", "layers.1.router", "layers.1.norm"),
            ("layers.1.expert",),
            ("layers.1.frozen",),
        ]
        assert [u.members for u in units if not u.layer] == [("norm",)]


def test_the_rule_goes_with_the_policy() -> None:
    parameters = block("layers.0")
    for policy in POLICIES:
        units = planned_units(parameters, PlannerSettings(policy=policy))
        assert len(units) == (4 if policy in ROLE_POLICIES else 2)
    with pytest.raises(ValueError, match="unit rule 'none' is none of threshold, roles"):
        build_units(parameters, rule="none")


# Block a loads ranks 0 and 1 with 6 and 5; block b then starts from these loads.
BLOCKS = [
    unit("a.small", 5, "a"),
    unit("a.large", 6, "a"),
    unit("b.small", 1, "b"),
    unit("b.large", 9, "b"),
]


def test_role_greedy_goes_block_by_block_and_carries_loads_forward() -> None:
    assert owners("role_greedy", BLOCKS, 2) == (1, 0, 0, 1)


def test_scope_greedy_pools_all_blocks() -> None:
    # 9 to rank 0, 6 to rank 1, 5 to rank 1, 1 to rank 0
    assert owners("scope_greedy", BLOCKS, 2) == (1, 1, 0, 0)


def test_cost_aware_takes_the_scope_plan_only_for_a_gain_within_the_caps() -> None:
    role, scope = (owners(policy, BLOCKS, 2) for policy in ("role_greedy", "scope_greedy"))
    # Heaviest load 14 against 11 (a fall of 3/14), largest window 9 elements against 11 (2/9 more).
    assert owners("cost_aware", BLOCKS, 2) == role
    assert owners("cost_aware", BLOCKS, 2, workspace_growth=0.25) == scope
    assert owners("cost_aware", BLOCKS, 2, workspace_growth=0.2) == role
    assert owners("cost_aware", BLOCKS, 2, workspace_growth=0.25, balance_gain=0.3) == role
    cap = 11 * 2 / 2**20
    assert owners("cost_aware", BLOCKS, 2, workspace_growth=1.0, workspace_cap_mib=cap) == scope
    less = {"workspace_growth": 1.0, "workspace_cap_mib": cap * 0.99}
    assert owners("cost_aware", BLOCKS, 2, **less) == role


def test_ties_go_to_the_name_and_the_lower_rank() -> None:
    units = [unit("z", 1, "a"), unit("b", 1, "a"), unit("c", 1, "a")]
    for policy in ROLE_POLICIES:
        assert owners(policy, units, 3) == (2, 0, 1)


@pytest.mark.parametrize("seed", range(10))
def test_scope_is_never_far_from_even(seed: int) -> None:
    """Largest first onto the lightest: at most mean + largest role (Graham)."""
    parameters = random_model(random.Random(seed))
    grid = Topology(replicas=1, shards=3)
    for policy in ROLE_POLICIES:
        plan = build_plan(parameters, grid, lambda *_: 1.0, PlannerSettings(policy=policy))
        held: Counter[int] = Counter()
        for owned, owner in zip(plan.units, plan.owners, strict=True):
            held[owner] += owned.numel
        total, largest = sum(held.values()), max(u.numel for u in plan.units)
        assert max(held.values()) <= total / 3 + largest
        assert Counter(name for u in plan.units for name in u.members) == Counter(
            p.name for p in parameters if p.owned
        )


def decoder(layers: int) -> list[LogicalParameter]:
    """MatrixFSDP's Qwen-style shapes, section 5.1: 201 million elements a layer."""
    found = []
    for index in range(layers):
        layer = f"layers.{index}"
        found += [parameter(f"{layer}.{name}", 4096, 4096, layer=layer) for name in "qkvo"]
        found += [parameter(f"{layer}.up", 16384, 4096, layer=layer)]
        found += [parameter(f"{layer}.down", 4096, 16384, layer=layer)]
        found += [parameter(f"{layer}.norm{i}", 4096, layer=layer) for i in (1, 2)]
    return found


@pytest.mark.parametrize("span", [8, 16, 32, 64])
def test_scope_is_flattest_and_role_needs_the_smallest_workspace(span: int) -> None:
    """The order of table 5: balance role = cost > scope; role is the memory-conservative one."""
    balance, gamma = {}, {}
    for policy in ROLE_POLICIES:
        grid = Topology(replicas=1, shards=span)
        plan = build_plan(decoder(64), grid, lambda *_: 1.0, PlannerSettings(policy=policy))
        balance[policy] = summarize(plan).busiest_over_mean_bytes
        gamma[policy] = max(fanout.gamma for fanout in block_fanouts(plan))
    assert balance["scope_greedy"] == pytest.approx(1.0, abs=0.01)
    assert balance["scope_greedy"] < balance["role_greedy"] <= 1.2
    assert gamma["role_greedy"] < gamma["scope_greedy"]
    assert balance["cost_aware"] == balance["role_greedy"]  # the workspace would grow by a quarter


def test_two_segments_of_a_parameter_on_a_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build_plan(block("layers.0"), Topology(replicas=1, shards=2), lambda *_: 1.0)
    plan.check_contiguous()
    broken = replace(plan)
    split = (Segment(0, 8, 1, 0), Segment(8, 12, 0, 0), Segment(12, 16, 1, 0))
    monkeypatch.setattr(type(broken), "segments", lambda self, name, tp_rank=0: split)
    with pytest.raises(PlanError, match=r"more than one segment of layers\.0\.q: \[1, 0, 1\]"):
        broken.check_contiguous()
