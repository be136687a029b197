"""How bytes move: AllGatherV and ReduceScatterV over segment tables, one file per transport;
the two-stage reduction of a grid.

Owns the choice of a transport by name, and the registry of names.  Tested by
``tests/distributed/test_transports.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from megamuon.collectives.base import (
    CollectiveError,
    GatherTable,
    ReduceTable,
    SegmentTable,
    TableSegment,
    Transport,
    TransportSettings,
    Work,
)
from megamuon.collectives.fabric_choice import build_ready
from megamuon.collectives.grouped import GroupedTransport
from megamuon.collectives.p2p import PeerToPeerTransport
from megamuon.collectives.padded import PaddedTransport
from megamuon.collectives.per_owner import PerOwnerTransport
from megamuon.collectives.staged_work import StagedWork
from megamuon.collectives.traffic import Traffic
from megamuon.collectives.two_stage import (
    ReplicaSegment,
    TwoStageReducer,
    TwoStageTable,
)

TRANSPORTS: dict[str, Callable[[TransportSettings], Transport]] = {
    "grouped": GroupedTransport,
    "per_owner": PerOwnerTransport,
    "p2p": PeerToPeerTransport,
    "padded": PaddedTransport,
    "ready": build_ready,
}


def register_transport(name: str, build: Callable[[TransportSettings], Transport]) -> None:
    """Add a transport, on all ranks alike, before flags are parsed: ``--collectives`` knows the
    name.  Raises ValueError for a name that is taken.
    """
    if name in TRANSPORTS or name == "fsdp2":  # line A's, which is no transport of ours
        raise ValueError(f"transport {name!r}: there is one of this name")
    TRANSPORTS[name] = build


def build_transport(name: str, settings: TransportSettings) -> Transport:
    """The transport that ``--collectives`` names. Raises ValueError for a name that does not
    exist.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"--collectives {name}: choose one of {', '.join(sorted(TRANSPORTS))}")
    return TRANSPORTS[name](settings)


__all__ = [
    "TRANSPORTS",
    "CollectiveError",
    "GatherTable",
    "ReduceTable",
    "ReplicaSegment",
    "SegmentTable",
    "StagedWork",
    "TableSegment",
    "Traffic",
    "Transport",
    "TransportSettings",
    "TwoStageReducer",
    "TwoStageTable",
    "Work",
    "build_transport",
    "register_transport",
]
