"""The settings and shapes of the operators of a grid, whichever library moves their bytes.

Owns ``ReadySettings``, ``OperatorGrid``, ``Nodes`` and ``OperatorConfig``: frozen values, equal on
all ranks. A grid is R replicas (nodes) x K shards. Tested by
``tests/distributed/test_ready.py`` and ``tests/collectives/test_host_library.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megamuon.mesh import Mesh
from megamuon.placements import Axis

OPERATOR_KINDS = ("all_gather", "reduce_scatter", "publish")

# Per node; messages up to that size take one hop (DMuon-2, appendix C.2). On a GPU they go through
# one block, so the limit is low until it is measured there.
STAR_BYTES = 128 << 10
CONTROL_ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class ReadySettings:
    """How the operators cut and pace what they move; equal on all ranks."""

    slots: int = 8  # of a queue's ring
    chunk_bytes: int = 64 * 1024
    tile_bytes: int = 512 * 1024  # of a publish
    deadline: float = 600.0  # seconds that an operator may stand still
    star_bytes: int = STAR_BYTES


@dataclass(frozen=True, kw_only=True)
class OperatorGrid:
    """Where operators work, for a transport that makes some: the grid, its memory, what is asked of
    them.
    """

    mesh: Mesh
    device: torch.device
    fabric: str  # what ``--fabric`` names
    settings: ReadySettings
    # A fresh communicator of the mesh's places; a collective.
    new_group: Callable[[], dist.ProcessGroup | None]
    # Parameters and publish tiles of the rail that has most; (0, 0): nothing is published.
    rails: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How the replicas of a grid lie on nodes: ``size`` ranks of a replica, side by side, on each.

    A replica is one node unless it is longer than a node has ranks, as under FSDP on several.
    Raises ValueError where the size does not divide the shards.
    """

    shards: int  # of the grid
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.shards % self.size:
            raise ValueError(
                f"a replica of {self.shards} ranks is not made of nodes of {self.size}"
            )

    @property
    def per_replica(self) -> int:
        """Nodes of a replica."""
        return self.shards // self.size

    def place(self, replica: int, shard: int) -> tuple[int, int]:
        """Node, counted replica by replica, and place on it."""
        return replica * self.per_replica + shard // self.size, shard % self.size


@dataclass(frozen=True, kw_only=True)
class OperatorConfig:
    """What all ranks of an operator say alike: mm_operator_config of host_api.h.

    ``ranks[node * columns + column]`` is a rank of the engine; ``parameters`` and the tiles are for
    the publish alone.
    """

    kind: str  # one of OPERATOR_KINDS
    nodes: int
    columns: int
    ranks: tuple[int, ...]
    control_offset: int
    slots: int = 8
    chunk_bytes: int = 64 * 1024
    groups: int = 1
    star_bytes: int = 0  # tables of at most so many bytes per node and rail take one hop
    parameters: int = 0
    tiles: int = 0
    tile_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in OPERATOR_KINDS:
            raise ValueError(f"operator kind {self.kind!r}: choose {', '.join(OPERATOR_KINDS)}")
        if len(self.ranks) != self.nodes * self.columns:
            raise ValueError(
                f"operator over {self.nodes} x {self.columns} ranks has {len(self.ranks)} of them"
            )


def operator_configs(
    mesh: Mesh,
    nodes: Nodes,
    settings: ReadySettings,
    rails: tuple[int, int],
    *,
    groups: int = 1,
) -> dict[str, OperatorConfig]:
    """The operators of a grid; ``ranks`` are places of the whole grid, replica by replica.

    ``rails``: parameters and tiles of the rail that has most, for the publish; (0, 0) where
    there is none. ``groups``: thread groups that share an operator's queues. Control memory is
    still to be placed.
    """
    places = mesh.of_places
    gather = OperatorConfig(
        kind="all_gather",
        nodes=nodes.per_replica,
        columns=nodes.size,
        ranks=places.group_of(Axis.SHARD, mesh.place),
        control_offset=0,
        slots=settings.slots,
        chunk_bytes=settings.chunk_bytes,
        groups=groups,
        star_bytes=settings.star_bytes // nodes.size,
    )
    configs = {
        "gather": gather,
        "reduce": replace(
            gather,
            kind="reduce_scatter",
            nodes=mesh.replicas * nodes.per_replica,
            ranks=places.group_of("world", mesh.place),
        ),
    }
    if mesh.replicas > 1:
        configs["share"] = rail = replace(
            gather,
            nodes=mesh.replicas,
            columns=1,
            ranks=places.group_of(Axis.REPLICATE, mesh.place),
            star_bytes=settings.star_bytes,
        )
        if rails[0]:
            configs["publish"] = replace(
                rail,
                kind="publish",
                parameters=rails[0],
                tiles=rails[1],
                tile_bytes=settings.tile_bytes,
            )
    return configs


def aligned(nbytes: int) -> int:
    """``nbytes`` up to the next place where control memory may begin."""
    return -(-nbytes // CONTROL_ALIGNMENT) * CONTROL_ALIGNMENT
