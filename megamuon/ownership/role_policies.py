"""Planner policies of MatrixFSDP, which assign role by role.

Owns ``role_greedy``, ``scope_greedy`` and ``cost_aware`` (MatrixFSDP, section 4.1, algorithm 1)
over roles: one unit per 2-D matrix and one packed tail per block (``build_units(rule="roles")``).
The load of a rank is the number of elements that it owns; the grid is one flat list of ranks.
Invariant: pure and deterministic; ties go to the name, then to the lower rank. Tested by
``tests/ownership/test_role_policies.py``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megamuon.ownership.settings import PlannerSettings, Topology
from megamuon.ownership.units import Unit

_MIB = 1 << 20


def _largest_to_lightest(
    units: Sequence[Unit], blocks: Sequence[str], world: int
) -> tuple[int, ...]:
    """Owners of ``units``: block by block, and inside a block the largest unit first, each to the
    rank that holds the fewest elements so far. ``blocks`` says the block of each unit.
    """
    members: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        members.setdefault(block, []).append(index)
    lightest = [(0, rank) for rank in range(world)]  # already a heap
    owners = [0] * len(units)
    for chosen in members.values():
        for index in sorted(chosen, key=lambda i: (-units[i].numel, units[i].name)):
            held, rank = lightest[0]
            owners[index] = rank
            heapq.heapreplace(lightest, (held + units[index].numel, rank))
    return tuple(owners)


def role_greedy(
    units: Sequence[Unit], costs: Sequence[float], topology: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """Per block in registration order, largest roles to the lightest ranks; loads carry forward."""
    return _largest_to_lightest(units, [unit.layer for unit in units], topology.world)


def scope_greedy(
    units: Sequence[Unit], costs: Sequence[float], topology: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """The roles of all blocks pooled, largest roles to the lightest ranks."""
    return _largest_to_lightest(units, [""] * len(units), topology.world)


def cost_aware(
    units: Sequence[Unit], costs: Sequence[float], topology: Topology, settings: PlannerSettings
) -> tuple[int, ...]:
    """``scope_greedy`` where it balances better within the workspace caps, else ``role_greedy``.

    Better: the heaviest load falls by at least ``balance_gain`` of itself. Within the caps: the
    workspace grows by at most ``workspace_growth`` and stays below ``workspace_cap_mib``
    (``PlannerSettings`` says what they mean).
    """
    role = role_greedy(units, costs, topology, settings)
    scope = scope_greedy(units, costs, topology, settings)
    loads = [max(_held(units, owners).values(), default=0) for owners in (role, scope)]
    spaces = [
        largest_window(units, owners) * settings.bytes_per_element for owners in (role, scope)
    ]
    better = loads[1] < loads[0] and loads[1] <= (1 - settings.balance_gain) * loads[0]
    cap = settings.workspace_cap_mib
    fits = spaces[1] <= (1 + settings.workspace_growth) * spaces[0] and (
        cap is None or spaces[1] <= cap * _MIB
    )
    return scope if better and fits else role


def _held(units: Sequence[Unit], owners: Sequence[int]) -> dict[int, int]:
    held: dict[int, int] = {}
    for unit, owner in zip(units, owners, strict=True):
        held[owner] = held.get(owner, 0) + unit.numel
    return held


def largest_window(units: Sequence[Unit], owners: Sequence[int]) -> int:
    """Most elements of one block on one owner."""
    windows: dict[tuple[str, int], int] = {}
    for unit, owner in zip(units, owners, strict=True):
        key = (unit.layer, owner)
        windows[key] = windows.get(key, 0) + unit.numel
    return max(windows.values(), default=0)
