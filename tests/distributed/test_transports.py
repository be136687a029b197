"""Every transport against sums in one process: bit-exact gathers, sums in rank order, any
layout; counted bytes against the tables.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from megamuon.collectives import (
    TRANSPORTS,
    SegmentTable,
    TableSegment,
    Traffic,
    TransportSettings,
    build_transport,
)
from megamuon.collectives.operator_settings import OperatorGrid, ReadySettings
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks

CASES = 12
UNPADDED = ("grouped", "per_owner", "p2p", "ready")  # padding travels, and is counted


def table(seed: int, world: int) -> tuple[SegmentTable, int]:
    """Random segments with gaps, empty ranks and odd sizes; the same on every rank."""
    dice = random.Random(seed)
    segments, end = [], 0
    owners = [r for r in range(world) if dice.random() < 0.7] or [0]
    for _ in range(dice.randint(1, 9)):
        end += dice.choice((0, 0, 3, 17))
        size = dice.choice((1, 5, 64, 1001))
        segments.append(TableSegment(rank=dice.choice(owners), offset=end, numel=size))
        end += size
    return SegmentTable.build(world, segments), end


def values(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def work(rank: int, world: int) -> list[str]:
    """Names of the checks that failed."""
    failed = []
    gather_group, reduce_group = dist.new_group(), dist.new_group()
    for name in TRANSPORTS:
        for wire in (torch.float32, torch.bfloat16, torch.float64):
            traffic = Traffic()
            transport = build_transport(
                name,
                TransportSettings(
                    gather_group=gather_group,
                    reduce_group=reduce_group,
                    wire_dtype=wire,
                    traffic=traffic,
                    grid=OperatorGrid(
                        mesh=mesh_of(rank, world),
                        device=torch.device("cpu"),
                        fabric="host",
                        settings=ReadySettings(),
                        new_group=dist.new_group,
                    ),
                ),
            )
            master = torch.float64 if wire is torch.float64 else torch.float32
            for seed in range(CASES):
                layout, numel = table(seed, world)
                label = f"{name} {wire} case {seed}"
                buffer = values(seed, rank, numel, wire)
                wanted = buffer.clone()
                for s in layout.segments:
                    theirs = values(seed, s.rank, numel, wire)
                    wanted[s.offset : s.offset + s.numel] = theirs[s.offset : s.offset + s.numel]
                work = transport.all_gather_v(buffer, layout)
                work.wait()
                work.wait()  # again: nothing happens
                if not torch.equal(buffer, wanted):
                    failed.append(f"{label}: gather")
                slots = values(seed, rank, numel, wire)
                window = torch.zeros(layout.numel_of(rank), dtype=master)
                transport.reduce_scatter_v(slots, layout, window, first=True, divisor=world).wait()
                transport.reduce_scatter_v(slots, layout, window, first=False, divisor=world).wait()
                own, whole = layout.numel_of(rank), sum(layout.sizes)
                wanted_bytes = {"gather": own * (world - 1), "reduce": 2 * (whole - own)}
                for operation, elements in wanted_bytes.items():
                    if traffic.bytes(operation) != elements * wire.itemsize and name in UNPADDED:
                        failed.append(f"{label}: bytes of {operation}")
                traffic.reset()
                plain = torch.ones_like(window)
                transport.reduce_scatter_v(slots, layout, plain, first=True, divisor=1).wait()
                divided = torch.ones_like(window)
                transport.reduce_scatter_v(slots, layout, divided, first=True, divisor=6).wait()
                traffic.reset()
                total = values(seed, 0, numel, wire).to(master)
                for other in range(1, world):
                    total += values(seed, other, numel, wire)
                mean = total / world
                parts = [mean[s.offset : s.offset + s.numel] for s in layout.of(rank)]
                once = torch.cat(parts) if parts else torch.zeros(0, dtype=master)
                exact = name != "per_owner" or wire is torch.bfloat16
                good = (
                    torch.equal(window, once + once)
                    if exact
                    else torch.allclose(window, 2 * once, atol=1e-5)
                )
                if not good:
                    failed.append(f"{label}: reduction")
                sums = [total[s.offset : s.offset + s.numel] for s in layout.of(rank)]
                wanted = torch.cat(sums) if sums else torch.zeros(0, dtype=master)
                if not torch.allclose(plain, wanted, atol=0 if exact else 1e-5, rtol=0):
                    failed.append(f"{label}: divisor 1")
                if not torch.allclose(divided, wanted / 6, atol=0 if exact else 1e-5, rtol=0):
                    failed.append(f"{label}: divisor 6")
                if not torch.equal(slots, values(seed, rank, numel, wire)):
                    failed.append(f"{label}: the slots were written")
            transport.close()
    return failed


@pytest.mark.parametrize("world", [1, 3, 4])
def test_transports(world: int) -> None:
    assert run_ranks(work, world, timeout=200.0) == [[]] * world


def test_an_unknown_transport_is_named() -> None:
    with pytest.raises(ValueError, match="--collectives nccl: choose one of grouped, p2p, padded"):
        build_transport(
            "nccl",
            TransportSettings(gather_group=None, reduce_group=None, wire_dtype=torch.float32),
        )
