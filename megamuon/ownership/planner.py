"""Planner policies: which data-parallel rank owns which unit.

Owns the greedy rule of DMuon-2 (section 4.3 and appendix B) and its ablations, behind one
signature ``policy(units, costs, topology, settings) -> owners``, and ``build_plan``; the policies
of MatrixFSDP are in ``role_policies.py``.  Invariant: pure and deterministic; every rank computes
the same owners from the same inputs, and ties are broken by number of elements, unit name and rank
index, never by the order of a dictionary.  Tested by ``tests/ownership/test_planner.py`` and,
against published figures, by ``tests/ownership/test_goldens.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from megamuon.matrices import LogicalParameter, Route
from megamuon.ownership.cost import CostError, CostFunction
from megamuon.ownership.owners import with_owners
from megamuon.ownership.plan import OwnershipPlan
from megamuon.ownership.rebalance import rebalance_experts
from megamuon.ownership.role_policies import cost_aware, role_greedy, scope_greedy
from megamuon.ownership.settings import POLICY_UNITS, PlannerSettings, Topology
from megamuon.ownership.tensor_parallel import choose_tp_owners
from megamuon.ownership.units import UNIT_RULES, UNIT_THRESHOLD, Unit, build_units
from megamuon.placements import Owned

Policy = Callable[[Sequence[Unit], Sequence[float], Topology, PlannerSettings], tuple[int, ...]]

__all__ = [
    "POLICIES",
    "PlannerSettings",
    "Policy",
    "assign",
    "build_plan",
    "muon_shapes",
    "planned_units",
    "register_policy",
    "unit_costs",
]


class _Grid:
    """Running totals of a greedy assignment, as rails of ranks.

    One replica, or rail balance turned off, is one flat rail of all ranks.  It counts rail by
    rail, so that ties go to the lower rail; this is the order that gives appendix B's figures
    without rail balance.
    """

    def __init__(self, total_bytes: int, topology: Topology, settings: PlannerSettings) -> None:
        flat = topology.replicas == 1 or not settings.balance_rails
        self.topology = topology
        self.rails = 1 if flat else topology.shards
        self.depth = topology.world // self.rails  # ranks in a rail
        self.times = np.zeros((self.rails, self.depth))
        self.bytes = np.zeros((self.rails, self.depth), dtype=np.int64)
        self.rail_times = np.zeros(self.rails)
        self.free: dict[
            str, np.ndarray
        ] = {}  # layer -> [rails, depth]: rank not used by the layer yet
        self.free_counts: dict[str, np.ndarray] = {}  # layer -> [rails]
        self.spread = settings.spread_layers
        cap = settings.byte_cap
        mean = total_bytes / topology.world
        self.limit = None if cap is None else math.floor((1 + cap) * mean)

    def place(self, layer: str, weight: float, size: int) -> int:
        """Give a unit to a rank and return that global rank."""
        rail, free = self._rail(layer)
        rank = self._rank(rail, free, size)
        self.times[rail, rank] += weight
        self.bytes[rail, rank] += size
        self.rail_times[rail] += weight
        if free is not None:
            free[rank] = False
            self.free_counts[layer][rail] -= 1
        shard, replica = divmod(rail * self.depth + rank, self.topology.replicas)
        return self.topology.rank_of(replica=replica, shard=shard)

    def _rail(self, layer: str) -> tuple[int, np.ndarray | None]:
        """The rail to use, and which of its ranks the layer may take (None: all of them)."""
        if not self.spread:
            return int(self.rail_times.argmin()), None
        if layer not in self.free:
            self.free[layer] = np.ones((self.rails, self.depth), dtype=bool)
            self.free_counts[layer] = np.full(self.rails, self.depth)
        has_free = self.free_counts[layer] > 0
        if not has_free.any():  # the layer has more units than there are ranks
            return int(self.rail_times.argmin()), None
        rail = int(np.where(has_free, self.rail_times, np.inf).argmin())
        return rail, self.free[layer][rail]

    def _rank(self, rail: int, free: np.ndarray | None, size: int) -> int:
        times, held = self.times[rail], self.bytes[rail]
        if self.limit is None:
            return int(times.argmin() if free is None else np.where(free, times, np.inf).argmin())
        allowed = held <= self.limit - size
        if free is not None:
            allowed &= free
        best = int(np.where(allowed, times, np.inf).argmin())
        if allowed[best]:
            return best
        # No rank keeps the cap (a unit may exceed it alone): spreading first, then fewest bytes.
        most = np.iinfo(np.int64).max
        return int(held.argmin() if free is None else np.where(free, held, most).argmin())


def _greedy(
    units: Sequence[Unit], weights: Sequence[float], topology: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """Longest unit first (ties: more elements, then the name) onto the least loaded rank."""
    sizes = [unit.numel * settings.bytes_per_element for unit in units]
    grid = _Grid(sum(sizes), topology, settings)
    order = sorted(range(len(units)), key=lambda i: (-weights[i], -units[i].numel, units[i].name))
    owners = [0] * len(units)
    for i in order:
        owners[i] = grid.place(units[i].layer, weights[i], sizes[i])
    return tuple(owners)


def lpt(
    units: Sequence[Unit], costs: Sequence[float], topology: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """Longest processing time first, by Newton-Schulz time (DMuon-2, appendix B; Graham 1969)."""
    return _greedy(units, costs, topology, settings)


def numel(
    units: Sequence[Unit], costs: Sequence[float], topology: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """The same greedy rule over element counts in the place of times (ablation, appendix B)."""
    return _greedy(units, [float(unit.numel) for unit in units], topology, settings)


def round_robin(
    units: Sequence[Unit], costs: Sequence[float], topology: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """Units in registration order over the global ranks in turn: no balancing (appendix B)."""
    return tuple(i % topology.world for i in range(len(units)))


POLICIES: dict[str, Policy] = {
    "lpt": lpt,
    "numel": numel,
    "round_robin": round_robin,
    "role_greedy": role_greedy,
    "scope_greedy": scope_greedy,
    "cost_aware": cost_aware,
}


def register_policy(name: str, policy: Policy, *, units: str = "threshold") -> None:
    """Add a policy, on all ranks alike, before flags are parsed: ``--owner-planner`` knows the
    name.  ``units``: the rule of ``build_units`` that it goes with.  Raises ValueError for a name
    that is taken and for an unknown rule.
    """
    if name in POLICIES:
        raise ValueError(f"policy {name!r}: there is one of this name")
    if units not in UNIT_RULES:
        raise ValueError(f"policy {name!r}: units={units!r} is none of {', '.join(UNIT_RULES)}")
    POLICY_UNITS[name] = units
    POLICIES[name] = policy


def assign(
    units: Sequence[Unit], costs: Sequence[float], topology: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """Global rank of the owner of each unit, in the order of ``units``; ``costs`` in milliseconds.

    Raises ValueError where the lengths differ or a cost is negative or not finite (naming the
    unit).
    """
    if len(units) != len(costs):
        raise ValueError(f"assign: {len(units)} units but {len(costs)} costs")
    for unit, cost in zip(units, costs, strict=True):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(
                f"assign: cost of unit {unit.name} is {cost}; it must be finite and not negative"
            )
    return POLICIES[settings.policy](units, costs, topology, settings)


def muon_shapes(parameters: Sequence[LogicalParameter]) -> tuple[tuple[int, int], ...]:
    """Distinct whole shapes of the Muon matrices that get an owner, sorted: what costs are needed
    for. Where every rank works on a matrix, nobody has to be chosen.
    """
    shapes = {
        (p.shape[0], p.shape[1])
        for p in parameters
        if p.route is Route.MATRIX and any(isinstance(on, Owned) for _, on in p.update.axes)
    }
    return tuple(sorted(shapes))


def _times(
    parameters: Sequence[LogicalParameter], cost_of: CostFunction
) -> dict[tuple[int, int], float]:
    """Milliseconds by whole shape.  Raises CostError that lists every shape without a time."""
    times: dict[tuple[int, int], float] = {}
    missing: list[str] = []
    for shape in muon_shapes(parameters):
        try:
            times[shape] = float(cost_of(*shape))
        except CostError as error:
            missing.append(str(error))
    if missing:
        raise CostError("\n".join(missing))
    return times


def unit_costs(
    units: Sequence[Unit], parameters: Sequence[LogicalParameter], cost_of: CostFunction
) -> tuple[float, ...]:
    """Milliseconds of each unit: the sum over its Muon matrices; everything else costs nothing.

    Raises CostError that lists every shape for which ``cost_of`` has no time.
    """
    times = _times(parameters, cost_of)
    by_name = {
        p.name: times[p.shape[0], p.shape[1]] if p.route is Route.MATRIX else 0.0
        for p in parameters
        if p.owned
    }
    # fsum rounds once, so the sum does not depend on the order of the members.
    return tuple(math.fsum(by_name[name] for name in unit.members) for unit in units)


def planned_units(
    parameters: Sequence[LogicalParameter],
    settings: PlannerSettings,
    threshold: int = UNIT_THRESHOLD,
    merge_experts: bool = False,
) -> tuple[Unit, ...]:
    """The units that ``build_plan`` assigns: by the rule that goes with the policy."""
    return build_units(
        parameters,
        threshold=threshold,
        merge_experts=merge_experts,
        rule=settings.unit_rule,
    )


def build_plan(
    parameters: Sequence[LogicalParameter],
    topology: Topology,
    cost_of: CostFunction,
    settings: PlannerSettings | None = None,
    threshold: int = UNIT_THRESHOLD,
    merge_experts: bool = False,
) -> OwnershipPlan:
    """The plan for ``parameters`` (in registration order) on ``topology``.

    ``cost_of(rows, cols)`` gives the milliseconds of one Newton-Schulz run; see
    ``megamuon.ownership.cost``. ``threshold`` and ``merge_experts`` do not matter to policies over
    roles. What asks for a tp rank to work on the whole of it gets one as well. Raises what
    ``build_units``, ``unit_costs`` and ``OwnershipPlan`` raise.
    """
    settings = settings or PlannerSettings()
    units = planned_units(parameters, settings, threshold, merge_experts)
    costs = unit_costs(units, parameters, cost_of)
    owners = assign(units, costs, topology, settings)
    if settings.policy == "lpt" and settings.byte_cap is not None:
        experts = frozenset(p.name for p in parameters if p.expert)
        owners = rebalance_experts(units, costs, owners, experts, topology, settings)
    by_name = {
        name: owner for unit, owner in zip(units, owners, strict=True) for name in unit.members
    }
    on_tp = choose_tp_owners(parameters, by_name, _times(parameters, cost_of), topology.tp)
    plan = OwnershipPlan(
        topology=topology,
        parameters=with_owners(parameters, topology, by_name, dict(on_tp)),
        units=units,
        costs=costs,
        settings=settings,
    )
    if settings.unit_rule == "roles":
        plan.check_contiguous()
    return plan
