"""The cut of tables into rail slices and chunks, by what gathers and reductions do with them.

Every rank is an engine of this process over plain memory; its progress thread is the rank.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int, c_uint64
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megamuon.collectives import CollectiveError
from megamuon.collectives.host_engine import HostEngine, HostGather
from megamuon.collectives.host_library import array, library
from megamuon.collectives.operator_settings import OperatorConfig

CHUNK = 512
GRAIN = 16  # slices of a rail begin at multiples of it
SIZES = (1, GRAIN - 1, GRAIN, GRAIN + 1, 255, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1)
GRIDS = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1), (2, 3), (3, 2))  # nodes x columns
BEFORE = 96  # bytes of the pool before the call's base
CALLS = 3
NUMELS = (1, 15, 16, 17, 127, 128, 129, 385)  # 128 elements of FP32 are a chunk


class Ranks:
    """Engines, one operator of each, and their pools."""

    def __init__(self, kind: str, nodes: int, columns: int, *, star: bool, pool: int) -> None:
        self.nodes, self.columns = nodes, columns
        count = nodes * columns
        start = -(-library().engine_control_bytes() // 256) * 256
        config = OperatorConfig(
            kind=kind,
            nodes=nodes,
            columns=columns,
            ranks=tuple(range(count)),
            control_offset=start,
            slots=2,
            chunk_bytes=CHUNK,
            star_bytes=1 << 20 if star else 0,
        )
        self.config = config
        nbytes = start + library().operator_control_bytes(config)
        self.control = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]
        self.pools = [torch.full((pool,), 100 + r, dtype=torch.uint8) for r in range(count)]
        self.engines = [
            HostEngine(
                rank=rank,
                control=[memory.data_ptr() for memory in self.control],
                pids=[os.getpid()] * count,
                deadline=30.0,
                keep=(self.control, self.pools),
            )
            for rank in range(count)
        ]
        self.operators = [engine.operator(config, kind) for engine in self.engines]
        for operator in self.operators:
            operator.set_pool([memory.data_ptr() for memory in self.pools])

    def wait(self, tickets: list[int]) -> None:
        for operator, ticket in zip(self.operators, tickets, strict=True):
            operator.wait(ticket)


@contextmanager
def ranks(kind: str, nodes: int, columns: int, *, star: bool = False, pool: int) -> Iterator[Ranks]:
    made = Ranks(kind, nodes, columns, star=star, pool=pool)
    try:
        yield made
    finally:
        for engine in made.engines:
            engine.close()


@dataclass(frozen=True)
class Piece:
    node: int
    column: int
    offset: int
    size: int


def pieces(nodes: int, columns: int, sizes: tuple[int, ...], gaps: tuple[int, ...]) -> list[Piece]:
    """Every owner has a segment of every size, in random order with gaps; odd offsets too."""
    dice = random.Random(f"{nodes} {columns}")
    owners = [(n, c, size) for n in range(nodes) for c in range(columns) for size in sizes]
    dice.shuffle(owners)
    found, end = [], 0
    for node, column, size in owners:
        end += dice.choice(gaps)
        found.append(Piece(node, column, end, size))
        end += size
    return found


def end_of(layout: list[Piece]) -> int:
    return layout[-1].offset + layout[-1].size


# --- gathers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("star", [False, True], ids=["ring", "star"])
@pytest.mark.parametrize(("nodes", "columns"), GRIDS)
def test_a_gather_moves_every_byte_of_the_segments_and_no_other(
    nodes: int, columns: int, star: bool
) -> None:
    layout = pieces(nodes, columns, SIZES, (0, 0, 1, 7, 64))
    size = BEFORE + end_of(layout) + 64
    with ranks("all_gather", nodes, columns, star=star, pool=size) as made:
        tables = [
            operator.all_gather_table(
                nodes=[p.node for p in layout],
                columns=[p.column for p in layout],
                offsets=[p.offset for p in layout],
                nbytes=[p.size for p in layout],
                name="odd sizes",
            )
            for operator in made.operators
        ]
        expected = [pool.clone() for pool in made.pools]
        for call in range(CALLS):
            for piece in layout:
                rows = slice(BEFORE + piece.offset, BEFORE + piece.offset + piece.size)
                generator = torch.Generator().manual_seed(call * 100_003 + piece.offset)
                content = torch.randint(256, (piece.size,), generator=generator, dtype=torch.uint8)
                made.pools[piece.node * columns + piece.column][rows] = content
                for pool in expected:
                    pool[rows] = content
            made.wait(
                [
                    operator.all_gather(table, BEFORE)
                    for operator, table in zip(made.operators, tables, strict=True)
                ]
            )
            for pool, wanted in zip(made.pools, expected, strict=True):
                assert torch.equal(pool, wanted)


# --- reductions ----------------------------------------------------------------------------------


def slots_of(rank: int, call: int, numel: int) -> Tensor:
    """Small whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * rank + call)
    return torch.randint(-50, 50, (numel,), generator=generator).to(torch.float32)


@pytest.mark.parametrize(("nodes", "columns"), GRIDS)
def test_a_reduction_sums_every_element_once_and_writes_no_other(nodes: int, columns: int) -> None:
    layout = pieces(nodes, columns, NUMELS, (0, 0, 1, 5))
    count, numel = nodes * columns, end_of(layout)
    filled = dict.fromkeys(range(count), 3)  # elements of each window so far; it begins with a gap
    windows = []
    for piece in layout:
        owner = piece.node * columns + piece.column
        windows.append(filled[owner])
        filled[owner] += piece.size + 1  # a gap after each
    at = -(-4 * numel // 64) * 64
    with ranks("reduce_scatter", nodes, columns, pool=at + 4 * max(filled.values()) + 64) as made:
        tables = [
            operator.reduce_scatter_table(
                nodes=[p.node for p in layout],
                columns=[p.column for p in layout],
                offsets=[p.offset for p in layout],
                numels=[p.size for p in layout],
                windows=windows,
                slot_dtype=torch.float32,
                wire_dtype=torch.float32,
                window_dtype=torch.float32,
                name="odd sizes",
            )
            for operator in made.operators
        ]
        sums = torch.zeros(numel)
        for call, first in enumerate((True, False)):
            for rank, pool in enumerate(made.pools):
                given = slots_of(rank, call, numel)
                pool[: 4 * numel].view(torch.float32).copy_(given)
                sums += given
            made.wait(
                [
                    operator.reduce_scatter(table, 0, at, first=first, divisor=2.0)
                    for operator, table in zip(made.operators, tables, strict=True)
                ]
            )
        for rank, pool in enumerate(made.pools):
            expected = torch.full((pool.numel(),), 100 + rank, dtype=torch.uint8)
            expected[: 4 * numel].view(torch.float32).copy_(slots_of(rank, 1, numel))
            for piece, window in zip(layout, windows, strict=True):
                if piece.node * columns + piece.column == rank:
                    start = at + 4 * window
                    part = expected[start : start + 4 * piece.size].view(torch.float32)
                    part.copy_(sums[piece.offset : piece.offset + piece.size] / 2)
            assert torch.equal(pool, expected)


# --- refusals ------------------------------------------------------------------------------------


def gather_table(operator: HostGather, node: int, column: int) -> int:
    return operator.all_gather_table(
        nodes=[0, node], columns=[0, column], offsets=[0, 8], nbytes=[8, 8], name="layers.3"
    )


def test_owners_outside_the_grid_are_refused() -> None:
    with ranks("all_gather", 2, 3, pool=64) as made:
        for node, column in ((2, 0), (-1, 0), (0, 3), (1, -1)):
            text = rf"layers.3: segment 1 is owned by node {node}, column {column}, outside 2 x 3"
            with pytest.raises(CollectiveError, match=text):
                gather_table(made.operators[0], node, column)
        assert gather_table(made.operators[0], 1, 2) == 0
        with pytest.raises(CollectiveError, match="all_gather: no such table"):
            made.operators[0].all_gather(1, 0)


def test_dtypes_that_nobody_can_add_are_refused() -> None:
    with ranks("reduce_scatter", 1, 2, pool=64) as made:
        operator, engine = made.operators[0], made.engines[0]

        def table(*dtypes: int) -> int:
            one = array(c_uint64, [0])
            return library().call.mm_reduce_scatter_table(
                engine.handle,
                operator.number,
                1,
                array(c_int, [0]),
                array(c_int, [1]),
                one,
                array(c_uint64, [4]),
                one,
                *dtypes,
                b"layers.3",
            )

        for dtypes in ((4, 0, 0), (0, -1, 0), (0, 0, 9)):
            assert table(*dtypes) == -1
            assert engine.error() == "layers.3: unknown dtype"
        assert table(1, 0, 0) == -1  # FP64 slots onto an FP32 wire
        assert engine.error().startswith("layers.3: sums of these dtypes are not supported: slots ")
        assert table(0, 0, 0) == 0
        assert not engine.failed()  # a refusal is no failure: calls go on


def test_a_call_before_there_is_a_pool_is_refused() -> None:
    with ranks("all_gather", 1, 1, pool=64) as made:
        operator = made.engines[0].operator(made.config, "second")
        gather_table(operator, 0, 0)
        with pytest.raises(CollectiveError, match="all_gather: the operator has no pool"):
            operator.all_gather(0, 0)
