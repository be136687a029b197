"""The mesh from a launcher's variables, its axes, and real process groups of one and two ranks."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megamuon.mesh import (
    GROUPS,
    Mesh,
    MeshError,
    MeshShape,
    destroy,
    initialise,
    launched_as,
    launched_local_rank,
    local_world_size,
    mesh_from_environment,
)


def variables(rank: int, world_size: int, local_rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}


def test_without_a_launcher_the_world_is_one_cpu_rank() -> None:
    mesh = mesh_from_environment(environment={}, gpus=0)
    assert mesh == Mesh(
        world_size=1,
        rank=0,
        local_rank=0,
        replicas=1,
        shards=1,
        device=torch.device("cpu"),
        backend="gloo",
    )
    assert mesh.is_last


def test_replicas_and_shards_of_a_mesh() -> None:
    mesh = mesh_from_environment(replicas=2, environment=variables(6, 8, 2), gpus=0)
    assert (mesh.shards, mesh.replica, mesh.shard, mesh.tp_rank) == (4, 1, 2, 0)
    assert (mesh.place, mesh.places) == (6, 8)
    assert mesh.groups_along("shard") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups_along("replicate") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups_along("places") == mesh.groups_along("world") == (tuple(range(8)),)
    assert mesh.groups_along("tp") == tuple((rank,) for rank in range(8))
    assert not mesh.is_last


def test_tensor_parallel_ranks_are_neighbours() -> None:
    mesh = mesh_from_environment(replicas=2, tp=2, environment=variables(7, 12, 7), gpus=0)
    assert (mesh.shards, mesh.replica, mesh.shard, mesh.tp_rank) == (3, 1, 0, 1)
    assert (mesh.place, mesh.places) == (3, 6)
    assert mesh.groups_along("tp") == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert mesh.groups_along("shard") == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert mesh.groups_along("replicate") == ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))
    assert mesh.groups_along("places") == ((0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11))
    assert mesh.groups_along("world") == (tuple(range(12)),)
    with pytest.raises(MeshError, match="axis 'column': choose one of"):
        mesh.groups_along("column")


def test_a_place_in_every_group_is_the_place_on_its_axis() -> None:
    for rank in range(12):
        mesh = mesh_from_environment(replicas=2, tp=2, environment=variables(rank, 12, 0), gpus=0)
        places = {"shard": mesh.shard, "replicate": mesh.replica, "tp": mesh.tp_rank, "world": rank}
        places["places"] = mesh.place
        for axis, place in places.items():
            (group,) = [ranks for ranks in mesh.groups_along(axis) if rank in ranks]
            assert group.index(rank) == place


@pytest.mark.parametrize(
    ("replicas", "shards", "ep", "cp", "tp"),
    [(1, 4, 2, 2, 1), (2, 8, 4, 2, 2), (2, 12, 3, 4, 1), (1, 6, 6, 3, 2), (3, 2, 1, 2, 3)],
)
def test_context_and_expert_ranks_are_neighbours_in_the_shard_axis(
    replicas: int, shards: int, ep: int, cp: int, tp: int
) -> None:
    """shard = d * C + c with c fastest, and shard = x * E + e with e fastest; rank = (replica * K +
    shard) * T + t.
    """
    shape = MeshShape(replicas=replicas, shards=shards, ep=ep, cp=cp, tp=tp)
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank in range(shape.size):
        place, t = divmod(rank, tp)
        replica, shard = divmod(place, shards)
        (d, c), (x, e) = divmod(shard, cp), divmod(shard, ep)
        fixed = {
            ("replicate", (shard, t)): replica,
            ("shard", (replica, t)): shard,
            ("cp", (replica, d, t)): c,
            ("ep", (replica, x, t)): e,
            ("expert_shard", (replica, e, t)): x,
            ("tp", (place,)): t,
            ("places", (t,)): place,
            ("samples", (c, t)): replica * (shards // cp) + d,
            ("world", ()): rank,
        }
        assert {name for name, _ in fixed} == GROUPS.keys()
        for key, index in fixed.items():
            assert shape.index_of(key[0], rank) == index
            assert len(found.setdefault(key, [])) == index  # groups are in the order of the axis
            found[key].append(rank)
    for name in GROUPS:
        wanted = [tuple(group) for (other, _), group in found.items() if other == name]
        assert sorted(shape.groups_along(name)) == sorted(wanted)
        for group in wanted:
            assert all(shape.group_of(name, rank) == group for rank in group)
    assert shape.places == replicas * shards
    assert shape.sample_ranks == len(shape.groups_along("samples")[0]) == replicas * shards // cp
    assert shape.of_places.groups_along("shard") == tuple(
        tuple(range(r * shards, (r + 1) * shards)) for r in range(replicas)
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"cp": 2}, "a mesh with cp = 2: context parallelism is not in this version"),
        ({"ep": 4}, "a mesh with ep = 4: expert parallelism is not in this version"),
        ({"cp": 3}, "a mesh with cp = 3: does not divide its 4 shards"),
        ({"ep": 0}, "a mesh with ep = 0: give 1 or more"),
    ],
)
def test_context_and_expert_axes_are_closed(sizes: dict[str, int], message: str) -> None:
    place = {"world_size": 4, "rank": 0, "local_rank": 0, "shards": 4, "backend": "gloo"}
    with pytest.raises(MeshError, match=message):
        Mesh(**place, **sizes, device=torch.device("cpu"))


def test_one_rank_speaks_for_the_samples_that_its_partners_see_too() -> None:
    meshes = [
        mesh_from_environment(replicas=2, tp=2, environment=variables(rank, 8, 0), gpus=0)
        for rank in range(8)
    ]
    assert [mesh.rank for mesh in meshes if mesh.speaks] == [0, 2, 4, 6]
    assert [mesh.sample_rank for mesh in meshes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {mesh.sample_ranks for mesh in meshes} == {4}


def test_a_grid_must_hold_its_ranks() -> None:
    with pytest.raises(MeshError, match="2 replicas x 3 shards x 2 .* does not hold 8 ranks"):
        Mesh(
            world_size=8,
            rank=0,
            local_rank=0,
            replicas=2,
            shards=3,
            tp=2,
            device=torch.device("cpu"),
            backend="gloo",
        )
    with pytest.raises(MeshError, match="8 ranks do not divide into 1 replicas of 3 tensor-par"):
        mesh_from_environment(tp=3, environment=variables(0, 8, 0), gpus=0)


def test_the_ranks_of_a_node() -> None:
    assert local_world_size({}) is None
    assert local_world_size({"LOCAL_WORLD_SIZE": "4"}) == 4
    for value, message in (("0", "LOCAL_WORLD_SIZE=0"), ("x", "LOCAL_WORLD_SIZE='x' is not an")):
        with pytest.raises(MeshError, match=message):
            local_world_size({"LOCAL_WORLD_SIZE": value})


def test_what_the_launcher_calls_a_rank() -> None:
    assert (launched_local_rank({}), launched_as({})) == (None, ("0", True))
    assert launched_local_rank(variables(5, 8, 1)) == 1
    assert launched_as(variables(5, 8, 1)) == ("5", False)
    assert launched_as({"RANK": "x", "LOCAL_RANK": "0"}) == ("x", True)  # to say what is wrong
    with pytest.raises(MeshError, match="LOCAL_RANK='x' is not an integer"):
        launched_local_rank({"LOCAL_RANK": "x"})


def test_gpus_are_used_where_there_are_any_and_cpu_on_request() -> None:
    mesh = mesh_from_environment(environment=variables(3, 4, 1), gpus=2)
    assert (mesh.device, mesh.backend) == (torch.device("cuda", 1), "cpu:gloo,cuda:nccl")
    mesh = mesh_from_environment(device="cpu", environment=variables(3, 4, 3), gpus=2)
    assert mesh.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("environment", "replicas", "device", "message"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, 1, None, "WORLD_SIZE not set although RANK and LOCAL"),
        ({**variables(0, 2, 0), "RANK": "x"}, 1, None, "RANK='x' is not an integer"),
        ({**variables(0, 2, 0), "LOCAL_RANK": "-1"}, 1, None, "LOCAL_RANK=-1 is negative"),
        (variables(2, 2, 0), 1, None, "rank 2 is outside a world of 2"),
        (variables(0, 4, 0), 3, None, "4 ranks do not divide into 3 replicas"),
        (variables(0, 4, 0), 0, None, "4 ranks do not divide into 0 replicas"),
        (variables(2, 4, 2), 1, None, "LOCAL_RANK=2, but this node has 2 usable GPUs"),
        ({}, 1, "tpu", "device 'tpu' is neither"),
    ],
)
def test_unusable_environments_are_named(
    environment: dict[str, str], replicas: int, device: str | None, message: str
) -> None:
    with pytest.raises(MeshError, match=message):
        mesh_from_environment(replicas=replicas, device=device, environment=environment, gpus=2)


def test_a_world_of_one_needs_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    mesh = mesh_from_environment(environment={}, gpus=0)
    initialise(mesh)
    try:
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [1.0, 1.0]
        with pytest.raises(MeshError, match="exists already"):
            initialise(mesh)
    finally:
        destroy()
    destroy()  # nothing to destroy: no error
    assert not dist.is_initialized()


def test_two_ranks_without_an_address_are_told_to_use_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    mesh = mesh_from_environment(environment=variables(0, 2, 0), gpus=0)
    with pytest.raises(MeshError, match="MASTER_ADDR not set: start 2 ranks with torchrun"):
        initialise(mesh)


def sum_of_ranks(rank: int, url: str, results: SimpleQueue[float]) -> None:
    initialise(mesh_from_environment(environment=variables(rank, 2, rank), gpus=0), init_method=url)
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    results.put(value.item())
    destroy()


def test_two_ranks_meet_through_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # quick: torch is imported already
    results: SimpleQueue[float] = context.SimpleQueue()
    url = f"file://{tmp_path}/rendezvous"
    ranks = [context.Process(target=sum_of_ranks, args=(rank, url, results)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert [results.get(), results.get()] == [3.0, 3.0]


def test_a_taken_port_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (world | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        mesh = mesh_from_environment(device="cpu")
        with pytest.raises(MeshError, match=rf"MASTER_PORT={port}: another program listens"):
            initialise(mesh, timeout_minutes=0.5)
        with pytest.raises(MeshError, match=rf"tcp://127.0.0.1:{port}: another program"):
            initialise(mesh, timeout_minutes=0.5, init_method=f"tcp://127.0.0.1:{port}")
