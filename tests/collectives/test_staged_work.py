"""Two-stage tables, the order of stages, and what a failure says; no ranks needed."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from megamuon.collectives import (
    CollectiveError,
    ReplicaSegment,
    SegmentTable,
    StagedWork,
    TableSegment,
    TransportSettings,
    TwoStageReducer,
    TwoStageTable,
    Work,
    build_transport,
)
from megamuon.collectives.staged_work import STAGE_1, STAGE_2, STAGE_2_SHARE
from megamuon.collectives.two_stage import chain_sum


def shards(*sizes: int) -> SegmentTable:
    offsets = [sum(sizes[:shard]) for shard in range(len(sizes))]
    return SegmentTable.build(
        len(sizes),
        [
            TableSegment(rank=shard, offset=offset, numel=size)
            for shard, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
        ],
    )


def test_a_window_holds_this_rows_pieces_and_those_of_all() -> None:
    pieces = (ReplicaSegment(0, 2, 1), ReplicaSegment(2, 3, None), ReplicaSegment(5, 4, 0))
    table = TwoStageTable(shards(9, 0), (pieces, ()))
    assert table.pieces(0, 1) == pieces[:2]
    assert table.numel_of(0, 0) == 7
    assert table.numel_of(1, 0) == 0


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (((ReplicaSegment(0, 9, 0),),), "pieces of 1 shards for a table of 2"),
        (((ReplicaSegment(1, 8, 0),), ()), "shard 0: .* does not follow the piece that ends at 0"),
        (((ReplicaSegment(0, 9, -1),), ()), "does not follow"),
        (((ReplicaSegment(0, 8, 0),), ()), "pieces of 8 elements in all, but the rail holds 9"),
    ],
)
def test_bad_tables_are_refused(
    replicas: tuple[tuple[ReplicaSegment, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TwoStageTable(shards(9, 0), replicas)


def reducer(**changed: Any) -> TwoStageReducer:
    transport = build_transport(
        "grouped", TransportSettings(gather_group=None, reduce_group=None, wire_dtype=torch.float32)
    )
    place = {"shard": 0, "replica": 0, "replicas": 1, "shards": 1, "wire_dtype": torch.float32}
    return TwoStageReducer(transport, None, **(place | changed))


def test_a_reducer_checks_its_place_its_window_and_its_replicas() -> None:
    with pytest.raises(ValueError, match="rank 0 of 1, not shard 1 of 2"):
        reducer(shard=1, shards=2)
    with pytest.raises(ValueError, match="rank 0 of 1, not replica 0 of 2"):
        reducer(replicas=2)
    table = TwoStageTable(shards(3), ((ReplicaSegment(0, 3, 0),),))
    with pytest.raises(ValueError, match="an output of 2 elements for pieces of 3"):
        reducer().reduce(torch.zeros(3), table, torch.zeros(2), first=True, divisor=1)
    outside = TwoStageTable(shards(3), ((ReplicaSegment(0, 3, 1),),))
    with pytest.raises(ValueError, match="a replica outside 1"):
        reducer().reduce(torch.zeros(3), outside, torch.zeros(0), first=True, divisor=1)


def test_a_chain_rounds_each_hop_but_the_last() -> None:
    parts = torch.tensor([[1.0], [256.0], [1.0]], dtype=torch.bfloat16)
    # To replica 0: 256 + 1 is lost on its hop, the owner's 1 is not. To replica 1: 1 + 1 first.
    assert chain_sum(parts, 0, torch.float32).item() == 257.0
    assert chain_sum(parts, 1, torch.float32).item() == 258.0
    assert chain_sum(parts, 2, torch.float32).item() == 257.0


class Handle:
    """A transfer that notes when it is waited for."""

    def __init__(self, name: str, log: list[str], error: str = "") -> None:
        self.name, self.log, self.error = name, log, error

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def staged(name: str, log: list[str], queue: deque[StagedWork], broken: str = "") -> StagedWork:
    """A work of three stages, 1 to 3."""

    def transfer(stage: int) -> Work:
        log.append(f"start {name}{stage}")
        error = "peer gone" if broken == f"{name}{stage}" else ""
        handle: Any = Handle(f"{name}{stage}", log, error)
        return Work(handles=[handle], borrows=stage == 1)

    later = [(STAGE_2, lambda: transfer(2)), (STAGE_2_SHARE, lambda: transfer(3))]
    return StagedWork(transfer(1), later, queue)


def test_later_stages_start_in_the_order_of_the_calls() -> None:
    orders = []
    for calls in (["a.advance", "b.advance", "b.wait", "a.wait"], ["b.wait", "a.wait"]):
        log: list[str] = []
        queue: deque[StagedWork] = deque()
        works = {name: staged(name, log, queue) for name in "ab"}
        for call in calls:
            name, method = call.split(".")
            getattr(works[name], method)()
        assert not queue
        orders.append([entry for entry in log if entry.startswith("start")])
    assert orders[0] == orders[1]
    assert orders[0][2:] == ["start a2", "start a3", "start b2", "start b3"]


def test_advance_ends_stage_1_and_starts_stage_2_once() -> None:
    log: list[str] = []
    work = staged("a", log, deque())
    assert work.borrows
    assert not work.done()  # there is more to start
    work.advance()
    work.advance()
    assert log == ["start a1", "wait a1", "start a2"]
    assert not work.borrows
    work.wait()
    work.wait()
    assert log[3:] == ["wait a2", "start a3", "wait a3"]
    assert work.done()


@pytest.mark.parametrize(("broken", "stage"), [("a1", STAGE_1), ("a2", STAGE_2)])
def test_a_failure_names_its_stage(broken: str, stage: str) -> None:
    queue: deque[StagedWork] = deque()
    works = [staged(name, [], queue, broken) for name in "ab"]
    for work in (works[1], works[0], works[0]):  # a later one fails with it, and it stays failed
        with pytest.raises(CollectiveError) as caught:
            work.wait()
        assert stage in str(caught.value)
        assert "peer gone" in str(caught.value)
