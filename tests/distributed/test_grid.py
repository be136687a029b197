"""Process groups along the axes of a grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamuon.mesh import GROUPS, Mesh, MeshError, new_group
from tests.support.ranks import run_ranks

GRIDS = {"flat": (1, 4, 1), "replicated": (2, 2, 1), "cut": (1, 2, 2), "tall": (2, 1, 2)}


def mesh_of(rank: int, grid: tuple[int, int, int], world: int = 4) -> Mesh:
    replicas, shards, tp = grid
    return Mesh(
        world_size=world,
        rank=rank,
        local_rank=rank,
        replicas=replicas,
        shards=shards,
        tp=tp,
        device=torch.device("cpu"),
        backend="gloo",
    )


def members(group: dist.ProcessGroup | None) -> tuple[int, ...] | None:
    """Who is in the group, by a gather over it."""
    if group is None:
        return None
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, torch.tensor([dist.get_rank()]), group=group)
    return tuple(int(rank) for rank in found)


def groups(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {axis: members(new_group(mesh_of(rank, grid), axis)) for axis in GROUPS}
        for name, grid in GRIDS.items()
    }
    # A grid over half of the ranks: everybody makes the same calls.
    places = (1, 3)
    inside = rank in places
    mesh = mesh_of(places.index(rank), (1, 2, 1), world=2) if inside else None
    group = new_group(mesh or mesh_of(0, (1, 2, 1), world=2), "shard", ranks=places)
    found["part"] = members(group) if inside else None
    fresh = [new_group(mesh_of(rank, GRIDS["flat"]), "world") for _ in range(2)]
    found["fresh"] = fresh[0] is not fresh[1]
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(groups, 4)


@pytest.mark.parametrize("name", GRIDS)
def test_a_rank_gets_the_group_of_its_place(results: list[dict[str, Any]], name: str) -> None:
    for rank, found in enumerate(results):
        mesh = mesh_of(rank, GRIDS[name])
        for axis in GROUPS:
            (expected,) = [ranks for ranks in mesh.groups_along(axis) if rank in ranks]
            assert found[name][axis] == (None if len(expected) == 1 else expected)


def test_a_grid_over_some_of_the_ranks(results: list[dict[str, Any]]) -> None:
    assert [found["part"] for found in results] == [None, (1, 3), None, (1, 3)]


def test_ranks_that_torch_would_number_anew_are_refused() -> None:
    with pytest.raises(MeshError, match=r"ranks \[3, 1\] of a grid must ascend"):
        new_group(mesh_of(0, (1, 2, 1), world=2), "shard", ranks=(3, 1))


def test_every_call_makes_a_group_of_its_own(results: list[dict[str, Any]]) -> None:
    assert all(found["fresh"] for found in results)
