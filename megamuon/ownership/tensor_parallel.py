"""Owners on the tp axis: which tp rank works on the whole of a matrix that is cut.

Owns the choice of tp owners: inside the bucket of one data-parallel owner, the longest matrix first
onto the tp rank with the least Newton-Schulz time. Matrices without a
data-parallel owner form one bucket of the whole model. Invariant: what asks for one tp rank to
update it, by ``Owned()`` on the tp axis, gets exactly one, and nothing else has one. Tested by
``tests/ownership/test_tensor_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megamuon.matrices import LogicalParameter
from megamuon.placements import Axis, Owned


def choose_tp_owners(
    parameters: Sequence[LogicalParameter],
    owners: Mapping[str, int],
    times: Mapping[tuple[int, int], float],
    tp: int,
) -> tuple[tuple[str, int], ...]:
    """(name, tp rank) of every matrix that one tp rank is to put together, sorted by name.

    ``owners``: data-parallel owner by name, of what has one; ``times``: milliseconds
    of one Newton-Schulz run by whole shape. The order is that of the data-parallel planner: more
    time, then more elements, then the name. A tie between tp ranks goes to the one with fewer
    elements, then to the lower one.
    """
    buckets: dict[int | None, list[LogicalParameter]] = {}
    for parameter in parameters:
        if isinstance(parameter.update.on(Axis.TP), Owned):
            buckets.setdefault(owners.get(parameter.name), []).append(parameter)
    chosen: list[tuple[str, int]] = []
    for members in buckets.values():
        load = [(0.0, 0, rank) for rank in range(tp)]
        keyed = [(-times[p.shape[0], p.shape[1]], -p.numel, p.name) for p in members]
        for minus_time, minus_numel, name in sorted(keyed):
            time, held, rank = min(load)
            load[rank] = (time - minus_time, held - minus_numel, rank)
            chosen.append((name, rank))
    return tuple(sorted(chosen))
