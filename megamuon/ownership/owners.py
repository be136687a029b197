"""The planner's choices, written into placements and taken out of them again.

Owns the step from ``Owned()``, which asks the planner for an owner, to ``Owned(index)`` and back.
Invariant: ``without_owners`` undoes ``with_owners``, and neither changes anything else. Tested by
``tests/ownership/test_planner.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from megamuon.matrices import LogicalParameter
from megamuon.ownership.holdings import PlanError
from megamuon.ownership.settings import Topology
from megamuon.placements import DATA_AXES, Axis, Owned, Placement


@lru_cache(maxsize=100_000)  # parameters by the thousand lie alike
def _set(placement: Placement, *indices: tuple[Axis, int | None]) -> Placement:
    """The same with these owners; an axis on which nobody owns stays as it is."""
    chosen = dict(indices)
    return Placement.of(
        {
            axis: Owned(chosen[axis]) if isinstance(on, Owned) and axis in chosen else on
            for axis, on in placement.axes
        }
    )


def _chosen(parameter: LogicalParameter, *indices: tuple[Axis, int | None]) -> LogicalParameter:
    storage, update = _set(parameter.storage, *indices), _set(parameter.update, *indices)
    return replace(parameter, storage=storage, update=update)


def with_owners(
    parameters: Iterable[LogicalParameter],
    topology: Topology,
    owners: Mapping[str, int],
    tp_owners: Mapping[str, int],
) -> tuple[LogicalParameter, ...]:
    """The parameters with their owners chosen, by name: ``owners`` are data-parallel ranks,
    ``tp_owners`` tp ranks that work on the whole of what tensor parallelism cuts.

    Raises PlanError: a rank that is not there, a tp owner of a parameter that has no use for one.
    """
    chosen: list[LogicalParameter] = []
    unused = dict(tp_owners)
    for parameter in parameters:
        name, indices = parameter.name, dict[Axis, int | None]()
        if name in owners:
            if not 0 <= owners[name] < topology.world:
                raise PlanError(
                    f"owner of {name} is rank {owners[name]}, of {topology.world} ranks"
                )
            places = divmod(owners[name], topology.sizes[Axis.SHARD])
            indices.update(zip(DATA_AXES, places, strict=True))
        if name in unused and isinstance(parameter.update.on(Axis.TP), Owned):
            rank = indices[Axis.TP] = unused.pop(name)
            if not 0 <= rank < topology.tp:
                raise PlanError(f"tp owner of {name} is tp rank {rank}, of {topology.tp} tp ranks")
        chosen.append(_chosen(parameter, *indices.items()))
    for name, rank in unused.items():
        raise PlanError(
            f"{name} has tp owner {rank} but is no matrix that is put together on one of"
            f" {topology.tp} tp ranks"
        )
    return tuple(chosen)


def without_owners(parameters: Iterable[LogicalParameter]) -> tuple[LogicalParameter, ...]:
    """The parameters as they were before a planner chose."""
    nobody = dict.fromkeys(Axis)
    return tuple(_chosen(p, *nobody.items()) for p in parameters)


def tp_owners(parameters: Iterable[LogicalParameter]) -> dict[str, int]:
    """The tp rank that works on the whole, by name, of what tensor parallelism cuts."""
    found = {p.name: p.update.on(Axis.TP) for p in parameters}
    return {
        name: on_tp.index
        for name, on_tp in sorted(found.items())
        if isinstance(on_tp, Owned) and on_tp.index is not None
    }
