"""How bytes move: AllGatherV and ReduceScatterV over segment tables, one file per transport;
the two-stage reduction of a grid.

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
from megamuon.collectives.p2p import PeerToPeerTransport
from megamuon.collectives.padded import PaddedTransport
from megamuon.collectives.per_owner import PerOwnerTransport
from megamuon.collectives.staged_work import StagedWork
from megamuon.collectives.traffic import Traffic
from megamuon.collectives.two_stage import (
    RowSegment,
    TwoStageReducer,
    TwoStageTable,
)

TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport
    for transport in (GroupedTransport, PerOwnerTransport, PeerToPeerTransport, PaddedTransport)
}


def build_transport(
    name: str,
    *,
    gather_group: dist.ProcessGroup | None,
    reduce_group: dist.ProcessGroup | None,
    wire_dtype: torch.dtype,
    traffic: Traffic | None = None,
    axis: str = "shard",
) -> Transport:
    """The transport that ``--collectives`` names; it counts what it sends along ``axis`` in
    ``traffic``. Raises ValueError for a name that does not exist.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"--collectives {name}: choose one of {', '.join(sorted(TRANSPORTS))}")
    return TRANSPORTS[name](
        gather_group=gather_group,
        reduce_group=reduce_group,
        wire_dtype=wire_dtype,
        traffic=traffic,
        axis=axis,
    )


__all__ = [
    "TRANSPORTS",
    "CollectiveError",
    "GatherTable",
    "ReduceTable",
    "RowSegment",
    "SegmentTable",
    "StagedWork",
    "TableSegment",
    "Traffic",
    "Transport",
    "TwoStageReducer",
    "TwoStageTable",
    "Work",
    "build_transport",
]
