"""How bytes move: AllGatherV and ReduceScatterV over segment tables, one file per transport.

Owns the choice of a transport by name.  Tested by ``tests/distributed/test_transports.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megamuon.collectives.base import (
    CollectiveError,
    GatherTable,
    ReduceTable,
    SegmentTable,
    TableSegment,
    Transport,
    Work,
)
from megamuon.collectives.grouped import GroupedTransport
from megamuon.collectives.per_owner import PerOwnerTransport

TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (GroupedTransport, PerOwnerTransport)
}


def build_transport(
    name: str,
    *,
    gather_group: dist.ProcessGroup | None,
    reduce_group: dist.ProcessGroup | None,
    wire_dtype: torch.dtype,
) -> Transport:
    """The transport that ``--collectives`` names. Raises ValueError for a name that does not
    exist.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"--collectives {name}: choose one of {', '.join(sorted(TRANSPORTS))}")
    return TRANSPORTS[name](
        gather_group=gather_group, reduce_group=reduce_group, wire_dtype=wire_dtype
    )


__all__ = [
    "TRANSPORTS",
    "CollectiveError",
    "GatherTable",
    "ReduceTable",
    "SegmentTable",
    "TableSegment",
    "Transport",
    "Work",
    "build_transport",
]
