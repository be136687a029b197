"""Grids of ranks for tests."""

from __future__ import annotations

import torch

from megamuon.mesh import Mesh


def mesh_of(rank: int, world: int, *, replicas: int = 1, tp: int = 1) -> Mesh:
    """The place of ``rank`` on a CPU grid of ``replicas`` replicas with ``tp`` tensor-parallel
    ranks.
    """
    return Mesh(
        world_size=world,
        rank=rank,
        local_rank=rank,
        replicas=replicas,
        shards=world // (replicas * tp),
        tp=tp,
        device=torch.device("cpu"),
        backend="gloo",
    )
