"""Line D over the device library's interface, with a stand-in for the library: what drives the
kernels, without the kernels.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megamuon.collectives import CollectiveError
from megamuon.collectives import fabric_choice as choice
from megamuon.collectives.device_fabric import DeviceFabric
from megamuon.collectives.operator_settings import ReadySettings
from megamuon.collectives.operators import TableRefused
from megamuon.mesh import MeshError, new_group
from megamuon.runtime.publication import Publication
from tests.support.device_stand_in import stand_in_library
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks, run_ranks_outcomes
from tests.support.ready_training import RANKS, RUNS, difference, train
from tests.support.stand_in_streams import stand_in_parts

pytestmark = pytest.mark.slow

# Replicas and shards, narrow transfers, tensor parallelism, every way of keeping and reducing.
CHOSEN = (
    "fsdp zero 2",
    "hsdp 2x2, small chunks",
    "hsdp 4x1 narrow",
    "tp 2",
    "moe hsdp",
    "reduced once in bf16",
    "branch skipped",
)

NODES = {"fsdp": 2, "hsdp 2x2": 1}  # run, ranks of a node


@pytest.fixture(scope="module")
def stand_in() -> Path:
    return stand_in_library()


def _watch_publishers(seen: list[str]) -> None:
    """Write down who publishes before and after the pool opens."""
    use_operator = Publication.use_operator

    def watched(publication: Publication, version: int) -> None:
        seen.append(f"{type(publication.publisher).__name__} up to update {version}")
        use_operator(publication, version)
        seen.append(type(publication.publisher).__name__)

    Publication.use_operator = watched  # type: ignore[method-assign]


def _train(rank: int, world: int, library: Path) -> dict[str, Any]:
    choice.device_parts = lambda device: stand_in_parts(library)
    found: dict[str, Any] = {}
    publishers: list[str] = []
    _watch_publishers(publishers)
    for name in CHOSEN:
        publishers.clear()
        run = RUNS[name]
        mesh = mesh_of(rank, world, replicas=run.case.replicas, tp=run.case.tp)
        c = train(run, mesh, "grouped")
        d = train(run, mesh, "ready", fabric="nccl")
        found[name] = {
            "other": difference(c, d),
            **{key: d[key] for key in ("opened", "left_out", "notes")},
            "publishers": list(publishers),
        }
    return found


@pytest.fixture(scope="module")
def results(stand_in: Path) -> list[dict[str, Any]]:
    return run_ranks(_train, RANKS, stand_in, timeout=300)


@pytest.mark.parametrize("name", CHOSEN)
def test_line_d_over_the_device_interface_is_line_c_bit_for_bit(
    results: list[dict[str, Any]], name: str
) -> None:
    for result in results:
        assert result[name]["other"] == []
        assert result[name]["opened"]
        assert result[name]["left_out"] == {}
        chosen, opened = result[name]["notes"]
        assert chosen.startswith("collectives: ready on the nccl fabric, ")
        assert "gathers by a store for each GPU, nodes in one NVLink domain; " in chosen
        assert opened.startswith("symmetric pool open: ")


@pytest.mark.parametrize("name", CHOSEN)
def test_the_operator_publishes_from_the_opening_of_the_pool_on(
    results: list[dict[str, Any]], name: str
) -> None:
    """Before it, first calls of libraries synchronise a GPU, which a waiting kernel would hang."""
    several_replicas = RUNS[name].case.replicas > 1
    for result in results:
        taken_over = [re.sub(r"\d+$", "N", text) for text in result[name]["publishers"]]
        assert taken_over == (["Publisher up to update N", "ReadyPublisher"] * several_replicas)


def _train_on_nodes(rank: int, world: int, library: Path) -> dict[str, list[tuple[float, float]]]:
    """Losses of grouped calls and of line D on replicas of several nodes."""
    choice.device_parts = lambda device: stand_in_parts(library)
    found = {}
    for name, size in NODES.items():
        run = RUNS[name]
        mesh = mesh_of(rank, world, replicas=run.case.replicas)
        c = train(run, mesh, "grouped")
        choice.node_size = lambda mesh, size=size: size
        d = train(run, mesh, "ready", fabric="nccl")
        assert f"{world // size} nodes x {size} GPUs" in d["notes"][0]
        found[name] = list(zip(c["losses"] + c["norms"], d["losses"] + d["norms"], strict=True))
    return found


def test_rows_of_several_nodes_train_alike(stand_in: Path) -> None:
    """Not to the bit: sums are taken node by node."""
    for found in run_ranks(_train_on_nodes, RANKS, stand_in, timeout=120):
        assert found.keys() == NODES.keys()
        for pairs in found.values():
            assert len(pairs) == 11  # five losses and one of an evaluation, five norms
            assert [d for _, d in pairs] == pytest.approx([c for c, _ in pairs], rel=1e-5)


def _made(
    rank: int, world: int, library: Path, *, replicas: int = 1, **settings: Any
) -> tuple[DeviceFabric, Any]:
    mesh = mesh_of(rank, world, replicas=replicas)
    group = new_group(mesh, "places")
    loaded, streams = stand_in_parts(library)
    return (
        DeviceFabric(
            mesh,
            group,
            ReadySettings(**settings),
            rails=(1, 1),
            library=loaded,
            streams=streams,
        ),
        group,
    )


def _multicast(rank: int, world: int, library: Path) -> dict[str, Any]:
    """What is refused where the switch stores, and what is not."""
    fabric, _ = _made(rank, world, library)
    memory = fabric.open(1 << 16)
    gather = fabric.operators.gather
    odd = {"nodes": [0, 0], "columns": [0, 1], "offsets": [0, 24], "nbytes": [24, 24]}
    try:
        gather.all_gather_table(name="odd", **odd)
        refused = ""
    except TableRefused as error:
        refused = str(error)
    even = {"nodes": [0, 0], "columns": [0, 1], "offsets": [0, 32], "nbytes": [32, 32]}
    table = gather.all_gather_table(name="even", **even)
    buffer = memory.tensor(256, 16, torch.float32)
    buffer.fill_(-1.0)
    buffer[8 * rank : 8 * rank + 8] = float(rank)
    gather.wait(gather.all_gather(table, 256))
    result = {
        "refused": refused,
        "gathered": buffer.tolist(),
        "said": fabric.describe(),
        "inside": memory.offset_of(buffer),
        "outside": memory.offset_of(torch.ones(1)),
    }
    with pytest.raises(ValueError, match="does not fit in 65536 bytes"):
        memory.tensor(1 << 16, 1, torch.float32)
    with pytest.raises(CollectiveError, match="open already"):
        fabric.open(1 << 16)
    fabric.close()
    fabric.close()
    return result


def test_multicast_refuses_what_it_cannot_store_on_all_ranks_alike(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMUON_STAND_IN_MULTIMEM", "1")
    results = run_ranks(_multicast, 2, stand_in, timeout=60)
    for result in results:
        assert result["refused"].startswith("a segment of 24 bytes at byte 0 is not in whole 16")
        assert result["gathered"] == [0.0] * 8 + [1.0] * 8
        assert "gathers by multicast stores" in result["said"]
        assert (result["inside"], result["outside"]) == (256, None)


def _stands_still(rank: int, world: int, library: Path) -> list[str]:
    """Rank 1 never gathers: the wait, or the look at the end of the step, says so."""
    fabric, group = _made(rank, world, library, deadline=1.0)
    fabric.open(4096)
    gather = fabric.operators.gather
    halves = {"nodes": [0, 0], "columns": [0, 1], "offsets": [0, 64], "nbytes": [64, 64]}
    table = gather.all_gather_table(name="layer 3", **halves)
    said = []
    if rank == 0:
        ticket = gather.all_gather(table, 0)
        for look in (lambda: gather.wait(ticket), fabric.check):
            with pytest.raises(CollectiveError) as raised:
                look()
            said.append(str(raised.value))
    torch.distributed.barrier(group)
    fabric.close()
    return said


def test_an_operator_that_stands_still_is_an_error_that_names_the_call(stand_in: Path) -> None:
    said, _ = run_ranks(_stands_still, 2, stand_in, timeout=60)
    assert len(said) == 2
    assert all("layer 3" in text and "gather" in text for text in said)


def _lacks(rank: int, world: int, library: Path) -> str:
    def parts(device: torch.device) -> Any:
        if rank == 1:
            raise CollectiveError("the device library is not there: build it")
        return stand_in_parts(library)

    choice.device_parts = parts
    run = RUNS["fsdp"]
    mesh = mesh_of(rank, world)
    case = replace(run.case, shards=world)
    with pytest.raises(MeshError) as raised:
        train(replace(run, case=case), mesh, "ready", fabric="nccl")
    return str(raised.value)


def test_what_one_rank_lacks_stops_all_with_one_text(stand_in: Path) -> None:
    outcomes = run_ranks_outcomes(_lacks, 2, stand_in, timeout=60)
    assert [outcome.value for outcome in outcomes] == [
        "--fabric nccl: rank 1: the device library is not there: build it; or use --collectives"
        " grouped"
    ] * 2
