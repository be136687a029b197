"""The settings and shapes of the operators of a grid, whichever library moves their bytes.

Owns ``ReadySettings``, ``OperatorGrid``, ``Nodes`` and ``OperatorConfig``: frozen values, equal on
all ranks. A grid is R rows (nodes) x K columns of data-parallel ranks. Tested by
``tests/distributed/test_ready.py`` and ``tests/collectives/test_host_library.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megamuon.mesh import Mesh

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
    # A fresh communicator of the data-parallel ranks; a collective.
    new_group: Callable[[], dist.ProcessGroup | None]
    # Parameters and publish tiles of the column that has most; (0, 0): nothing is published.
    rails: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How the rows of a grid lie on nodes: ``size`` ranks of a row, side by side, on each.

    A row is one node unless it is longer than a node has ranks, as under FSDP on several. Raises
    ValueError where the size does not divide the columns.
    """

    columns: int  # of the grid
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.columns % self.size:
            raise ValueError(f"a row of {self.columns} ranks is not made of nodes of {self.size}")

    @property
    def per_row(self) -> int:
        """Nodes of a row."""
        return self.columns // self.size

    def place(self, row: int, column: int) -> tuple[int, int]:
        """Node, counted row by row, and place on it."""
        return row * self.per_row + column // self.size, column % self.size


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
    """The operators of a grid; ``ranks`` are places of the whole grid, row by row.

    ``rails``: parameters and tiles of the column that has most, for the publish; (0, 0) where
    there is none. ``groups``: thread groups that share an operator's queues. Control memory is
    still to be placed.
    """
    row_ranks = tuple(mesh.row * mesh.columns + k for k in range(mesh.columns))
    column_ranks = tuple(r * mesh.columns + mesh.column for r in range(mesh.rows))
    gather = OperatorConfig(
        kind="all_gather",
        nodes=nodes.per_row,
        columns=nodes.size,
        ranks=row_ranks,
        control_offset=0,
        slots=settings.slots,
        chunk_bytes=settings.chunk_bytes,
        groups=groups,
        star_bytes=settings.star_bytes // nodes.size,
    )
    everybody = tuple(range(mesh.rows * mesh.columns))
    configs = {
        "gather": gather,
        "reduce": replace(
            gather, kind="reduce_scatter", nodes=mesh.rows * nodes.per_row, ranks=everybody
        ),
    }
    if mesh.rows > 1:
        configs["share"] = column = replace(
            gather, nodes=mesh.rows, columns=1, ranks=column_ranks, star_bytes=settings.star_bytes
        )
        if rails[0]:
            configs["publish"] = replace(
                column,
                kind="publish",
                parameters=rails[0],
                tiles=rails[1],
                tile_bytes=settings.tile_bytes,
            )
    return configs


def aligned(nbytes: int) -> int:
    """``nbytes`` up to the next place where control memory may begin."""
    return -(-nbytes // CONTROL_ALIGNMENT) * CONTROL_ALIGNMENT
