"""Ranks that start again in one store find each other, and nobody finds the dead."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch.distributed as dist

from megamuon.rendezvous import fresh_store

WORLD = 4


def start(store: dist.Store, ranks: list[int], dice: random.Random) -> dict[int, str]:
    """One start of ``ranks``, each late by its own time; what each one reads of the others."""
    found: dict[int, str] = {}
    delays = {rank: dice.uniform(0, 0.2) for rank in ranks}
    mark = f"start {dice.random()}"

    def join(rank: int) -> None:
        time.sleep(delays[rank])
        mine = fresh_store(store.clone(), rank, WORLD, timeout_seconds=30.0)
        assert not mine.check(["seen/0"])  # nothing of an earlier start
        if rank == 0:
            time.sleep(0.05)
            mine.set("mark", mark)
        found[rank] = mine.get("mark").decode()
        mine.add("seen", 1)
        while int(mine.add("seen", 0)) < WORLD:
            time.sleep(0.01)
        mine.set(f"seen/{rank}", "x")

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert set(found.values()) == {mark}
    return found


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("seed", range(4))
def test_starts_in_one_store_do_not_mix(store: dist.Store, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(3):
        found = start(store, dice.sample(range(WORLD), WORLD), dice)
        assert sorted(found) == list(range(WORLD))


def test_a_start_that_some_ranks_never_joined_is_forgotten(store: dist.Store) -> None:
    """Two ranks of a start die while they wait; the next start has other ones in their places."""
    for rank in (1, 0):
        with pytest.raises(
            TimeoutError, match=r"ranks \[.*\] have not joined|rank 0 has not joined"
        ):
            fresh_store(store.clone(), rank, WORLD, timeout_seconds=0.2)
    start(store, list(range(WORLD)), random.Random(0))


def test_the_missing_are_named(store: dist.Store) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2, 3\] have not joined"):
        fresh_store(store, 0, WORLD, timeout_seconds=0.1)
