"""The stand-in for the device library moves data as the device library would, over host memory.

One run of four ranks (2 nodes x 2 columns) does the work of most tests; a second one, of two, loses
a rank.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from ctypes import c_int, c_uint64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamuon.collectives.device_library import SIGNATURES, DeviceCapability, DeviceLibrary
from tests.support.device_stand_in import (
    EXTRAS,
    MULTIMEM,
    SECONDS,
    BareFabric,
    arrays,
    load,
    stand_in_library,
)
from tests.support.ranks import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.slow  # the library has to be compiled

CSRC = Path(__file__).resolve().parents[2] / "csrc"
ROWS, COLUMNS = 2, 2
POOL = 64 * 1024 + 100  # bytes; not whole pages
GATHERED, SUMMED, WINDOW = 0, 20480, 36864  # places in the pool
WHERE = 20  # bytes at which each range of the gather begins: no multiple of 16
ELEMENTS = 1001  # of each rank's gradient segment
TILES, TILE_BYTES = 8, 1024


@pytest.fixture(scope="module")
def library() -> Path:
    return stand_in_library()


def ranges() -> list[tuple[int, int, int, int]]:
    """A gather's table: each place of the grid owns one range of odd length."""
    return [
        (place // COLUMNS, place % COLUMNS, WHERE + 4500 * place, 4411 - 17 * place)
        for place in range(ROWS * COLUMNS)
    ]


def payload(owner: int, count: int, salt: int) -> np.ndarray:
    return np.random.default_rng([owner, salt]).integers(0, 256, count, dtype=np.uint8)


def gathered(ranks: list[tuple[int, int, int, int]], salt: int, count: int) -> np.ndarray:
    """What a gather of ``ranks`` leaves in ``count`` bytes that were zero."""
    whole = np.zeros(count, np.uint8)
    for owner, (_, _, offset, nbytes) in enumerate(ranks):
        whole[offset : offset + nbytes] = payload(owner, nbytes, salt)
    return whole


def work(rank: int, world: int, path: str, ids: list[bytes]) -> dict[str, Any]:
    """All that one rank of the grid finds; ids: the grid's, its rows', its columns', two more."""
    call = load(Path(path))
    row, column = divmod(rank, COLUMNS)
    grid = BareFabric(call, ids[0], rank, (ROWS, COLUMNS))
    assert grid.open(POOL) == 0, grid.error()
    in_row = BareFabric(call, ids[1 + row], column, (1, COLUMNS))
    assert in_row.open(POOL, grid) == 0, in_row.error()
    in_column = BareFabric(call, ids[3 + column], row, (ROWS, 1))
    assert in_column.open(POOL) == 0, in_column.error()
    found = {
        "capability": tuple(getattr(grid.capability(), name) for name, _ in grid_fields()),
        "least": grid.agree(10 - rank),
        "zero": not grid.pool(0, POOL).any(),
        "shared": call.mmd_pool(in_row.handle) == call.mmd_pool(grid.handle),
        "own": call.mmd_pool(in_column.handle) != call.mmd_pool(grid.handle),
    }
    gather, reduction = grid.operator("all_gather"), grid.operator("reduce_scatter")
    found |= gathers(grid, gather, rank) | reductions(grid, reduction, rank)
    found |= row_gathers(in_row, grid, row, column)
    found |= publishes(in_column, row)
    found |= other_sizes(call, ids[5], rank, grid)
    in_row.agree(0)
    in_row.destroy()
    in_column.destroy()
    found |= failures(grid, gather, rank)
    grid.destroy()
    found |= with_multimem(call, ids[6], rank)
    return found


def grid_fields() -> list[tuple[str, type]]:
    return list(DeviceCapability._fields_)


def gathers(grid: BareFabric, op: int, rank: int) -> dict[str, Any]:
    """Two gathers over the grid, and tables that are refused between them."""
    table = grid.gather_table(op, ranges())
    _, _, offset, nbytes = ranges()[rank]
    same = []
    for salt in (1, 2):
        grid.pool(GATHERED, SUMMED)[:] = 0
        grid.pool(GATHERED + offset, nbytes)[:] = payload(rank, nbytes, salt)
        grid.agree(0)  # nobody gathers into a pool that is not cleared yet
        grid.gather(op, table, GATHERED)
        same.append(np.array_equal(grid.pool(GATHERED, SUMMED), gathered(ranges(), salt, SUMMED)))
        if salt == 1:
            refused = (grid.gather_table(op, [(ROWS, 0, 0, 16)]), grid.error(), grid.error())
    calls = grid.call.mmd_stand_in_calls(grid.handle, op)
    return {"gathers": same, "refused": refused, "calls": calls}


def reductions(grid: BareFabric, op: int, rank: int) -> dict[str, Any]:
    """A mean of small whole numbers that is stored, and another that is added."""
    places = ROWS * COLUMNS
    rows = [(p // COLUMNS, p % COLUMNS, p * ELEMENTS, ELEMENTS, 5) for p in range(places)]
    refused = grid.reduce_table(op, rows, (0, 0, 3))  # into a window of float16
    text = grid.error()
    table = grid.reduce_table(op, rows, (0, 0, 0))
    numbers = np.arange(places * ELEMENTS, dtype=np.float32) % 97
    grid.pool(SUMMED, places * ELEMENTS, "float32")[:] = numbers * (rank + 1)
    grid.pool(WINDOW, ELEMENTS + 10, "float32")[:] = -1.0
    grid.agree(0)
    grid.reduce(op, table, SUMMED, WINDOW, first=True, divisor=4.0)
    grid.reduce(op, table, SUMMED, WINDOW, first=False, divisor=2.0)
    wanted = np.full(ELEMENTS + 10, -1.0, np.float32)
    own = numbers[rank * ELEMENTS : (rank + 1) * ELEMENTS]
    wanted[5 : 5 + ELEMENTS] = own * 10 / 4 + own * 10 / 2
    same = np.array_equal(grid.pool(WINDOW, ELEMENTS + 10, "float32"), wanted)
    return {"sums": same, "refused sum": (refused, text)}


def row_gathers(in_row: BareFabric, grid: BareFabric, row: int, column: int) -> dict[str, Any]:
    """A gather of the row alone, in the grid's pool."""
    op = in_row.operator("all_gather")
    rows = [(0, k, WHERE + 4500 * k, 4000 + k) for k in range(COLUMNS)]
    table = in_row.gather_table(op, rows)
    _, _, offset, nbytes = rows[column]
    view = grid.pool(GATHERED, SUMMED)
    view[:] = 0
    view[offset : offset + nbytes] = payload(column, nbytes, 10 + row)
    in_row.agree(0)
    in_row.gather(op, table, GATHERED)
    return {"row": np.array_equal(view, gathered(rows, 10 + row, SUMMED))}


def publishes(in_column: BareFabric, row: int) -> dict[str, Any]:
    """Two rounds of three parameters, of an operator that is made for more; then too many."""
    call, handle = in_column.call, in_column.handle
    op = in_column.operator("publish", slots=1, parameters=4, tiles=TILES, tile_bytes=TILE_BYTES)
    sizes, owners, starts = (3000, 1024, 17), (0, 1, 0), (64, 8000, 12000)
    names = (ctypes.c_char_p * 5)(*(b"p%d" % i for i in range(5)))

    def declare(many: list[tuple[int, int, int]]) -> int:
        columns = arrays(many, "iww")
        return call.mmd_publish_parameters(handle, op, len(many), *columns, names)

    assert declare(list(zip(owners, starts, sizes, strict=True))) == 0, in_column.error()
    order, done = (c_int * 3)(2, 0, 1), []

    def begin(version: int) -> None:
        assert call.mmd_publish_begin(handle, op, 3, order, version, 0) == 0, in_column.error()

    for version in (1, 5):
        versions = (c_uint64 * 3)(version, version, version)
        early = call.mmd_stand_in_arrived(handle, op, 3, order, versions)
        for p in order:
            if owners[p] == row:
                in_column.pool(starts[p], sizes[p])[:] = payload(p, sizes[p], version)
                assert call.mmd_publish_task(handle, op, p, 0) == 0, in_column.error()
        begin(version)  # holds until the round before is over
        assert call.mmd_publish_wait(handle, op, 3, order, versions, 0) == 0, in_column.error()
        arrived = call.mmd_stand_in_arrived(handle, op, 3, order, versions)
        same = all(
            np.array_equal(in_column.pool(starts[p], sizes[p]), payload(p, sizes[p], version))
            for p in range(3)
        )
        done.append((early, arrived, same))
        in_column.agree(0)  # nobody publishes into a copy that is still compared
    assert call.mmd_stand_in_round_wait(handle, op, SECONDS) == 0
    assert call.mmd_stand_in_round_done(handle, op) == 1
    again = call.mmd_publish_begin(handle, op, 3, order, 5, 0), in_column.error()
    return {"publish": done, "publish again": again}


def other_sizes(call: ctypes.CDLL, unique_id: bytes, rank: int, grid: BareFabric) -> dict[str, Any]:
    """A pool of another size is not the grid's."""
    other = BareFabric(call, unique_id, rank, (ROWS, COLUMNS))
    found = other.open(POOL + (rank == 2), grid), other.error()
    other.destroy()
    return {"other size": found}


def failures(grid: BareFabric, op: int, rank: int) -> dict[str, Any]:
    """A call that leaves the pool fails on one rank; its abort ends the calls of the others."""
    call, handle = grid.call, grid.handle
    if rank == 3:
        grid.agree(0)
        outside = call.mmd_all_gather(handle, op, 0, POOL - 100, 0), grid.error()
        call.mmd_abort(handle)
        return {"outside": outside}
    assert call.mmd_all_gather(handle, op, 0, GATHERED, 0) == 0, grid.error()
    last = call.mmd_stand_in_calls(handle, op)
    grid.agree(0)
    return {"abort": (call.mmd_stand_in_wait(handle, op, last, SECONDS), grid.error())}


def with_multimem(call: ctypes.CDLL, unique_id: bytes, rank: int) -> dict[str, Any]:
    os.environ[MULTIMEM] = "1"
    fabric = BareFabric(call, unique_id, rank, (ROWS, COLUMNS), multimem=True)
    assert fabric.open(POOL) == 0, fabric.error()
    op = fabric.operator("all_gather")
    tables = (fabric.gather_table(op, [(0, 0, 16, 24)]), fabric.error())
    even = fabric.gather_table(op, [(0, 0, 16, 32)])
    capability = fabric.capability().multimem
    fabric.agree(0)
    fabric.destroy()
    return {"multimem": (capability, tables, even)}


@pytest.fixture(scope="module")
def ranks(library: Path) -> list[dict[str, Any]]:
    ids = [unique_id(library) for _ in range(7)]
    found = run_ranks(work, ROWS * COLUMNS, str(library), ids, timeout=60)
    found[0]["left"] = [name for one in ids for name in names_of(one)]
    return found


def unique_id(library: Path) -> bytes:
    made = ctypes.create_string_buffer(128)
    assert load(library).mmd_unique_id(made, None, 0) == 0
    return made.raw


def names_of(one: bytes) -> list[str]:
    """What of this fabric there is in /dev/shm."""
    return [path.name for path in Path("/dev/shm").glob(f"*{one[:16].hex()}*")]


# --- the interface -------------------------------------------------------------------------------


def test_the_names_are_the_header_s_and_the_extras(library: Path) -> None:
    header = re.sub(r"//.*", "", (CSRC / "bindings" / "device_api.h").read_text(encoding="utf-8"))
    declared = set(re.findall(r"\b(mmd_\w+)\(", header))
    command = ["nm", "-D", "--defined-only", str(library)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    exported = {name for name in listing.split() if name.startswith("mmd_")}
    assert exported == declared | set(EXTRAS)
    assert declared == set(SIGNATURES)
    assert DeviceLibrary(library).call.mmd_compiled_nccl() == 22907


# --- four ranks ----------------------------------------------------------------------------------


def test_gathers_are_exact_and_a_refused_table_is_no_failure(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["capability"] == (4, 1, 1, 0, 0)
        assert found["least"] == 7
        assert found["zero"]
        assert found["gathers"] == [True, True]
        assert found["calls"] == 2
        status, text, then = found["refused"]
        assert (status, then) == (-1, "")
        assert text == "all_gather, group: segment 0: owner (2, 0) is not in the grid"


def test_reductions_sum_divide_and_add(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["refused sum"] == (-1, "group: sums of these dtypes are not supported")
        assert found["sums"]


def test_a_row_s_fabric_works_in_the_grid_s_pool(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert (found["shared"], found["own"], found["row"]) == (True, True, True)


def test_a_pool_of_another_size_is_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        status, text = found["other size"]
        assert status == -1
        assert text == (
            f"rank 2: open: a pool of {POOL + 1} bytes is asked for, and the one that is there "
            f"has {POOL}"
        )


def test_a_publish_carries_fewer_parameters_than_it_was_made_for(
    ranks: list[dict[str, Any]],
) -> None:
    for found in ranks:
        assert found["publish"] == [(0, 1, True), (0, 1, True)]
        assert found["publish again"] == (-1, "publish: version 5 after version 5")


def test_failures_are_said_and_reach_the_others(ranks: list[dict[str, Any]]) -> None:
    status, text = ranks[3]["outside"]
    end = POOL - 100 + max(offset + nbytes for _, _, offset, nbytes in ranges())
    assert status == -1
    assert text == f"all_gather, group ends at {end}, and the pool has {POOL} bytes"
    for found in ranks[:3]:
        status, text = found["abort"]
        assert status == -1
        assert "rank 3 gave up: the device operators were aborted" in text


def test_multimem_wants_multiples_of_16_bytes(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        capability, (refused, text), even = found["multimem"]
        assert (capability, refused, even) == (1, -1, 0)
        assert text.endswith("offset 16 and 24 bytes must be multiples of 16 for multimem")


def test_nothing_stays_in_shared_memory(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["left"] == []


# --- a rank that is killed -----------------------------------------------------------------------


def lose_a_rank(rank: int, world: int, path: str, one: bytes) -> tuple[int, str, list[str]]:
    fabric = BareFabric(load(Path(path)), one, rank, (1, 2))
    assert fabric.open(POOL) == 0, fabric.error()
    op = fabric.operator("all_gather")
    table = fabric.gather_table(op, [(0, 0, 0, 100), (0, 1, 100, 100)])
    fabric.agree(0)
    there = names_of(one)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert fabric.call.mmd_all_gather(fabric.handle, op, table, 0, 0) == 0
    status = fabric.call.mmd_stand_in_wait(fabric.handle, op, 1, SECONDS)
    text = fabric.error()
    fabric.destroy()
    return status, text, there


def test_who_outlives_a_rank_says_so_and_removes_its_memory(library: Path) -> None:
    one = unique_id(library)
    survivor, killed = run_ranks_outcomes(lose_a_rank, 2, str(library), one, timeout=60)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.finished, survivor.error
    status, text, there = survivor.value
    assert status == -1
    assert "rank 1 died" in text
    assert len(there) == 2  # the pools' names, until the fabric is destroyed
    assert names_of(one) == []


# --- misuse --------------------------------------------------------------------------------------


def test_a_round_does_not_begin_before_its_own_parameters_are_handed_over(library: Path) -> None:
    call = load(library)
    fabric = BareFabric(call, unique_id(library), 0, (1, 1), deadline=0.2)
    assert fabric.open(POOL) == 0, fabric.error()
    op = fabric.operator("publish", slots=1, parameters=2, tiles=2, tile_bytes=TILE_BYTES)
    names = (ctypes.c_char_p * 2)(b"weight", b"bias")
    columns = arrays([(0, 0, 100), (0, 128, 100)], "iww")
    assert call.mmd_publish_parameters(fabric.handle, op, 2, *columns, names) == 0
    assert call.mmd_publish_task(fabric.handle, op, 0, 0) == 0
    assert call.mmd_publish_begin(fabric.handle, op, 2, (c_int * 2)(0, 1), 1, 0) == -1
    assert "publish of 'bias': hand it over before its round begins" in fabric.error()
    fabric.destroy()


def test_a_wait_for_what_nobody_sends_ends_at_the_deadline(library: Path) -> None:
    call = load(library)
    fabric = BareFabric(call, unique_id(library), 0, (1, 1), deadline=0.2)
    assert fabric.open(POOL) == 0, fabric.error()
    op = fabric.operator("publish", slots=1, parameters=1, tiles=1, tile_bytes=TILE_BYTES)
    names = (ctypes.c_char_p * 1)(b"weight")
    columns = arrays([(0, 0, 100)], "iww")
    assert call.mmd_publish_parameters(fabric.handle, op, 1, *columns, names) == 0
    which, version = (c_int * 1)(0), (c_uint64 * 1)(3)
    assert call.mmd_publish_wait(fabric.handle, op, 1, which, version, 0) == -1
    text = "publish of 'weight': no progress, waiting for version 3 after version 0"
    assert text in fabric.error()
    fabric.destroy()


def destroy_the_owner_first(rank: int, world: int, path: str, ids: list[bytes]) -> None:
    owner, other = (BareFabric(load(Path(path)), one, rank, (1, 1)) for one in ids)
    assert owner.open(POOL) == 0, owner.error()
    assert other.open(POOL, owner) == 0, other.error()
    owner.destroy()


def test_a_pool_that_is_in_use_is_not_given_back(library: Path) -> None:
    ids = [unique_id(library) for _ in range(2)]
    (outcome,) = run_ranks_outcomes(destroy_the_owner_first, 1, str(library), ids, timeout=60)
    assert outcome.exit_code == -signal.SIGABRT
    assert "mmd_destroy: destroy those that use this fabric's pool first" in outcome.output
    for name in names_of(ids[0]):  # the process was killed, and nobody else had the pool
        (Path("/dev/shm") / name).unlink()
