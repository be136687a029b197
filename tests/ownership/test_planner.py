"""The assignment policies: the rule, its switches and its edges."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from megamuon.matrices import LogicalParameter, Route
from megamuon.ownership import (
    POLICIES,
    POLICY_UNITS,
    CostError,
    CostTable,
    PlannerSettings,
    Topology,
    Unit,
    assign,
    build_plan,
    build_units,
    muon_shapes,
    summarize,
    unit_costs,
)
from tests.support.ownership import parameter, random_model, table


def unit(name: str, size: int, layer: str = "") -> Unit:
    return Unit(name=name, layer=layer, members=(name,), numel=size)


def area(rows: int, cols: int) -> float:
    return float(rows * cols)


def fsdp(ranks: int) -> Topology:
    return Topology(replicas=1, shards=ranks)


def literal_rule(
    units: Sequence[Unit], costs: Sequence[float], grid: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """The rule of the golden file, word by word and without arrays."""
    rails = 1 if grid.replicas == 1 else grid.shards
    depth = grid.world // rails
    time = {(c, r): 0.0 for c in range(rails) for r in range(depth)}
    held = dict.fromkeys(time, 0)
    used: set[tuple[str, int, int]] = set()
    mean = sum(u.numel for u in units) * settings.bytes_per_element / grid.world
    owners = [-1] * len(units)
    for i in sorted(range(len(units)), key=lambda i: (-costs[i], -units[i].numel, units[i].name)):
        size = units[i].numel * settings.bytes_per_element
        fresh = [key for key in time if (units[i].layer, *key) not in used]
        open_rails = sorted({c for c, _ in fresh}) or list(range(rails))
        rail_time = [sum(time[c, r] for r in range(depth)) for c in range(rails)]
        rail = min(open_rails, key=lambda c: (rail_time[c], c))
        ranks = [key for key in fresh if key[0] == rail] or [(rail, r) for r in range(depth)]
        cap = math.inf if settings.byte_cap is None else (1 + settings.byte_cap) * mean
        fit = [key for key in ranks if held[key] + size <= cap]
        chosen = (
            min(fit, key=lambda k: (time[k], k)) if fit else min(ranks, key=lambda k: (held[k], k))
        )
        time[chosen] += costs[i]
        held[chosen] += size
        used.add((units[i].layer, *chosen))
        owners[i] = chosen[1] if grid.replicas == 1 else chosen[1] * grid.shards + rail
    return tuple(owners)


@pytest.mark.parametrize("seed", range(60))
def test_random_cases_follow_the_rule_and_have_one_owner_per_unit(seed: int) -> None:
    generator = random.Random(seed)
    parameters = random_model(generator)
    grid = Topology(replicas=generator.choice((1, 2, 3)), shards=generator.choice((1, 2, 5)))
    settings = PlannerSettings(byte_cap=generator.choice((None, 0.0, 0.1, 1.0)))
    plan = build_plan(parameters, grid, area, settings, threshold=generator.choice((4, 16, 10**6)))
    found = assign(plan.units, plan.costs, grid, settings)  # before experts are evened out
    assert found == literal_rule(plan.units, plan.costs, grid, settings)
    members = Counter(name for u in plan.units for name in u.members)
    owned = [p.name for p in parameters if p.owned]
    assert members == Counter(owned)
    assert all(0 <= owner < grid.world for owner in plan.owners)


@pytest.mark.parametrize("policy", ["lpt", "numel", "scope_greedy"])
def test_owners_do_not_depend_on_the_order_of_the_parameters(policy: str) -> None:
    generator = random.Random(7)
    parameters = random_model(generator)
    grid, settings = Topology(replicas=2, shards=3), PlannerSettings(policy=policy)
    first = build_plan(parameters, grid, area, settings, threshold=8)
    for _ in range(5):
        generator.shuffle(parameters)
        other = build_plan(parameters, grid, area, settings, threshold=8)
        for p in parameters:
            if p.owned:
                assert other.owner_of(p.name) == first.owner_of(p.name)


def test_longest_first_then_more_elements_then_the_name() -> None:
    units = [unit("c", 1), unit("b", 1), unit("a", 2), unit("z", 1)]
    settings = PlannerSettings(byte_cap=None, spread_layers=False)
    # z (time 2), a (more elements), b, c (names) meet ranks 0, 1, 1, 0
    assert assign(units, [1.0, 1.0, 1.0, 2.0], fsdp(2), settings) == (0, 1, 1, 0)


def test_spreading_gives_the_units_of_a_layer_different_ranks() -> None:
    units = [unit("big", 1, "layers.0")] + [unit(f"u{i}", 1, "layers.1") for i in range(3)]
    costs = [10.0, 1.0, 1.0, 1.0]
    spread = assign(units, costs, fsdp(3), PlannerSettings(byte_cap=None))
    assert sorted(spread[1:]) == [0, 1, 2]
    free = assign(units, costs, fsdp(3), PlannerSettings(byte_cap=None, spread_layers=False))
    assert set(free[1:]) == {1, 2}


def test_spreading_has_priority_over_the_cap() -> None:
    units = [unit("large", 100, "a")] + [unit(f"u{i}", 1, "b") for i in range(2)]
    owners = assign(units, [0.5, 1.0, 1.0], fsdp(2), PlannerSettings(byte_cap=0.0))
    assert set(owners[1:]) == {0, 1}


def test_more_units_in_a_layer_than_ranks() -> None:
    units = [unit(f"u{i}", 1, "layers.0") for i in range(10)]
    for grid in (fsdp(4), Topology(replicas=2, shards=2)):
        counts = Counter(assign(units, [1.0] * 10, grid, PlannerSettings()))
        assert sorted(counts.values()) == [2, 2, 3, 3]


def test_the_cap_trades_time_for_bytes() -> None:
    units = [unit("heavy", 100, "a"), unit("long", 1, "b"), unit("heavy2", 100, "c")]
    costs = [2.0, 3.0, 1.0]
    capped = assign(units, costs, fsdp(2), PlannerSettings(byte_cap=0.1))
    free = assign(units, costs, fsdp(2), PlannerSettings(byte_cap=None))
    assert free == (1, 0, 1)
    assert capped == (1, 0, 0)


def test_a_unit_above_the_cap_goes_to_the_fewest_bytes() -> None:
    units = [unit("long", 10, "a"), unit("light", 1, "b"), unit("giant", 1000, "c")]
    # giant exceeds the cap on both: rank 0 has the fewest bytes although rank 1 has less time
    owners = assign(units, [1.0, 5.0, 0.1], fsdp(2), PlannerSettings(byte_cap=0.1))
    assert owners == (1, 0, 0)


def test_rail_balance_changes_the_rails() -> None:
    units = [unit(f"u{i}", 100, f"layers.{i}") for i in range(4)]
    grid = Topology(replicas=4, shards=2)
    settings = PlannerSettings(byte_cap=0.0)
    balanced = assign(units, [1.0] * 4, grid, settings)
    assert Counter(owner % 2 for owner in balanced) == {0: 2, 1: 2}
    flat = assign(units, [1.0] * 4, grid, PlannerSettings(byte_cap=0.0, balance_rails=False))
    assert Counter(owner % 2 for owner in flat) == {0: 4}
    assert len(set(flat)) == 4


def test_numel_orders_and_balances_by_elements() -> None:
    units = [unit("small", 1, "a"), unit("large", 3, "b"), unit("middle", 2, "c")]
    costs = [9.0, 1.0, 1.0]
    settings = PlannerSettings(policy="numel", byte_cap=None)
    assert assign(units, costs, fsdp(2), settings) == (1, 0, 1)
    assert assign(units, costs, fsdp(2), PlannerSettings(byte_cap=None)) == (0, 1, 1)


def test_round_robin_takes_units_in_turn() -> None:
    units = [unit(f"u{i}", i + 1) for i in range(5)]
    settings = PlannerSettings(policy="round_robin")
    assert assign(units, [1.0] * 5, fsdp(3), settings) == (0, 1, 2, 0, 1)


def test_every_named_policy_exists() -> None:
    assert tuple(POLICIES) == tuple(POLICY_UNITS)


@pytest.mark.parametrize("policy", POLICY_UNITS)
@pytest.mark.parametrize("grid", [fsdp(1), fsdp(50), Topology(replicas=50, shards=2)])
def test_one_rank_and_more_ranks_than_units(policy: str, grid: Topology) -> None:
    parameters = random_model(random.Random(3))
    plan = build_plan(parameters, grid, area, PlannerSettings(policy=policy), threshold=8)
    assert len(plan.units) < 100
    if grid.world == 1:
        assert set(plan.owners) == {0}
    else:
        assert len(set(plan.owners)) == min(len(plan.units), grid.world)
    again = build_plan(parameters, grid, area, PlannerSettings(policy=policy), threshold=8)
    assert again.digest == plan.digest


def test_nothing_to_own() -> None:
    plan = build_plan([table("embedding", 10, 4)], fsdp(4), area)
    assert plan.units == () == plan.owners
    assert summarize(plan).busiest_over_mean_ns == 0.0


def test_cost_of_a_unit_is_the_sum_over_its_trained_matrices() -> None:
    parameters = [
        parameter("q", 2, 3),
        parameter("k", 2, 3),
        parameter("bias", 100),
        parameter("frozen", 50, 50, route=Route.FROZEN),
        parameter("adam", 40, 40, route=Route.ADAMW_OWNER),
    ]
    units = build_units(parameters)
    assert muon_shapes(parameters) == ((2, 3),)
    assert unit_costs(units, parameters, area) == (12.0,)
    (frozen,) = build_units([parameters[3]])
    assert unit_costs((frozen,), [parameters[3]], area) == (0.0,)
    assert frozen.numel == 2500


def test_matrices_in_even_layout_need_no_cost() -> None:
    even = parameter("m", 4, 4, owned=False)
    nothing = CostTable(times={}, source="empty table")
    assert build_plan([even], fsdp(2), nothing).units == ()


def test_missing_costs_are_all_named() -> None:
    parameters = [parameter("a", 2, 3), parameter("b", 4, 5), parameter("c", 1, 1)]
    costs = CostTable(times={(1, 1): 1.0}, source="table T")
    with pytest.raises(CostError, match=r"\[2, 3\](.|\n)*\[4, 5\]"):
        build_plan(parameters, fsdp(2), costs)


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -0.1])
def test_unusable_costs_name_the_unit(cost: float) -> None:
    with pytest.raises(ValueError, match="unit only"):
        assign([unit("only", 1)], [cost], fsdp(2), PlannerSettings())
    with pytest.raises(ValueError, match="1 units but 0 costs"):
        assign([unit("only", 1)], [], fsdp(2), PlannerSettings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "best"}, "policy 'best' is none of lpt, numel, round_robin"),
        ({"byte_cap": -0.1}, "got -0.1: 0.1 gives ten per cent"),
        ({"byte_cap": float("nan")}, "byte_cap"),
        ({"bytes_per_element": 0}, "bytes_per_element"),
        ({"balance_gain": -1.0}, "balance_gain must be"),
        ({"workspace_growth": float("inf")}, "workspace_growth must be"),
        ({"workspace_cap_mib": -2.0}, "workspace_cap_mib must be"),
    ],
)
def test_settings_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlannerSettings(**changes)


def test_topology_is_checked_and_numbers_ranks_replica_by_replica() -> None:
    grid = Topology(replicas=2, shards=4)
    assert (grid.world, grid.replica_of(6), grid.shard_of(6)) == (8, 1, 2)
    for replicas, rails in ((0, 4), (2, -1), (2.0, 4)):
        with pytest.raises(ValueError, match="Topology"):
            Topology(replicas=replicas, shards=rails)


def test_bytes_per_element_moves_no_owner() -> None:
    parameters: list[LogicalParameter] = random_model(random.Random(11))
    plans = [
        build_plan(parameters, fsdp(4), area, PlannerSettings(bytes_per_element=size), threshold=8)
        for size in (2, 4)
    ]
    assert plans[0].owners == plans[1].owners
