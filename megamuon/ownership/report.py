"""Is a plan balanced?  Summary figures of an ownership plan.

Owns the arithmetic behind ``tools/plan_owners.py``: time, bytes and optimizer state per rank, per
rail and for the busiest rank, with the definitions of DMuon-2's tables 3 and 7 and appendices B
and C.5.  Invariant: a pure function of the plan; sums over rails equal sums over units.  Tested by
``tests/ownership/test_goldens.py`` and ``tests/ownership/test_report.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megamuon.matrices import Layout, LogicalParameter, Route
from megamuon.ownership.plan import OwnershipPlan

MIB = float(1 << 20)
GIB = float(1 << 30)
MOMENTUM_BYTES = 4  # one FP32 value per element of a Muon matrix
MOMENTS_BYTES = 8  # two FP32 values per element under AdamW


@dataclass(frozen=True, kw_only=True)
class Rail:
    """What the owners of one column hold together."""

    parameters: int
    mib: float
    ns_ms: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Figures of one plan.  Ratios are over the mean of all ranks; nothing over nothing is 0."""

    rails: tuple[Rail, ...]  # in column order
    heaviest_rail_over_mean: float  # bytes
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


def _state_bytes(parameter: LogicalParameter, elements: int) -> int:
    """Bytes of optimizer state of some elements of a parameter."""
    if parameter.route is Route.FROZEN:
        return 0
    return elements * (MOMENTUM_BYTES if parameter.route is Route.MUON else MOMENTS_BYTES)


def _optimizer_bytes(plan: OwnershipPlan) -> np.ndarray:
    """Bytes of optimizer state per rank; every row holds the even slices of its columns."""
    grid = plan.topology
    held = np.zeros(grid.world, dtype=np.int64)
    by_row = held.reshape(grid.rows, grid.columns)
    for parameter in plan.parameters:
        for rank, start, stop in plan.segments(parameter.name):
            size = _state_bytes(parameter, stop - start)
            if parameter.layout is Layout.OWNER:
                held[rank] += size
            else:
                by_row[:, rank] += size
    return held


def summarize(plan: OwnershipPlan, *, rails: int | None = None) -> PlanReport:
    """Figures of ``plan``.

    ``rails``: how many rails the network has; rank r lies on rail r modulo this.  None takes the
    columns of the grid. Under FSDP over several nodes pass the GPUs per node, since the grid then
    has one row of all ranks. Raises ValueError where the rails do not divide the ranks.
    """
    world = plan.topology.world
    rails = plan.topology.columns if rails is None else rails
    if rails < 1 or world % rails:
        raise ValueError(f"{world} ranks do not lie evenly on {rails} rails (--gpus-per-node)")
    times = np.zeros(world)
    counts, bytes_held, muon_bytes = (np.zeros(world, dtype=np.int64) for _ in range(3))
    for unit, owner, cost in zip(plan.units, plan.owners, plan.costs, strict=True):
        members = [plan.parameter(name) for name in unit.members]
        times[owner] += cost
        counts[owner] += len(members)
        bytes_held[owner] += unit.numel * plan.settings.bytes_per_element
        muon = sum(p.numel for p in members if p.route is Route.MUON)
        muon_bytes[owner] += muon * plan.settings.bytes_per_element
    per_rail = [values.reshape(-1, rails).sum(axis=0) for values in (counts, bytes_held, times)]
    optimizer = _optimizer_bytes(plan)
    routes = Counter(p.route for p in plan.parameters)
    return PlanReport(
        rails=tuple(
            Rail(parameters=int(count), mib=float(size) / MIB, ns_ms=float(time))
            for count, size, time in zip(*per_rail, strict=True)
        ),
        heaviest_rail_over_mean=_over_mean(per_rail[1]),
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
