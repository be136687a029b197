"""``p2p`` and ``padded`` against ``grouped``, bit for bit; the check of the schedules."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from megamuon.collectives.base import (
    CollectiveError,
    SegmentTable,
    TableSegment,
    Transport,
    TransportSettings,
)
from megamuon.collectives.grouped import GroupedTransport
from megamuon.collectives.p2p import (
    PeerToPeerTransport,
    ScheduleMismatchError,
    Transfer,
    build_schedule,
)
from megamuon.collectives.padded import PaddedTransport
from megamuon.collectives.traffic import Traffic
from tests.support.ranks import run_ranks

WORLDS = (1, 2, 3, 4, 5)
CASES = 8
KINDS = (  # buffer and slots, wire, window
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
)


def table(seed: int, world: int) -> tuple[SegmentTable, int]:
    """Uneven segments with gaps; some ranks hold nothing, once all of them."""
    dice = random.Random(seed)
    owners = [rank for rank in range(world) if dice.random() < 0.6] or [world - 1]
    segments, end = [], 0
    for _ in range(0 if seed == 3 else dice.randint(1, 9)):
        end += dice.choice((0, 0, 5))
        size = dice.choice((1, 6, 65, 1003))
        segments.append(TableSegment(rank=dice.choice(owners), offset=end, numel=size))
        end += size
    return SegmentTable.build(world, segments), max(end, 1)


def values(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Heavy-tailed, so that another order of additions changes bits."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) ** 5).to(dtype)


def both(
    transport: Transport, layout: SegmentTable, numel: int, seed: int, kind: tuple
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gather and three reductions in flight at once: what came out."""
    compute, _, master = kind
    rank = transport.rank
    buffer, slots = values(seed, rank, numel, compute), values(seed + 1, rank, numel, compute)
    windows = [torch.zeros(layout.numel_of(rank), dtype=master) for _ in range(2)]
    reduce = transport.reduce_scatter_v
    works = [
        reduce(slots, layout, windows[0], first=True, divisor=transport.world),
        transport.all_gather_v(buffer, layout),
        reduce(slots, layout, windows[1], first=True, divisor=1),
        reduce(slots, layout, windows[0], first=False, divisor=transport.world),
    ]
    for work in works:
        work.wait()
        work.wait()  # again: nothing happens
    return buffer, *windows, slots


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.view(torch.uint8) if one.numel() else one,
        other.view(torch.uint8) if one.numel() else other,
    )


def wanted_bytes(name: str, layout: SegmentTable, rank: int, kind: tuple) -> tuple[int, int]:
    """What a gather and three reductions send, from the definition."""
    compute, wire, _ = kind
    world, own = layout.world, layout.numel_of(rank)
    others = sum(layout.sizes) - own
    if name == "padded":
        own, others = max(layout.sizes), max(layout.sizes) * (world - 1)
    if world == 1:
        return 0, 0
    return own * (world - 1) * compute.itemsize, 3 * others * wire.itemsize


def compare(rank: int, world: int, groups: dict[str, dist.ProcessGroup]) -> list[str]:
    """What differed from ``grouped``."""
    wrong = []
    for kind in KINDS:
        reference = GroupedTransport(TransportSettings(**groups, wire_dtype=kind[1]))
        others = [
            maker(TransportSettings(**groups, wire_dtype=kind[1], traffic=Traffic(), axis="data"))
            for maker in (PeerToPeerTransport, PaddedTransport)
        ]
        others[0].check_schedules([table(seed, world)[0] for seed in range(CASES)])
        delays = random.Random(rank)
        for seed in range(CASES):
            layout, numel = table(seed, world)
            wanted = both(reference, layout, numel, seed, kind)
            for transport in others:
                time.sleep(delays.choice((0.0, 0.0, 0.003)))
                got = both(transport, layout, numel, seed, kind)
                for part, one, other in zip(
                    ("gather", "mean", "sum", "slots"), wanted, got, strict=True
                ):
                    if not same_bits(one, other):
                        wrong.append(f"{transport.name} {kind} case {seed}: {part}")
                traffic = transport.traffic
                sent = traffic.bytes("gather", "data"), traffic.bytes("reduce", "data")
                if sent != wanted_bytes(transport.name, layout, rank, kind):
                    wrong.append(f"{transport.name} {kind} case {seed}: {sent} bytes")
                traffic.reset()
    return wrong


def test_the_schedule_is_every_segment_from_its_owner_to_each_other_rank() -> None:
    layout = SegmentTable.build(
        3,
        [TableSegment(rank=2, offset=0, numel=4), TableSegment(rank=1, offset=9, numel=2)],
    )
    assert build_schedule(layout) == (
        Transfer(1, 2, 9, 2),
        Transfer(1, 0, 9, 2),
        Transfer(2, 0, 0, 4),
        Transfer(2, 1, 0, 4),
    )


def checks(rank: int, world: int, groups: dict[str, dist.ProcessGroup]) -> list[tuple[str, float]]:
    """The errors of schedules that differ in an entry, in length, in number and in wire dtype, and
    of a rank that does not come; the time each took.
    """
    good = [table(seed, world)[0] for seed in range(6)]
    moved = TableSegment(rank=1, offset=7, numel=5)
    other = SegmentTable.build(world, [moved])
    longer = SegmentTable.build(world, [moved, TableSegment(rank=3, offset=40, numel=1)])
    attempts = [
        ([*good, longer] if rank != 2 else [*good, other], torch.float32),
        (good if rank != 0 else good[:-1], torch.float32),
        ([other], torch.float32 if rank != 1 else torch.bfloat16),
        ([other, *good] if rank < 2 else [good[0], *good], torch.float32),
    ]
    results = []
    for tables, wire in attempts:
        transport = PeerToPeerTransport(TransportSettings(**groups, wire_dtype=wire))
        started = time.monotonic()
        with pytest.raises(ScheduleMismatchError) as caught:
            transport.check_schedules(tables)
        results.append((str(caught.value), time.monotonic() - started))
    transport.check_schedules(good)  # the group still works
    if rank == 3:
        return results
    started = time.monotonic()
    with pytest.raises(CollectiveError, match="a rank was lost or did not come in time"):
        transport.check_schedules(good, seconds=1.0)
    return [*results, ("late", time.monotonic() - started)]


def work(rank: int, world: int) -> tuple[list[str], list[tuple[str, float]]]:
    """Everything that needs ranks, on groups of the first 1, 2, ... of them."""
    wrong = []
    for members in WORLDS:
        groups = {name: dist.new_group(range(members)) for name in ("gather_group", "reduce_group")}
        if rank < members:
            wrong += [f"{members} ranks: {text}" for text in compare(rank, members, groups)]
    groups = {name: dist.new_group(range(4)) for name in ("gather_group", "reduce_group")}
    return wrong, checks(rank, 4, groups) if rank < 4 else []


@pytest.fixture(scope="module")
def results() -> list[tuple[list[str], list[tuple[str, float]]]]:
    return run_ranks(work, max(WORLDS), timeout=90.0)


def test_both_equal_grouped_bit_for_bit(results: list) -> None:
    assert [wrong for wrong, _ in results] == [[]] * max(WORLDS)


def test_a_schedule_mismatch_raises_on_all_ranks_at_once(results: list) -> None:
    found = [attempts for _, attempts in results[:4]]
    for attempts in found:
        texts = [text for text, _ in attempts]
        assert "at table 6, entry 4: ranks 0, 1, 3 have '3->0 offset 40 numel 1'" in texts[0]
        assert "rank 2 has nothing" in texts[0]
        assert "at table 5, entry 0: rank 0 has nothing, ranks 1, 2, 3 have 'reduc" in texts[1]
        assert "entry 0: ranks 0, 2, 3 have 'reduction in torch.float32" in texts[2]
        assert "rank 1 has 'reduction in torch.bfloat16" in texts[2]
        assert "at table 0, entry 1: ranks 0, 1 have '1->2 offset 7 numel 5'" in texts[3]
        assert all(seconds < 5.0 for _, seconds in attempts)
    assert [len(attempts) for attempts in found] == [5, 5, 5, 4]
