"""Which tensor-parallel rank works on the whole of a cut matrix?  The second owner.

Owns the choice of tp owners: inside the bucket of one data-parallel owner, the longest matrix first
onto the tp rank with the least Newton-Schulz time. Matrices in even layout belong to every
data-parallel rank alike and form one bucket of the whole model. Invariant: every Muon matrix that
tensor parallelism cuts has exactly one tp owner, and nothing else has one. Tested by
``tests/ownership/test_tensor_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megamuon.matrices import Layout, LogicalParameter, Route

EVEN_BUCKET = -1  # in the place of a data-parallel owner


def needs_tp_owner(parameter: LogicalParameter) -> bool:
    """Whether its update needs the whole matrix while tensor parallelism cuts it."""
    return parameter.route is Route.MATRIX and parameter.cut is not None


def choose_tp_owners(
    parameters: Sequence[LogicalParameter],
    owners: Mapping[str, int],
    times: Mapping[tuple[int, int], float],
    tp: int,
) -> tuple[tuple[str, int], ...]:
    """(name, tp rank) of every cut Muon matrix, sorted by name.

    ``owners``: data-parallel owner by name, of parameters in owner layout; ``times``: milliseconds
    of one Newton-Schulz run by whole shape. The order is that of the data-parallel planner: more
    time, then more elements, then the name. A tie between tp ranks goes to the one with fewer
    elements, then to the lower one.
    """
    buckets: dict[int, list[LogicalParameter]] = {}
    for parameter in parameters:
        if needs_tp_owner(parameter):
            even = parameter.layout is Layout.EVEN
            bucket = EVEN_BUCKET if even else owners[parameter.name]
            buckets.setdefault(bucket, []).append(parameter)
    chosen: list[tuple[str, int]] = []
    for members in buckets.values():
        load = [(0.0, 0, rank) for rank in range(tp)]
        keyed = [(-times[p.shape[0], p.shape[1]], -p.numel, p.name) for p in members]
        for minus_time, minus_numel, name in sorted(keyed):
            time, held, rank = min(load)
            load[rank] = (time - minus_time, held - minus_numel, rank)
            chosen.append((name, rank))
    return tuple(sorted(chosen))
