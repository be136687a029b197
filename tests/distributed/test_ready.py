"""The operators on shared memory against sums in one process, and against the grouped transport."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.collectives import (
    ReplicaSegment,
    SegmentTable,
    TableSegment,
    Traffic,
    Transport,
    TransportSettings,
    TwoStageReducer,
    TwoStageTable,
    build_transport,
)
from megamuon.collectives.host_fabric import HostFabric
from megamuon.collectives.operator_settings import Nodes, ReadySettings
from megamuon.collectives.ready import ReadyReducer, ReadyTransport
from megamuon.mesh import Mesh, new_group
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks

RANKS = 6
GRIDS = ((1, 6), (2, 3), (3, 2), (6, 1))  # replicas x shards
# slots, wire, window
DTYPES = (
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float16, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
)
CASES = 3
CALLS = 4  # of each table, alternately first and added
POOL = 1 << 20
WINDOWS = 1 << 19  # windows lie behind the slots
# Replicas of several nodes: replicas x shards, and how many ranks a node has.
LONG_REPLICAS = ((1, 6, 2), (1, 6, 3), (1, 6, 1), (2, 3, 1))


def table(seed: int, replicas: int, shards: int) -> tuple[TwoStageTable, int]:
    """Random segments with gaps and empty shards, cut into pieces of random replicas, or all of all
    replicas.
    """
    dice = random.Random(f"{seed} {replicas} {shards}")
    segments, end = [], 0
    used = [shard for shard in range(shards) if dice.random() < 0.8] or [shards - 1]
    for _ in range(dice.randint(2, 9)):
        end += dice.choice((0, 0, 3, 17))
        size = dice.choice((1, 2, 5, 64, 333, 4099))
        segments.append(TableSegment(rank=dice.choice(used), offset=end, numel=size))
        end += size
    layout = SegmentTable.build(shards, segments)
    shared = seed % 3 == 2
    pieces = []
    for size in layout.sizes:
        inner = [] if shared else [dice.randint(0, size) for _ in range(dice.randint(0, 6))]
        bounds = [0, *sorted(inner), size]
        pieces.append(
            tuple(
                ReplicaSegment(start, stop - start, None if shared else dice.randrange(replicas))
                for start, stop in zip(bounds, bounds[1:], strict=False)
            )
        )
    return TwoStageTable(layout, tuple(pieces)), end


def values(seed: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def grouped(
    mesh: Mesh,
    gather: Any,
    reduce: Any,
    across: Any,
    wire: torch.dtype,
    traffic: Traffic | None = None,
) -> tuple[Transport, TwoStageReducer]:
    """What the operators are compared with, and fall back to."""
    transport = build_transport(
        "grouped",
        TransportSettings(
            gather_group=gather, reduce_group=reduce, wire_dtype=wire, traffic=traffic
        ),
    )
    reducer = TwoStageReducer(
        transport,
        across,
        shard=mesh.shard,
        replica=mesh.replica,
        replicas=mesh.replicas,
        shards=mesh.shards,
        wire_dtype=wire,
        traffic=traffic,
    )
    return transport, reducer


def work(rank: int, world: int) -> dict[str, Any]:
    """What differed, by case; and the traffic of both transports."""
    failed: list[str] = []
    checked = 0
    for replicas, shards in GRIDS:
        mesh = mesh_of(rank, world, replicas=replicas)
        gather, reduce, across, data = (
            new_group(mesh, axis) for axis in ("shard", "shard", "replicate", "places")
        )
        settings = ReadySettings(slots=2, chunk_bytes=1024, deadline=60, star_bytes=0)
        for star in (0, 2 << 20):
            fabric = HostFabric(mesh, data, ReadySettings(**{**vars(settings), "star_bytes": star}))
            memory = fabric.open(POOL)
            for slot, wire, master in DTYPES:
                counted = []
                pairs = []
                for name in ("grouped", "ready"):
                    traffic = Traffic()
                    transport, reducer = grouped(mesh, gather, reduce, across, wire, traffic)
                    if name == "ready":
                        transport = ReadyTransport(transport, fabric)
                        reducer = ReadyReducer(reducer, fabric)
                    counted.append(traffic)
                    pairs.append((transport, reducer))
                for seed in range(CASES):
                    layout, numel = table(seed, replicas, shards)
                    pairs[1][1].pool(layout, WINDOWS, {slot}, master)
                    size = layout.numel_of(mesh.shard, mesh.replica)
                    windows = [
                        torch.zeros(size, dtype=master),
                        memory.tensor(WINDOWS, size, master),
                    ]
                    slots = [torch.zeros(numel, dtype=slot), memory.tensor(0, numel, slot)]
                    gathered = [
                        torch.zeros(numel, dtype=slot),
                        memory.tensor(WINDOWS // 2, numel, slot),
                    ]
                    for call in range(CALLS):
                        mine = values(seed + 10 * call, rank, numel, slot)
                        works = []
                        for (transport, reducer), given, window, buffer in zip(
                            pairs, slots, windows, gathered, strict=True
                        ):
                            given.copy_(mine)
                            buffer.fill_(-1)
                            for s in layout.shards.of(mesh.shard):
                                # every replica holds the same weights
                                whole = values(seed + 7 * call, mesh.shard, numel, slot)
                                buffer[s.offset : s.offset + s.numel] = whole[
                                    s.offset : s.offset + s.numel
                                ]
                            works.append(transport.all_gather_v(buffer, layout.shards))
                            how = {"first": call % 2 == 0, "divisor": world}
                            works.append(reducer.reduce(given, layout, window, **how))
                        for one in works:
                            one.wait()
                        checked += 1
                        if not torch.equal(*windows):
                            failed.append(
                                f"{replicas}x{shards} {slot} {wire} star {star} seed {seed} window"
                            )
                        if not torch.equal(*gathered):
                            failed.append(
                                f"{replicas}x{shards} {slot} star {star} seed {seed} gather"
                            )
                if counted[0].as_dict() != counted[1].as_dict() and not any(
                    None in {p.replica for p in layout.replicas[0]} for layout in [layout]
                ):
                    failed.append(f"traffic {counted[0].as_dict()} {counted[1].as_dict()}")
            fabric.close()
    return {"failed": failed, "checked": checked}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, RANKS, timeout=240)


def test_bits_of_the_grouped_transport(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["failed"] == []
        assert result["checked"] == len(GRIDS) * 2 * len(DTYPES) * CASES * CALLS


def _integers(seed: int, rank: int, numel: int) -> Tensor:
    """Whose sums are exact in every order of additions."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-50, 50, (numel,), generator=generator).float()


def _long_replicas(rank: int, world: int) -> list[str]:
    """Gathers and means over replicas of several nodes; what is not as one process has it."""
    failed = []
    for replicas, shards, size in LONG_REPLICAS:
        mesh = mesh_of(rank, world, replicas=replicas)
        gather, reduce, across, data = (
            new_group(mesh, axis) for axis in ("shard", "shard", "replicate", "places")
        )
        settings = ReadySettings(slots=2, chunk_bytes=1024, deadline=60, star_bytes=0)
        fabric = HostFabric(mesh, data, settings, node_size=size)
        memory = fabric.open(POOL)
        calls, two_stage = grouped(mesh, gather, reduce, across, torch.float32)
        transport, reducer = ReadyTransport(calls, fabric), ReadyReducer(two_stage, fabric)
        for seed in range(CASES):
            layout, numel = table(seed, replicas, shards)
            reducer.pool(layout, WINDOWS, {torch.float32}, torch.float32)
            slots = memory.tensor(0, numel, torch.float32)
            buffer = memory.tensor(WINDOWS // 2, numel, torch.float32)
            window = memory.tensor(
                WINDOWS, layout.numel_of(mesh.shard, mesh.replica), torch.float32
            )
            slots.copy_(_integers(seed, rank, numel))
            buffer.fill_(-1)
            wanted = buffer.clone()
            for shard in range(shards):
                for s in layout.shards.of(shard):
                    own = slice(s.offset, s.offset + s.numel)
                    wanted[own] = _integers(seed, 100 + shard, numel)[own]
                    if shard == mesh.shard:
                        buffer[own] = wanted[own]
            works = [
                transport.all_gather_v(buffer, layout.shards),
                reducer.reduce(slots, layout, window, first=True, divisor=world),
            ]
            for one in works:
                one.wait()
            total = sum(_integers(seed, r, numel) for r in range(world)) / world
            held = torch.cat(
                [total[s.offset : s.offset + s.numel] for s in layout.shards.of(mesh.shard)]
                or [total[:0]]
            )
            pieces = layout.pieces(mesh.shard, mesh.replica)
            kept = torch.cat([held[p.start : p.start + p.numel] for p in pieces] or [held[:0]])
            where = f"{replicas}x{shards} on nodes of {size}, seed {seed}"
            if not torch.equal(buffer, wanted):
                failed.append(f"{where}: gather")
            if not torch.equal(window, kept):
                failed.append(f"{where}: window")
        said = fabric.describe()
        if f"{replicas * shards // size} nodes x {size} ranks" not in said:
            failed.append(said)
        fabric.close()
    return failed


def test_a_row_may_be_longer_than_a_node() -> None:
    assert run_ranks(_long_replicas, RANKS, timeout=120) == [[]] * RANKS


def test_nodes_divide_their_replica() -> None:
    nodes = Nodes(shards=6, size=2)
    assert [nodes.place(1, shard) for shard in range(6)] == [
        (3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="a replica of 6 ranks is not made of nodes of 4"):
        Nodes(shards=6, size=4)
