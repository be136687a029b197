"""Engines and operators through Python: the ranks are engines of this process, over one memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megamuon.collectives import CollectiveError
from megamuon.collectives.host_engine import HostEngine, HostGather
from megamuon.collectives.host_library import library
from megamuon.collectives.operator_settings import OperatorConfig
from megamuon.collectives.symmetric import SymmetricMemory

RANKS = 4  # 2 nodes x 2 columns
POOL = 1 << 16


class Ranks:
    """The engines, their pools, and one operator of each."""

    def __init__(self, kind: str, nodes: int = 2, columns: int = 2) -> None:
        self.shape = (nodes, columns)
        shape = {"nodes": nodes, "columns": columns, "ranks": tuple(range(nodes * columns))}
        start = -(-library().engine_control_bytes() // 256) * 256
        publish = {"parameters": 2, "tiles": 4, "tile_bytes": 1024} if kind == "publish" else {}
        config = OperatorConfig(
            kind=kind, control_offset=start, slots=2, chunk_bytes=1024, **shape, **publish
        )
        size = start + library().operator_control_bytes(config)
        self.size = -(-size // 4096) * 4096
        ranks = nodes * columns
        label = f"engine{uuid.uuid4().hex[:8]}"
        self.memory = SymmetricMemory(None, ranks * (self.size + POOL), label=label)
        base = self.memory.bases[0]
        control = [base + rank * self.size for rank in range(ranks)]
        self.pools = [ranks * self.size + rank * POOL for rank in range(ranks)]
        self.engines = [
            HostEngine(
                rank=rank,
                control=control,
                pids=[os.getpid()] * ranks,
                deadline=20.0,
                keep=self.memory.mapped,
            )
            for rank in range(ranks)
        ]
        self.operators = [engine.operator(config, f"{kind} 0") for engine in self.engines]
        for operator in self.operators:
            operator.set_pool([base + pool for pool in self.pools], keep=self.memory.mapped)

    def tensor(self, rank: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.tensor(self.pools[rank] + offset, numel, dtype)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.memory.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.close()


def gather_table(operator: HostGather) -> int:
    return operator.all_gather_table(
        nodes=[0, 0, 1, 1],
        columns=[0, 1, 0, 1],
        offsets=[0, 4096, 8192, 20480],
        nbytes=[4096, 4096, 12288, 512],
        name="layer 3",
    )


@pytest.mark.parametrize("ranks", ["all_gather"], indirect=True)
def test_a_gather_fills_every_pool(ranks: Ranks) -> None:
    tables = [gather_table(operator) for operator in ranks.operators]
    base = 1024
    for call in range(3):
        for rank, (at, nbytes) in enumerate([(0, 4096), (4096, 4096), (8192, 12288), (20480, 512)]):
            ranks.tensor(rank, base + at, nbytes, torch.uint8).fill_(10 * call + rank + 1)
        tickets = [op.all_gather(t, base) for op, t in zip(ranks.operators, tables, strict=True)]
        assert tickets == [call + 1] * RANKS
        wait_all(ranks, tickets)
        expected = torch.cat(
            [torch.full((n,), 10 * call + r + 1) for r, n in enumerate((4096, 4096, 12288, 512))]
        )
        for rank in range(RANKS):
            assert torch.equal(ranks.tensor(rank, base, 20992, torch.uint8).int(), expected.int())
            assert not ranks.tensor(rank, 0, base, torch.uint8).any()
    assert all(len(operator.cursors()) > 0 for operator in ranks.operators)


def wait_all(ranks: Ranks, tickets: list[int]) -> None:
    for operator, ticket in zip(ranks.operators, tickets, strict=True):
        operator.wait(ticket)
        assert operator.done(ticket)


@pytest.mark.parametrize("ranks", ["reduce_scatter"], indirect=True)
def test_a_reduction_stores_then_adds_the_mean_at_the_owner(ranks: Ranks) -> None:
    window = 8192
    tables = [
        operator.reduce_scatter_table(
            nodes=[0, 1],
            columns=[1, 0],
            offsets=[0, 300],
            numels=[300, 700],
            windows=[0, 16],
            slot_dtype=torch.float32,
            wire_dtype=torch.float32,
            window_dtype=torch.float32,
            name="layer 3",
        )
        for operator in ranks.operators
    ]
    for call, first in enumerate((True, False)):
        for rank in range(RANKS):
            ranks.tensor(rank, 0, 1000, torch.float32).fill_(float(rank + 1 + 4 * call))
        tickets = [
            operator.reduce_scatter(table, 0, window, first=first, divisor=4.0)
            for operator, table in zip(ranks.operators, tables, strict=True)
        ]
        wait_all(ranks, tickets)
    expected = (1 + 2 + 3 + 4) / 4 + (5 + 6 + 7 + 8) / 4
    owned = (
        ranks.tensor(1, window, 300, torch.float32),
        ranks.tensor(2, window + 64, 700, torch.float32),
    )
    assert all((part == expected).all() for part in owned)
    assert not ranks.tensor(0, window, 1000, torch.float32).any()


def test_a_round_of_the_publish_reaches_the_other_nodes() -> None:
    ranks = Ranks("publish", nodes=2, columns=1)
    for operator in ranks.operators:
        operator.publish_parameters(
            nodes=[0, 1], offsets=[0, 4096], nbytes=[1500, 600], names=["wq", "wk"]
        )
    for version in (7, 9):
        for operator in ranks.operators:
            operator.publish_begin([1, 0], version)
        for owner, (offset, nbytes) in enumerate([(0, 1500), (4096, 600)]):
            ranks.tensor(owner, offset, nbytes, torch.uint8).fill_(version + owner)
            ranks.operators[owner].publish_task(owner)
        for rank, operator in enumerate(ranks.operators):
            operator.publish_wait([0, 1], [version, version])
            assert [operator.publish_arrived(p) for p in (0, 1)] == [version, version]
            assert (ranks.tensor(rank, 0, 1500, torch.uint8) == version).all()
            assert (ranks.tensor(rank, 4096, 600, torch.uint8) == version + 1).all()
        for operator in ranks.operators:
            operator.publish_drain()
            assert operator.publish_round_done()
    ranks.close()


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["all_gather"], indirect=True)
def test_an_abort_ends_the_waits_of_all_ranks_with_its_reason(ranks: Ranks) -> None:
    tables = [gather_table(operator) for operator in ranks.operators]
    tickets = [ranks.operators[r].all_gather(tables[r], 0) for r in range(1, RANKS)]
    assert ranks.engines[1].error() == ""
    ranks.engines[0].abort("the loss is not finite")  # it never makes its call
    for operator, ticket in zip(ranks.operators[1:], tickets, strict=True):
        with pytest.raises(CollectiveError, match="the loss is not finite") as error:
            operator.wait(ticket)
        assert str(error.value).startswith("all_gather 0: call 1: ")
        assert "rank 0" in str(error.value)


@pytest.mark.parametrize("ranks", ["all_gather"], indirect=True)
def test_columns_of_different_lengths_never_reach_c(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"layer 3: columns of different lengths \[1, 2\]"):
        ranks.operators[0].all_gather_table(
            nodes=[0, 1], columns=[0, 1], offsets=[0], nbytes=[4, 4], name="layer 3"
        )


@pytest.mark.parametrize("ranks", ["reduce_scatter"], indirect=True)
def test_a_dtype_that_the_library_cannot_add_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="table layer 3: torch.int32 is none of torch.float32"):
        ranks.operators[0].reduce_scatter_table(
            nodes=[0],
            columns=[0],
            offsets=[0],
            numels=[1],
            windows=[0],
            slot_dtype=torch.int32,
            wire_dtype=torch.float32,
            window_dtype=torch.float32,
            name="layer 3",
        )


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="engine of rank 2: 2 control segments, 1 pids"):
        HostEngine(rank=2, control=[0, 0], pids=[0], deadline=1.0)


# --- lifetime ------------------------------------------------------------------------------------


def mapped(label: str) -> bool:
    return label in Path("/proc/self/maps").read_text()


def test_the_memory_stays_mapped_until_the_engines_are_closed() -> None:
    ranks = Ranks("all_gather")
    label = ranks.memory.label
    ranks.memory.close()
    assert mapped(label)
    for engine in ranks.engines:
        engine.close()
        engine.close()
    assert not mapped(label)
    with pytest.raises(CollectiveError, match="rank 0: the engine is closed"):
        ranks.operators[0].done(1)
    with pytest.raises(CollectiveError, match="rank 1: the engine is closed"):
        ranks.engines[1].error()


def test_engines_that_nobody_refers_to_stop_and_let_go() -> None:
    ranks = Ranks("all_gather")
    label = ranks.memory.label
    gc.collect()  # what other tests left to be collected has threads as well
    threads = len(os.listdir("/proc/self/task"))
    del ranks
    gc.collect()
    assert not mapped(label)
    assert len(os.listdir("/proc/self/task")) == threads - RANKS


SCRIPT = """
import os, sys, threading, time
sys.path.insert(0, {root!r})
from tests.collectives.test_host_engine import Ranks, gather_table
ranks = Ranks("all_gather")
child = os.fork()
if child == 0:
    for engine in ranks.engines:  # it has no such threads, and must not wait for them
        engine.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
last = ranks.operators[-1]  # whose engine goes first
ticket = last.all_gather(gather_table(last), 0)
threading.Thread(target=last.wait, args=[ticket], daemon=True).start()
time.sleep(0.2)  # the thread is inside when the engine is destroyed
"""


def test_a_forked_child_and_the_end_of_python_do_not_hang() -> None:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(root=root)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # What the thread says of it may be cut off: the interpreter is ending.
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr
