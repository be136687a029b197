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
    Mesh,
    MeshError,
    destroy,
    initialise,
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


def test_rows_and_columns_of_a_replicated_mesh() -> None:
    mesh = mesh_from_environment(replicas=2, environment=variables(6, 8, 2), gpus=0)
    assert (mesh.shards, mesh.replica, mesh.shard, mesh.tp_rank) == (4, 1, 2, 0)
    assert (mesh.data_parallel_rank, mesh.data_parallel_size) == (6, 8)
    assert mesh.axis_ranks("shard") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.axis_ranks("replicate") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.axis_ranks("data") == mesh.axis_ranks("world") == (tuple(range(8)),)
    assert mesh.axis_ranks("tp") == tuple((rank,) for rank in range(8))
    assert not mesh.is_last


def test_tensor_parallel_ranks_are_neighbours() -> None:
    mesh = mesh_from_environment(replicas=2, tp=2, environment=variables(7, 12, 7), gpus=0)
    assert (mesh.shards, mesh.replica, mesh.shard, mesh.tp_rank) == (3, 1, 0, 1)
    assert (mesh.data_parallel_rank, mesh.data_parallel_size) == (3, 6)
    assert mesh.axis_ranks("tp") == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert mesh.axis_ranks("shard") == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert mesh.axis_ranks("replicate") == ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))
    assert mesh.axis_ranks("data") == ((0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11))
    assert mesh.axis_ranks("world") == (tuple(range(12)),)
    with pytest.raises(MeshError, match="axis 'column': choose one of"):
        mesh.axis_ranks("column")


def test_a_place_in_every_group_is_the_place_on_its_axis() -> None:
    for rank in range(12):
        mesh = mesh_from_environment(replicas=2, tp=2, environment=variables(rank, 12, 0), gpus=0)
        places = {"shard": mesh.shard, "replicate": mesh.replica, "tp": mesh.tp_rank, "world": rank}
        places["data"] = mesh.data_parallel_rank
        for axis, place in places.items():
            (group,) = [ranks for ranks in mesh.axis_ranks(axis) if rank in ranks]
            assert group.index(rank) == place


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
