"""The second pass of the default planner: it evens out the bytes of expert matrices over ranks.

Owns ``rebalance_experts``. The greedy rule looks at time first, so with many small expert matrices
the rank with the most bytes may hold one expert more than it must. This pass hands experts from the
ranks with the most bytes to others of the same rail. Invariant: the longest time of a rank does
not grow, no rail's time changes, a layer's units stay on different ranks, and unless the heaviest
rank gets lighter nothing moves at all. Tested by ``tests/ownership/test_rebalance.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megamuon.ownership.settings import PlannerSettings, Topology
from megamuon.ownership.units import Unit

_ROUNDING = 1e-12  # times are sums of floats in another order


class _Loads:
    """Time and elements of each rank while units move."""

    def __init__(
        self,
        units: Sequence[Unit],
        costs: Sequence[float],
        owners: Sequence[int],
        topology: Topology,
        settings: PlannerSettings,
    ) -> None:
        self.units, self.costs, self.owners = units, costs, list(owners)
        self.times = np.zeros(topology.world)
        self.held = np.zeros(topology.world, dtype=np.int64)
        self.layers: dict[str, np.ndarray] = {}  # units of the layer on each rank
        self.spread = settings.spread_layers
        flat = topology.replicas == 1 or not settings.balance_rails
        self.rail = np.arange(topology.world) % (1 if flat else topology.shards)
        for index, owner in enumerate(owners):
            self._add(index, owner, 1)
        self.longest = float(self.times.max(initial=0.0)) * (1 + _ROUNDING)

    def _add(self, index: int, rank: int, sign: int) -> None:
        unit = self.units[index]
        if unit.layer not in self.layers:
            self.layers[unit.layer] = np.zeros(len(self.times), dtype=np.int32)
        self.layers[unit.layer][rank] += sign
        self.times[rank] += sign * self.costs[index]
        self.held[rank] += sign * unit.numel

    def receiver(self, index: int) -> int | None:
        """The rank with the fewest elements that may take the unit and stay below its owner."""
        owner, unit = self.owners[index], self.units[index]
        fits = self.held < self.held[owner] - unit.numel
        fits &= self.times <= self.longest - self.costs[index]
        fits &= self.rail == self.rail[owner]
        if self.spread:
            fits &= self.layers[unit.layer] == 0
        best = int(np.where(fits, self.held, np.iinfo(np.int64).max).argmin())
        return best if fits[best] else None

    def move(self, index: int, rank: int) -> None:
        """Give the unit to ``rank``."""
        self._add(index, self.owners[index], -1)
        self._add(index, rank, 1)
        self.owners[index] = rank


def rebalance_experts(
    units: Sequence[Unit],
    costs: Sequence[float],
    owners: Sequence[int],
    experts: frozenset[str],
    topology: Topology,
    settings: PlannerSettings,
) -> tuple[int, ...]:
    """``owners`` with expert units moved so that the most elements on a rank fall.

    ``experts``: names of the expert matrices; a unit of one of them may move.
    """
    movable: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        if len(unit.members) == 1 and unit.name in experts:
            movable.setdefault(owners[index], []).append(index)
    if not movable:
        return tuple(owners)
    loads = _Loads(units, costs, owners, topology, settings)
    settled, heaviest = tuple(owners), int(loads.held.max())
    for _ in range(len(units)):  # each move lowers a heaviest rank; the bound keeps it linear
        giver = int(loads.held.argmax())
        if loads.held[giver] < heaviest:
            settled, heaviest = tuple(loads.owners), int(loads.held[giver])
        for index in sorted(movable.get(giver, ()), key=lambda i: units[i].name):
            rank = loads.receiver(index)
            if rank is not None:
                break
        else:
            return settled
        loads.move(index, rank)
        movable[giver].remove(index)
        movable.setdefault(rank, []).append(index)
    return settled
