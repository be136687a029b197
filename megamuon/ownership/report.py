"""Summary figures of an ownership plan: is it balanced?

Owns the arithmetic behind ``tools/plan_owners.py``: time, bytes and optimizer state per rank, per
rail and for the busiest rank, with the definitions of DMuon-2's tables 3 and 7 and appendices B
and C.5.  Invariant: a pure function of the plan; sums over rails equal sums over units.  Tested by
``tests/ownership/test_goldens.py`` and ``tests/ownership/test_report.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megamuon.matrices import Route
from megamuon.ownership.cost import CostFunction
from megamuon.ownership.estimate import StateBytes, optimizer_bytes
from megamuon.ownership.plan import OwnershipPlan
from megamuon.placements import DATA_AXES, Axis, Owned

MIB = float(1 << 20)
GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True)
class Rail:
    """What the owners of one rail hold together."""

    parameters: int
    mib: float
    ns_ms: float
    # HSDP: names in the order in which owners publish them, the forward order of the layers.
    publish_order: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Figures of one plan.  Ratios are over the mean of all ranks; nothing over nothing is 0."""

    rails: tuple[Rail, ...]  # in rail order
    heaviest_rail_over_mean: float  # bytes
    heaviest_rail_over_mean_ns: float
    busiest_over_mean_ns: float
    busiest_over_mean_bytes: float  # owned parameters in the compute dtype
    busiest_over_mean_muon_bytes_nonempty_owners: float  # over the owners of Muon matrices
    owner_window_mib: float  # most bytes on one owner
    optimizer_state_gib_busiest: float
    routes: dict[str, int]  # parameters per route
    units: int
    idle_ranks: int  # ranks that own nothing
    rank_ns_ms: tuple[float, ...]
    rank_bytes: tuple[int, ...]
    rank_parameters: tuple[int, ...]
    rank_optimizer_bytes: tuple[int, ...]


def _over_mean(values: np.ndarray) -> float:
    mean = float(values.mean()) if values.size else 0.0
    return float(values.max()) / mean if mean > 0 else 0.0


def _publish_orders(plan: OwnershipPlan, rails: int) -> list[tuple[str, ...]]:
    """Owned parameters of each rail in registration order; nothing is published to a single
    replica.
    """
    names: list[list[str]] = [[] for _ in range(rails)]
    for parameter in plan.parameters if plan.topology.replicas > 1 else ():
        if parameter.name in plan.homes and parameter.trainable:
            names[plan.owner_of(parameter.name) % rails].append(parameter.name)
    return [tuple(order) for order in names]


def tp_rank_times(plan: OwnershipPlan, cost_of: CostFunction) -> np.ndarray:
    """Newton-Schulz milliseconds of every rank under tensor parallelism, [data-parallel, tp].

    A cut matrix costs its tp owner alone; a whole one costs every tp rank, which all repeat it.
    Matrices in slices, which every rank puts together, count on all of them.
    """
    times = np.zeros((plan.topology.world, plan.topology.tp))
    places = times.reshape(tuple(plan.topology.sizes.values()))
    for parameter in plan.parameters:
        if parameter.route is not Route.MATRIX:
            continue
        on_axes = (parameter.update.on(axis) for axis in (*DATA_AXES, Axis.TP))
        places[tuple(on.index if isinstance(on, Owned) else slice(None) for on in on_axes)] += (
            cost_of(*parameter.shape)
        )
    return times


def summarize(
    plan: OwnershipPlan, *, rails: int | None = None, state: StateBytes | None = None
) -> PlanReport:
    """Figures of ``plan``.

    ``state``: of the optimizers.  ``rails``: how many rails the network has; rank r lies on rail r
    modulo this.  None takes the shards of the grid. Under FSDP over several nodes pass the GPUs
    per node, since the grid then has one replica of all ranks. Raises ValueError where the rails
    do not divide the ranks.
    """
    world = plan.topology.world
    rails = plan.topology.shards if rails is None else rails
    if rails < 1 or world % rails:
        raise ValueError(f"{world} ranks do not lie evenly on {rails} rails (--gpus-per-node)")
    times = np.zeros(world)
    counts, bytes_held, muon_bytes = (np.zeros(world, dtype=np.int64) for _ in range(3))
    for unit, owner, cost in zip(plan.units, plan.owners, plan.costs, strict=True):
        members = [plan.parameter(name) for name in unit.members]
        times[owner] += cost
        counts[owner] += len(members)
        bytes_held[owner] += unit.numel * plan.settings.bytes_per_element
        muon = sum(p.numel for p in members if p.route is Route.MATRIX)
        muon_bytes[owner] += muon * plan.settings.bytes_per_element
    per_rail = [values.reshape(-1, rails).sum(axis=0) for values in (counts, bytes_held, times)]
    orders = _publish_orders(plan, rails)
    optimizer = optimizer_bytes(plan, state).reshape(-1)
    routes = Counter(p.route for p in plan.parameters)
    return PlanReport(
        rails=tuple(
            Rail(
                parameters=int(count), mib=float(size) / MIB, ns_ms=float(time), publish_order=order
            )
            for count, size, time, order in zip(*per_rail, orders, strict=True)
        ),
        heaviest_rail_over_mean=_over_mean(per_rail[1]),
        heaviest_rail_over_mean_ns=_over_mean(per_rail[2]),
        busiest_over_mean_ns=_over_mean(times),
        busiest_over_mean_bytes=_over_mean(bytes_held),
        busiest_over_mean_muon_bytes_nonempty_owners=_over_mean(muon_bytes[muon_bytes > 0]),
        owner_window_mib=float(bytes_held.max()) / MIB,
        optimizer_state_gib_busiest=float(optimizer.max()) / GIB,
        routes={route.value: routes[route] for route in Route},
        units=len(plan.units),
        idle_ranks=int((counts == 0).sum()),
        rank_ns_ms=tuple(times.tolist()),
        rank_bytes=tuple(bytes_held.tolist()),
        rank_parameters=tuple(counts.tolist()),
        rank_optimizer_bytes=tuple(optimizer.tolist()),
    )
