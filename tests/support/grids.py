"""Grids of ranks for tests."""

from __future__ import annotations

import torch

from megamuon.mesh import Mesh


def mesh_of(rank: int, world: int, *, rows: int = 1, tp: int = 1) -> Mesh:
    """The place of ``rank`` on a CPU grid of ``rows`` rows with ``tp`` tensor-parallel ranks."""
    return Mesh(
        world_size=world,
        rank=rank,
        local_rank=rank,
        rows=rows,
        columns=world // (rows * tp),
        tp=tp,
        device=torch.device("cpu"),
        backend="gloo",
    )
