"""The publish by the operator in shared memory: versions, delays, refusals, an empty rail."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.host_fabric import HostFabric
from megamuon.collectives.leader_copies import LeaderCopies, StaleCopyError
from megamuon.collectives.operator_settings import ReadySettings
from megamuon.collectives.ready_publish import ReadyPublisher
from megamuon.collectives.traffic import Traffic
from megamuon.mesh import new_group
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks

RANKS = 4
VERSIONS = 15
GRIDS = (4, 2)  # rows
TILE = 1024
SIZES = {3: 1, 5: 1000, 0: 1000, 8: 40_000, 2: 7, 11: 0, 6: 1000, 9: 65_537}
NAMES = {index: f"layers.{index}.weight" for index in SIZES}
OWNERS = {3: 1, 5: 0, 0: 1, 8: 0, 2: 2, 11: 1, 6: 2, 9: 0}  # of 4 rows, row 3 owns nothing


def contents(index: int, version: int, column: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * version + index + 77_777 * column)
    return torch.randn(SIZES[index], generator=generator).to(dtype)


class Column:
    """A publisher of this rank; the last of several columns has no parameters if ``empty``."""

    def __init__(self, rank: int, rows: int, dtype: torch.dtype, *, empty: bool = False) -> None:
        self.mesh = mesh = mesh_of(rank, RANKS, rows=rows)
        data, self.group = new_group(mesh, "data"), new_group(mesh, "replicate")
        nbytes = LeaderCopies.bytes_of(SIZES, dtype)
        tiles = sum(-(-size * dtype.itemsize // TILE) for size in SIZES.values())
        settings = ReadySettings(slots=2, chunk_bytes=1024, tile_bytes=TILE, deadline=60.0)
        self.fabric = HostFabric(mesh, data, settings, rails=(len(SIZES), tiles))
        self.held = {} if empty and mesh.column == mesh.columns - 1 else SIZES
        self.dtype = dtype
        memory = self.fabric.open_copies(nbytes)
        buffer = memory.tensor(0, LeaderCopies.bytes_of(self.held, dtype), torch.uint8)
        self.copies = LeaderCopies(self.held, dtype, "cpu", buffer=buffer)
        self.owners = {index: row % rows for index, row in OWNERS.items()}
        self.publisher = self.make()

    def make(self, **changes: object) -> ReadyPublisher:
        arguments: dict[str, object] = {
            "names": NAMES,
            "owner_rows": self.owners,
            "group": self.group,
            "row": self.mesh.row,
            "traffic": Traffic(),
        }
        return ReadyPublisher(self.copies, self.fabric, **{**arguments, **changes})  # type: ignore[arg-type]

    def write(self, index: int, version: int) -> None:
        payload = self.copies.payload(index)
        payload.copy_(contents(index, version, self.mesh.column, self.dtype))

    def right(self, index: int, version: int) -> bool:
        wanted = contents(index, version, self.mesh.column, self.dtype)
        return torch.equal(self.copies.payload(index), wanted)


def rounds(rank: int, column: Column) -> list[str]:
    """Many versions with random orders and delays per rank; what was wrong."""
    publisher, rows, wrong = column.publisher, column.mesh.rows, []
    expected = dict.fromkeys(SIZES, 0)
    shared, own = random.Random(5), random.Random(100 + rank)
    sent = calls = 0
    for version in range(1, VERSIONS + 1):
        order = [index for index in column.held if shared.random() < 0.7]
        shared.shuffle(order)
        # As the norm's scalar does: nobody opens the round while another still reads its copies.
        dist.barrier()
        publisher.expect(order, version)
        expected.update(dict.fromkeys(order, version))
        for index in own.sample(order, len(order)):
            if column.owners[index] == column.mesh.row:
                column.write(index, version)
                time.sleep(own.choice((0.0, 0.0, 0.01)))
                publisher.publish(index)
                sent += SIZES[index] * column.dtype.itemsize * (rows - 1)
                calls += 1
        publisher.finish_round()
        time.sleep(own.choice((0.0, 0.01)))
        layers = list(column.held)
        own.shuffle(layers)  # every rank waits in its own order
        if version % 5 == 0:
            publisher.drain()
            if publisher.pending():
                wrong.append(f"version {version}: pending after a drain")
        while layers:
            layer, layers = layers[:3], layers[3:]
            publisher.wait(layer, expected)
            if not publisher.arrived(layer, expected):
                wrong.append(f"version {version}: waited for, and not arrived")
            for index in layer:
                if expected[index] and not column.right(index, expected[index]):
                    wrong.append(f"version {version}: {NAMES[index]} differs")
    publisher.drain()
    traffic = publisher.traffic
    if traffic is None or (traffic.bytes(), traffic.calls()) != (sent, calls):
        wrong.append(f"traffic {traffic and traffic.as_dict()}, wanted {sent} in {calls}")
    return wrong


def only_waits_for_its_own(rank: int, column: Column) -> list[str]:
    """A layer is ready as soon as its own parameters are, however late the others come."""
    publisher, row, wrong = column.publisher, column.mesh.row, []
    expected = dict.fromkeys((0, 5, 8), 100)
    dist.barrier()
    publisher.expect([5, 8, 0], 100)
    dist.barrier()
    if row == column.owners[0]:
        publisher.publish(0)
    if row == 0:
        publisher.publish(5)
        dist.barrier()  # the others have waited for 0 and 5, and 8 is not there
        time.sleep(0.3)
        publisher.publish(8)
    else:
        publisher.wait([0, 5], expected)
        if publisher.arrived([8], expected) or publisher.arrived([0, 8], expected):
            wrong.append("arrived before it was sent")
        if not publisher.pending():
            wrong.append("the round is over before the last parameter was sent")
        dist.barrier()
        blocked = publisher.waited_seconds
        publisher.wait([8], expected)
        if publisher.waited_seconds - blocked < 0.2:
            wrong.append("did not wait for its own, or did not count it")
    publisher.finish_round()
    publisher.drain()
    return wrong


def fenced_rounds(rank: int, column: Column) -> list[str]:
    """Rounds without a step between them: nobody overwrites what another still passes on."""
    publisher, wrong = column.publisher, []
    for version in range(150, 156):
        if rank == version % RANKS:
            time.sleep(0.05)
        publisher.fence()
        publisher.expect(list(SIZES), version)
        for index in SIZES:
            if column.owners[index] == column.mesh.row:
                column.write(index, version)
                publisher.publish(index)
        publisher.finish_round()
        publisher.wait(list(SIZES), dict.fromkeys(SIZES, version))
        wrong += [
            f"version {version}: {NAMES[index]} was overwritten or is not whole"
            for index in SIZES
            if not column.right(index, version)
        ]
    publisher.fence()
    return wrong


def says(error: type[Exception], call: Callable[[], object], *words: str) -> list[str]:
    """What is wrong with the refusal of ``call``."""
    try:
        call()
    except error as caught:
        return [f"{caught} lacks {word!r}" for word in words if word not in str(caught)]
    return [f"no {error.__name__} with {words}"]


def refusals(rank: int, column: Column) -> list[str]:
    """All ranks make the same mistakes; none of them may disturb the rounds."""
    publisher, row, rows = column.publisher, column.mesh.row, column.mesh.rows
    mine = [index for index in SIZES if column.owners[index] == row]
    other = next(index for index in SIZES if column.owners[index] != row)
    wrong = []
    dist.barrier()
    for order in ([5, 5], [5, 4]):
        wrong += says(ValueError, lambda o=order: publisher.expect(o, 200), "unknown or repeated")
    dist.barrier()
    publisher.expect(list(SIZES), 200)
    owner = column.owners[other]
    foreign = f"{NAMES[other]}: row {row} publishes it, but row {owner} owns it"
    wrong += says(ValueError, lambda: publisher.publish(other), foreign)
    wrong += says(ValueError, lambda: publisher.publish(4), "parameter 4")
    if mine:
        early = f"row {row} never published version 200 of {NAMES[min(mine)]}"
        wrong += says(ValueError, publisher.finish_round, early)
        wrong += says(ValueError, lambda: publisher.expect([5], 201), early)
    for index in mine:
        column.write(index, 200)
        publisher.publish(index)
        twice = f"{NAMES[index]}: not expected at version 200, or published already"
        wrong += says(ValueError, lambda i=index: publisher.publish(i), twice)
    publisher.finish_round()
    publisher.wait(list(SIZES), dict.fromkeys(SIZES, 200))
    wrong += [NAMES[index] for index in SIZES if not column.right(index, 200)]
    publisher.fence()
    old = "version 200 is not after 200"
    wrong += says(CollectiveError, lambda: publisher.expect([5], 200), NAMES[5], old)
    # A copy that is ahead of what the forward pass needs.
    stale = (NAMES[5], f"rank {rank}", f"row {row}", "version 200", "wanted version 199")
    stale = (*stale, "owner row 0")
    expected = {5: 199, 8: 200}
    wrong += says(StaleCopyError, lambda: publisher.wait([8, 5], expected), *stale)
    dist.barrier()
    for changes, words in (
        ({"row": (row + 1) % rows}, "build the group in order of rows"),
        ({"names": {}}, "has a leader copy but no name or owner row"),
        ({"owner_rows": {**OWNERS, 5: rows}}, f"{NAMES[5]}: owner row {rows} is outside"),
    ):
        wrong += says(ValueError, lambda c=changes: column.make(**c), words)
    own = {**column.owners, 9: int(row == rows - 1)}  # the last row has another owner of 9
    here = f"{NAMES[9]} is ("
    wrong += says(CollectiveError, lambda: column.make(owner_rows=own), here, f"rank {rows - 1}")
    return wrong


def an_empty_rail(rank: int) -> list[str]:
    """A column without parameters goes through the same rounds as its neighbour."""
    column = Column(rank, 2, torch.float32, empty=True)
    wrong = rounds(rank, column)
    if not column.held:
        column.publisher.wait([], {})
        if not column.publisher.arrived([], {}) or column.publisher.pending():
            wrong.append("an empty rail is not through with an empty round")
    column.publisher.fence()
    column.fabric.close()
    return wrong


def work(rank: int, world: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for rows in GRIDS:
        for dtype in (torch.bfloat16, torch.float64):
            column = Column(rank, rows, dtype)
            found[f"rounds {rows} {dtype}"] = rounds(rank, column)
            if dtype is torch.float64:
                found[f"waits {rows}"] = only_waits_for_its_own(rank, column)
                found[f"fence {rows}"] = fenced_rounds(rank, column)
                found[f"refusals {rows}"] = refusals(rank, column)
            column.fabric.close()
    found["empty"] = an_empty_rail(rank)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[str]]]:
    return run_ranks(work, RANKS, timeout=200.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", GRIDS)
def test_every_copy_is_its_owners_version_bit_for_bit(
    results: list[dict[str, list[str]]], rows: int, dtype: torch.dtype
) -> None:
    assert [result[f"rounds {rows} {dtype}"] for result in results] == [[]] * RANKS


@pytest.mark.parametrize("rows", GRIDS)
@pytest.mark.parametrize("what", ["waits", "fence", "refusals"])
def test_waits_fences_and_refusals(
    results: list[dict[str, list[str]]], what: str, rows: int
) -> None:
    assert [result[f"{what} {rows}"] for result in results] == [[]] * RANKS


def test_a_column_without_parameters(results: list[dict[str, list[str]]]) -> None:
    assert [result["empty"] for result in results] == [[]] * RANKS
