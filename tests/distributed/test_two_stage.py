"""The reduction over a grid against sums in one process that spell out the canonical order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives import (
    ReplicaSegment,
    SegmentTable,
    StagedWork,
    TableSegment,
    Traffic,
    TransportSettings,
    TwoStageReducer,
    TwoStageTable,
    build_transport,
    native,
    two_stage,
)
from tests.support.ranks import run_ranks

GRIDS = ((1, 4), (2, 2), (4, 1), (2, 3), (3, 2))  # replicas x shards
WIRES = (torch.float32, torch.bfloat16, torch.float64)
NATIVE = "native"  # what NCCL does, but for its coalescing, on Gloo
STAGE_1 = ("grouped", "per_owner", "p2p", NATIVE)
CASES = 6
RANKS = 6


def table(seed: int, replicas: int, shards: int) -> tuple[TwoStageTable, int]:
    """Random segments with gaps and empty shards, cut into pieces of random replicas and of all."""
    dice = random.Random(f"{seed} {replicas} {shards}")
    segments, end = [], 0
    used = [shard for shard in range(shards) if dice.random() < 0.8] or [shards - 1]
    for _ in range(dice.randint(2, 9)):
        end += dice.choice((0, 0, 3, 17))
        size = dice.choice((1, 2, 5, 64, 333))
        segments.append(TableSegment(rank=dice.choice(used), offset=end, numel=size))
        end += size
    layout = SegmentTable.build(shards, segments)
    pieces = []
    for size in layout.sizes:
        inner = [dice.randint(0, size) for _ in range(dice.randint(0, 6))]
        bounds = [0, *sorted(inner), size]
        owners = [None, *range(replicas)] if dice.random() < 0.8 else [dice.randrange(replicas)]
        pieces.append(
            tuple(
                ReplicaSegment(start, stop - start, dice.choice(owners))
                for start, stop in zip(bounds, bounds[1:], strict=False)
            )
        )
    return TwoStageTable(layout, tuple(pieces)), end


def values(seed: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def sums_of(
    slots: list[list[Tensor]],
    layout: TwoStageTable,
    place: tuple[int, int],
    master: torch.dtype,
    divisor: int,
) -> Tensor:
    """The canonical order in full: ``slots[replica][shard]`` in the wire dtype -> the divided sums
    of the rank at ``place`` (shard, replica).
    """
    shard, replica = place
    replicas, shards = len(slots), len(slots[0])
    wire = slots[0][0].dtype
    held = [[gradient.new_zeros(0) for gradient in line] for line in slots]
    for r, line in enumerate(slots):
        for c, gradient in enumerate(line):
            cuts = [gradient[s.offset : s.offset + s.numel] for s in layout.shards.of(shard)]
            held[r][c] = torch.cat(cuts) if cuts else gradient[:0]
    found = [torch.zeros(0, dtype=master)]
    for piece in layout.replicas[shard]:
        if piece.replica not in (replica, None):
            continue
        sums = []
        for r in range(replicas):
            total = held[r][0][piece.start : piece.start + piece.numel].to(master)
            for c in range(1, shards):
                total = total + held[r][c][piece.start : piece.start + piece.numel].to(master)
            sums.append(total if replicas == 1 else total.to(wire))
        owner = 0 if piece.replica is None else piece.replica
        partial = sums[(owner + 1) % replicas]
        for hop in range(2, replicas + 1):
            partial = partial.to(master) + sums[(owner + hop) % replicas].to(master)
            if hop < replicas:
                partial = partial.to(wire)
        found.append(partial.to(master) / divisor)
    return torch.cat(found)


def volume(
    layout: TwoStageTable, replicas: int, wire: torch.dtype, master: torch.dtype
) -> list[int]:
    """Bytes of one reduction over all ranks: along the shard axis and along the replicate axis."""
    shards = layout.shards.world
    inside = replicas * (shards - 1) * sum(layout.shards.sizes) * wire.itemsize
    pieces = [piece for held in layout.replicas for piece in held]
    owned = sum(piece.numel for piece in pieces if piece.replica is not None)
    common = sum(piece.numel for piece in pieces if piece.replica is None)
    across = (owned + common) * wire.itemsize + common * master.itemsize
    return [inside, (replicas - 1) * across]


def wires(name: str) -> tuple[torch.dtype, ...]:
    """A 16-bit wire adds in its own way on NCCL."""
    return (torch.float32, torch.float64) if name == NATIVE else WIRES


def plain_reduces(
    group: dist.ProcessGroup, views: list[tuple[Tensor, int]], operation: Any = dist.ReduceOp.SUM
) -> list[dist.Work]:
    """``reduce_views`` without coalescing and averages, which Gloo does not have."""
    handles = []
    for view, rank in views:
        root = dist.get_global_rank(group, rank)
        handles.append(dist.reduce(view, root, group=group, async_op=True))
        if operation is dist.ReduceOp.AVG:
            handles[-1].wait()
            view.div_(dist.get_world_size(group))
    return handles


def work(rank: int, world: int) -> dict[str, Any]:
    """The checks that failed, and the bytes counted per grid, transport and wire."""
    failed: list[str] = []
    counted: dict[str, list[int]] = {}
    native.reduce_views = two_stage.reduce_views = plain_reduces
    for replicas, shards in GRIDS:
        shard_groups = [[r * shards + c for c in range(shards)] for r in range(replicas)]
        replicate_groups = [[r * shards + c for r in range(replicas)] for c in range(shards)]
        gather_groups = [dist.new_group(ranks) for ranks in shard_groups]
        reduce_groups = [dist.new_group(ranks) for ranks in shard_groups]
        across_groups = [dist.new_group(ranks) for ranks in replicate_groups]
        if rank >= replicas * shards:
            continue
        replica, shard = divmod(rank, shards)
        for name in STAGE_1:
            for wire in wires(name):
                traffic = Traffic()
                transport = build_transport(
                    "grouped" if name == NATIVE else name,
                    TransportSettings(
                        gather_group=gather_groups[replica] if shards > 1 else None,
                        reduce_group=reduce_groups[replica] if shards > 1 else None,
                        wire_dtype=wire,
                        traffic=traffic,
                    ),
                )
                reducer = TwoStageReducer(
                    transport,
                    across_groups[shard] if replicas > 1 else None,
                    shard=shard,
                    replica=replica,
                    replicas=replicas,
                    shards=shards,
                    wire_dtype=wire,
                    traffic=traffic,
                )
                label = f"{replicas}x{shards} {name} {wire}"
                if name == NATIVE:
                    transport.native = lambda buffer: True
                failed += [f"{label}: {what}" for what in check(reducer, rank, name)]
                axes = ("shard", "replicate")
                counted[label] = [traffic.bytes("reduce", axis) for axis in axes]
    return {"failed": failed, "counted": counted}


def check(reducer: TwoStageReducer, rank: int, name: str) -> list[str]:
    """All cases in flight at once, driven in an order of this rank's own; then once more, added."""
    replicas, shards, wire = reducer.replicas, reducer.shards, reducer.wire_dtype
    master = torch.float64 if wire is torch.float64 else torch.float32
    place = (reducer.shard, reducer.replica)
    # The caller's number: means over all ranks, or over fewer as under context parallelism.
    divisor = 3 if wire is torch.float64 else replicas * shards
    tables = [table(seed, replicas, shards) for seed in range(CASES)]
    wanted, windows, failed = [], [], []
    slots = [values(seed, rank, numel, wire) for seed, (_, numel) in enumerate(tables)]
    for seed, (layout, numel) in enumerate(tables):
        every = [
            [values(seed, r * shards + c, numel, wire) for c in range(shards)]
            for r in range(replicas)
        ]
        wanted.append(sums_of(every, layout, place, master, divisor))
        windows.append(torch.full((layout.numel_of(*place),), 7.0, dtype=master))
    for first in (True, False):
        works = []
        for seed, (layout, _) in enumerate(tables):
            lent = slots[seed].clone() if name == NATIVE else slots[seed]  # NCCL reduces in place
            how = {"first": first, "divisor": divisor}
            works.append(reducer.reduce(lent, layout, windows[seed], **how))
            if seed % 3 == 2:
                works[seed - 1].advance()
        drive(works, random.Random(f"{rank} {first}"))
    exact = name in ("grouped", "p2p") or (
        name == "per_owner" and (wire is torch.bfloat16 or shards < 3)
    )
    for seed, (window, once) in enumerate(zip(windows, wanted, strict=True)):
        twice = once + once
        if not (torch.equal(window, twice) if exact else torch.allclose(window, twice, atol=1e-5)):
            failed.append(f"case {seed}: {(window - twice).abs().max()}")
        if not torch.equal(slots[seed], values(seed, rank, len(slots[seed]), wire)):
            failed.append(f"case {seed}: the slots were written")
    return failed


def drive(works: list[StagedWork], dice: random.Random) -> None:
    """Advance and wait, out of order and repeatedly."""
    calls = [work.advance for work in works] + [work.wait for work in works]
    dice.shuffle(calls)
    for call in calls:
        call()
    for work in works:
        work.wait()
        work.advance()
        assert work.done()
        assert not work.borrows


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(work, RANKS, timeout=100.0)


def test_every_mean_is_the_canonical_one(results: list[dict[str, Any]]) -> None:
    assert [result["failed"] for result in results] == [[]] * RANKS


def test_counted_bytes_are_the_formulas(results: list[dict[str, Any]]) -> None:
    for replicas, shards in GRIDS:
        for name in STAGE_1:
            for wire in wires(name):
                label = f"{replicas}x{shards} {name} {wire}"
                sent = [result["counted"].get(label, [0, 0]) for result in results]
                master = torch.float64 if wire is torch.float64 else torch.float32
                layouts = [table(seed, replicas, shards)[0] for seed in range(CASES)]
                once = [volume(layout, replicas, wire, master) for layout in layouts]
                wanted = [2 * sum(shard) for shard in zip(*once, strict=True)]
                assert [sum(shard) for shard in zip(*sent, strict=True)] == wanted, label


def test_the_cases_cover_what_they_should() -> None:
    layouts = [table(seed, *grid)[0] for seed in range(CASES) for grid in GRIDS if grid[0] > 1]
    pieces = [piece for layout in layouts for held in layout.replicas for piece in held]
    assert {None, 0, 1, 2, 3} == {piece.replica for piece in pieces if piece.numel}
    assert any(not size for layout in layouts for size in layout.shards.sizes)
    assert any(piece.replica is None and 0 < piece.numel < 3 for piece in pieces)
