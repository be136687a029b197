"""The publish on Gloo ranks: random delays, skipped parameters, versions, stale copies, a dead
peer.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.leader_copies import HEADER_BYTES, LeaderCopies, StaleCopyError
from megamuon.collectives.publish import Publisher
from megamuon.collectives.traffic import Traffic
from tests.support.copies import sized
from tests.support.ranks import run_ranks, run_ranks_outcomes

REPLICAS = 4
VERSIONS = 12
SIZES = {3: 1, 5: 1000, 0: 1000, 8: 40_000, 2: 7, 11: 0, 6: 1000, 9: 65_537}
NAMES = {index: f"layers.{index}.weight" for index in SIZES}
OWNERS = {3: 1, 5: 0, 0: 1, 8: 0, 2: 2, 11: 1, 6: 2, 9: 0}  # replica 3 owns nothing


def contents(index: int, version: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * version + index)
    return torch.randn(SIZES[index], generator=generator).to(dtype)


def shard(rank: int, *, dtype: torch.dtype, ordered: bool) -> Publisher:
    copies = LeaderCopies(sized(SIZES, dtype), "cpu")
    return Publisher(
        copies,
        names=NAMES,
        owner_replicas=OWNERS,
        group=dist.new_group(),
        replica=rank,
        traffic=Traffic(),
        ordered=ordered,
    )


def rounds(rank: int, publisher: Publisher, dtype: torch.dtype) -> list[str]:
    """Many versions with random delays per rank; what was wrong."""
    copies, wrong = publisher.copies, []
    expected = dict.fromkeys(SIZES, 0)
    shared, own = random.Random(5), random.Random(100 + rank)
    sent = calls = 0
    for version in range(1, VERSIONS + 1):
        order = [index for index in SIZES if shared.random() < 0.7]
        shared.shuffle(order)
        # As the norm's scalar does: nobody opens the round while another still reads its copies.
        dist.barrier()
        publisher.expect(order, version)
        expected.update(dict.fromkeys(order, version))
        for index in own.sample(order, len(order)):  # tags: another order of updates does no harm
            if OWNERS[index] == rank:
                copies.payload(index).copy_(contents(index, version, dtype))
                time.sleep(own.choice((0.0, 0.0, 0.01)))
                publisher.publish(index)
                sent += (HEADER_BYTES + SIZES[index] * dtype.itemsize) * (REPLICAS - 1)
                calls += 1
        publisher.finish_round()
        time.sleep(own.choice((0.0, 0.02)))
        layers = list(SIZES)
        own.shuffle(layers)  # every rank waits in its own order
        if version % 5 == 0:
            publisher.drain()
            if publisher.pending():
                wrong.append(f"version {version}: pending after a drain")
        while layers:
            layer, layers = layers[:3], layers[3:]
            publisher.wait(layer, expected)
            for index in layer:
                held = copies.payload(index)
                wanted = contents(index, expected[index], dtype)
                if expected[index] and not torch.equal(held, wanted):
                    wrong.append(f"version {version}: {NAMES[index]} differs")
    publisher.drain()
    traffic = publisher.traffic
    if traffic is None or (traffic.bytes(), traffic.calls()) != (sent, calls):
        wrong.append(f"traffic {traffic and traffic.as_dict()}, wanted {sent} in {calls}")
    return wrong


def only_waits_for_its_own(rank: int, publisher: Publisher) -> list[str]:
    """A layer is ready as soon as its own parameters are, however late the others come."""
    order, wrong = [5, 8, 0], []
    dist.barrier()
    publisher.expect(order, 100)
    if rank == 0:
        publisher.publish(5)
        time.sleep(0.6)
        publisher.publish(8)
    if rank == 1:
        publisher.publish(0)
    started = time.monotonic()
    if rank != 0:
        publisher.wait([0, 5], {0: 100, 5: 100})
        if time.monotonic() - started > 0.4:
            wrong.append("waited for a parameter of another layer")
        blocked = publisher.waited_seconds
        publisher.wait([8], {8: 100})
        if time.monotonic() - started < 0.3 or publisher.waited_seconds - blocked < 0.2:
            wrong.append("did not wait for its own, or did not count it")
    publisher.finish_round()
    publisher.drain()
    return wrong


def an_owner_ahead_waits(rank: int, publisher: Publisher) -> list[str]:
    """An owner that is a version ahead of a slow replica must not overwrite what that replica
    awaits.
    """
    payload, wrong = publisher.copies.payload(8), []
    for version in (150, 151):
        if rank == 2:
            time.sleep(0.3)
        publisher.expect([8], version)
        if rank == 0:
            payload.fill_(version)
            publisher.publish(8)
        publisher.finish_round()
        if rank != 0:
            publisher.wait([8], {8: version})
            if not bool((payload == version).all()):
                wrong.append(f"version {version} was overwritten before it was sent")
    return wrong


def stale(rank: int, publisher: Publisher) -> list[str]:
    """A header set back is found by number, on the rank that holds it and only there."""
    dist.barrier()
    publisher.expect([5], 200)
    if rank == 0:
        publisher.publish(5)
    publisher.wait([5], {5: 200})
    if rank == 2:
        publisher.copies.stamp(5, 100)
    try:
        publisher.wait([5, 8], {5: 200, 8: 151})
    except StaleCopyError as error:
        text = str(error)
        return [] if rank == 2 and all(word in text for word in STALE) else [text]
    return ["the stale copy passed"] if rank == 2 else []


STALE = (NAMES[5], "rank 2", "replica 2", "version 100", "wanted version 200", "owner replica 0")


def work(rank: int, world: int) -> list[str]:
    wrong = []
    for ordered in (False, True):
        for dtype in (torch.bfloat16, torch.float64):
            publisher = shard(rank, dtype=dtype, ordered=ordered)
            label = f"ordered {ordered} {dtype}: "
            found = rounds(rank, publisher, dtype)
            if dtype is torch.float64:
                if not ordered:
                    found += only_waits_for_its_own(rank, publisher)
                found += an_owner_ahead_waits(rank, publisher)
                found += stale(rank, publisher)
            publisher.drain()
            wrong += [label + text for text in found]
    wrong_replica = (rank + 1) % world
    with pytest.raises(ValueError, match="build the group in order of replicas"):
        Publisher(
            LeaderCopies(sized({}, torch.float32), "cpu"),
            names={},
            owner_replicas={},
            group=dist.new_group(),
            replica=wrong_replica,
        )
    return wrong


def foreign_and_early(rank: int, publisher: Publisher) -> None:
    publisher.expect([5], 1)
    if rank != 0:
        with pytest.raises(ValueError, match=f"replica {rank} publishes it, but replica 0 owns it"):
            publisher.publish(5)


def lose_a_peer(rank: int, world: int) -> tuple[str, float]:
    """Rank 0 dies between two of its publishes; the others' error and how long it took."""
    publisher = shard(rank, dtype=torch.float32, ordered=False)
    foreign_and_early(rank, publisher)
    if rank == 0:
        publisher.publish(5)
    publisher.wait([5], {5: 1})
    publisher.drain()
    dist.barrier()
    publisher.expect([5, 2, 8], 2)
    if rank == 0:
        publisher.publish(5)
        time.sleep(0.3)
        os._exit(7)
    if rank == 2:
        publisher.publish(2)
    started = time.monotonic()
    try:
        publisher.wait([8], {8: 2})
    except StaleCopyError as error:
        return f"stale: {error}", 0.0
    except CollectiveError as error:
        publisher.abandon()
        return str(error), time.monotonic() - started
    return "nothing was raised", 0.0


def test_publish_under_delays_skips_and_stale_copies() -> None:
    assert run_ranks(work, REPLICAS, timeout=60.0) == [[]] * REPLICAS


def test_a_killed_peer_raises_on_the_others() -> None:
    outcomes = run_ranks_outcomes(lose_a_peer, REPLICAS, timeout=60.0, grace=8.0)
    assert outcomes[0].exit_code == 7
    for replica, outcome in enumerate(outcomes[1:], start=1):
        value: Any = outcome.value
        assert value is not None, outcome.error
        text, seconds = value
        assert f"{NAMES[8]}: receive from replica 0 failed on replica {replica}" in text
        assert seconds < 5.0
