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
from tests.support.copies import sized
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks

RANKS = 4
VERSIONS = 15
GRIDS = (4, 2)  # replicas
TILE = 1024
SIZES = {3: 1, 5: 1000, 0: 1000, 8: 40_000, 2: 7, 11: 0, 6: 1000, 9: 65_537}
NAMES = {index: f"layers.{index}.weight" for index in SIZES}
OWNERS = {3: 1, 5: 0, 0: 1, 8: 0, 2: 2, 11: 1, 6: 2, 9: 0}  # of 4 replicas, replica 3 owns nothing


def contents(index: int, version: int, shard: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * version + index + 77_777 * shard)
    return torch.randn(SIZES[index], generator=generator).to(dtype)


class Shard:
    """A publisher of this rank; the last of several shards has no parameters if ``empty``."""

    def __init__(
        self, rank: int, replicas: int, dtype: torch.dtype, *, empty: bool = False
    ) -> None:
        self.mesh = mesh = mesh_of(rank, RANKS, replicas=replicas)
        data, self.group = new_group(mesh, "places"), new_group(mesh, "replicate")
        nbytes = LeaderCopies.bytes_of(sized(SIZES, dtype))
        tiles = sum(-(-size * dtype.itemsize // TILE) for size in SIZES.values())
        settings = ReadySettings(slots=2, chunk_bytes=1024, tile_bytes=TILE, deadline=60.0)
        self.fabric = HostFabric(mesh, data, settings, rails=(len(SIZES), tiles))
        self.held = {} if empty and mesh.shard == mesh.shards - 1 else SIZES
        self.dtype = dtype
        memory = self.fabric.open_copies(nbytes)
        buffer = memory.tensor(0, LeaderCopies.bytes_of(sized(self.held, dtype)), torch.uint8)
        self.copies = LeaderCopies(sized(self.held, dtype), "cpu", buffer=buffer)
        self.owners = {index: replica % replicas for index, replica in OWNERS.items()}
        self.publisher = self.make()

    def make(self, **changes: object) -> ReadyPublisher:
        arguments: dict[str, object] = {
            "names": NAMES,
            "owner_replicas": self.owners,
            "group": self.group,
            "replica": self.mesh.replica,
            "traffic": Traffic(),
        }
        return ReadyPublisher(self.copies, self.fabric, **{**arguments, **changes})  # type: ignore[arg-type]

    def write(self, index: int, version: int) -> None:
        payload = self.copies.payload(index)
        payload.copy_(contents(index, version, self.mesh.shard, self.dtype))

    def right(self, index: int, version: int) -> bool:
        wanted = contents(index, version, self.mesh.shard, self.dtype)
        return torch.equal(self.copies.payload(index), wanted)


def rounds(rank: int, shard: Shard) -> list[str]:
    """Many versions with random orders and delays per rank; what was wrong."""
    publisher, replicas, wrong = shard.publisher, shard.mesh.replicas, []
    expected = dict.fromkeys(SIZES, 0)
    shared, own = random.Random(5), random.Random(100 + rank)
    sent = calls = 0
    for version in range(1, VERSIONS + 1):
        order = [index for index in shard.held if shared.random() < 0.7]
        shared.shuffle(order)
        # As the norm's scalar does: nobody opens the round while another still reads its copies.
        dist.barrier()
        publisher.expect(order, version)
        expected.update(dict.fromkeys(order, version))
        for index in own.sample(order, len(order)):
            if shard.owners[index] == shard.mesh.replica:
                shard.write(index, version)
                time.sleep(own.choice((0.0, 0.0, 0.01)))
                publisher.publish(index)
                sent += SIZES[index] * shard.dtype.itemsize * (replicas - 1)
                calls += 1
        publisher.finish_round()
        time.sleep(own.choice((0.0, 0.01)))
        layers = list(shard.held)
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
                if expected[index] and not shard.right(index, expected[index]):
                    wrong.append(f"version {version}: {NAMES[index]} differs")
    publisher.drain()
    traffic = publisher.traffic
    if traffic is None or (traffic.bytes(), traffic.calls()) != (sent, calls):
        wrong.append(f"traffic {traffic and traffic.as_dict()}, wanted {sent} in {calls}")
    return wrong


def only_waits_for_its_own(rank: int, shard: Shard) -> list[str]:
    """A layer is ready as soon as its own parameters are, however late the others come."""
    publisher, replica, wrong = shard.publisher, shard.mesh.replica, []
    expected = dict.fromkeys((0, 5, 8), 100)
    dist.barrier()
    publisher.expect([5, 8, 0], 100)
    dist.barrier()
    if replica == shard.owners[0]:
        publisher.publish(0)
    if replica == 0:
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


def fenced_rounds(rank: int, shard: Shard) -> list[str]:
    """Rounds without a step between them: nobody overwrites what another still passes on."""
    publisher, wrong = shard.publisher, []
    for version in range(150, 156):
        if rank == version % RANKS:
            time.sleep(0.05)
        publisher.fence()
        publisher.expect(list(SIZES), version)
        for index in SIZES:
            if shard.owners[index] == shard.mesh.replica:
                shard.write(index, version)
                publisher.publish(index)
        publisher.finish_round()
        publisher.wait(list(SIZES), dict.fromkeys(SIZES, version))
        wrong += [
            f"version {version}: {NAMES[index]} was overwritten or is not whole"
            for index in SIZES
            if not shard.right(index, version)
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


def refusals(rank: int, shard: Shard) -> list[str]:
    """All ranks make the same mistakes; none of them may disturb the rounds."""
    publisher, replica, replicas = shard.publisher, shard.mesh.replica, shard.mesh.replicas
    mine = [index for index in SIZES if shard.owners[index] == replica]
    other = next(index for index in SIZES if shard.owners[index] != replica)
    wrong = []
    dist.barrier()
    for order in ([5, 5], [5, 4]):
        wrong += says(ValueError, lambda o=order: publisher.expect(o, 200), "unknown or repeated")
    dist.barrier()
    publisher.expect(list(SIZES), 200)
    owner = shard.owners[other]
    foreign = f"{NAMES[other]}: replica {replica} publishes it, but replica {owner} owns it"
    wrong += says(ValueError, lambda: publisher.publish(other), foreign)
    wrong += says(ValueError, lambda: publisher.publish(4), "parameter 4")
    if mine:
        early = f"replica {replica} never published version 200 of {NAMES[min(mine)]}"
        wrong += says(ValueError, publisher.finish_round, early)
        wrong += says(ValueError, lambda: publisher.expect([5], 201), early)
    for index in mine:
        shard.write(index, 200)
        publisher.publish(index)
        twice = f"{NAMES[index]}: not expected at version 200, or published already"
        wrong += says(ValueError, lambda i=index: publisher.publish(i), twice)
    publisher.finish_round()
    publisher.wait(list(SIZES), dict.fromkeys(SIZES, 200))
    wrong += [NAMES[index] for index in SIZES if not shard.right(index, 200)]
    publisher.fence()
    old = "version 200 is not after 200"
    wrong += says(CollectiveError, lambda: publisher.expect([5], 200), NAMES[5], old)
    # A copy that is ahead of what the forward pass needs.
    stale = (NAMES[5], f"rank {rank}", f"replica {replica}", "version 200", "wanted version 199")
    stale = (*stale, "owner replica 0")
    expected = {5: 199, 8: 200}
    wrong += says(StaleCopyError, lambda: publisher.wait([8, 5], expected), *stale)
    dist.barrier()
    for changes, words in (
        ({"replica": (replica + 1) % replicas}, "build the group in order of replicas"),
        ({"names": {}}, "has a leader copy but no name or owner replica"),
        (
            {"owner_replicas": {**OWNERS, 5: replicas}},
            f"{NAMES[5]}: owner replica {replicas} is outside",
        ),
    ):
        wrong += says(ValueError, lambda c=changes: shard.make(**c), words)
    own = {
        **shard.owners,
        9: int(replica == replicas - 1),
    }  # the last replica has another owner of 9
    here = f"{NAMES[9]} is ("
    wrong += says(
        CollectiveError, lambda: shard.make(owner_replicas=own), here, f"rank {replicas - 1}"
    )
    return wrong


def an_empty_rail(rank: int) -> list[str]:
    """A rail without parameters goes through the same rounds as its neighbour."""
    shard = Shard(rank, 2, torch.float32, empty=True)
    wrong = rounds(rank, shard)
    if not shard.held:
        shard.publisher.wait([], {})
        if not shard.publisher.arrived([], {}) or shard.publisher.pending():
            wrong.append("an empty rail is not through with an empty round")
    shard.publisher.fence()
    shard.fabric.close()
    return wrong


def work(rank: int, world: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for replicas in GRIDS:
        for dtype in (torch.bfloat16, torch.float64):
            shard = Shard(rank, replicas, dtype)
            found[f"rounds {replicas} {dtype}"] = rounds(rank, shard)
            if dtype is torch.float64:
                found[f"waits {replicas}"] = only_waits_for_its_own(rank, shard)
                found[f"fence {replicas}"] = fenced_rounds(rank, shard)
                found[f"refusals {replicas}"] = refusals(rank, shard)
            shard.fabric.close()
    found["empty"] = an_empty_rail(rank)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, list[str]]]:
    return run_ranks(work, RANKS, timeout=200.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("replicas", GRIDS)
def test_every_copy_is_its_owners_version_bit_for_bit(
    results: list[dict[str, list[str]]], replicas: int, dtype: torch.dtype
) -> None:
    assert [result[f"rounds {replicas} {dtype}"] for result in results] == [[]] * RANKS


@pytest.mark.parametrize("replicas", GRIDS)
@pytest.mark.parametrize("what", ["waits", "fence", "refusals"])
def test_waits_fences_and_refusals(
    results: list[dict[str, list[str]]], what: str, replicas: int
) -> None:
    assert [result[f"{what} {replicas}"] for result in results] == [[]] * RANKS


def test_a_column_without_parameters(results: list[dict[str, list[str]]]) -> None:
    assert [result["empty"] for result in results] == [[]] * RANKS
