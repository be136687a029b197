"""A fresh key space for each start of the ranks in a store that outlives them.

Owns ``fresh_store``. ``torchrun --max-restarts`` starts ranks again in the store of its own
rendezvous, where the dead ranks' addresses still lie under the keys that torch looks at
(pytorch/pytorch #135712, #167288). So the ranks that are alive agree on a prefix that no start
before had. Invariant: all of them get the same prefix, whatever earlier starts left in the store
and however often each node has been restarted. Tested by ``tests/test_rendezvous.py`` and
``tests/distributed/test_restarts.py``.

[Note: who is alive]

Restart counts differ between nodes, so they cannot name a start. Each rank writes a random word
that nobody has written before. Rank 0 writes the words that it sees as a roster; a rank that finds
its own word in the roster answers with the roster's name, and waits until rank 0 has all answers.
A roster with the word of a dead rank is never answered by the one that took its place, and rank 0
writes another as soon as it sees another word.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

PREFIX = "megamuon/start"
POLL_SECONDS = 0.02


def fresh_store(
    store: dist.Store, rank: int, world_size: int, *, timeout_seconds: float
) -> dist.Store:
    """``store`` under a prefix of this start alone.  A collective of all ranks.

    Raises TimeoutError that names the ranks which are missing, or on other ranks that rank 0 is.
    """
    word = uuid.uuid4().hex
    store.set(_hello(rank), word)
    deadline = time.monotonic() + timeout_seconds
    name = _lead(store, world_size, deadline) if rank == 0 else _follow(store, rank, word, deadline)
    return dist.PrefixStore(f"{PREFIX}/{name}", store)


def _hello(rank: int) -> str:
    return f"{PREFIX}/hello/{rank}"


def _answer(rank: int) -> str:
    return f"{PREFIX}/answer/{rank}"


def _read(store: dist.Store, key: str) -> str:
    """The value of ``key``, or "" where there is none: ``get`` alone would wait for it."""
    return store.get(key).decode() if store.check([key]) else ""


def _lead(store: dist.Store, world_size: int, deadline: float) -> str:
    """Rank 0: write rosters until one is answered by all."""
    others, roster, name = range(1, world_size), dict[str, str](), ""

    def missing() -> list[int]:
        nonlocal roster, name
        seen = {str(rank): _read(store, _hello(rank)) for rank in range(world_size)}
        if seen != roster:
            roster, name = seen, uuid.uuid4().hex
            store.set(f"{PREFIX}/roster", json.dumps({"name": name, "words": roster}))
        return [rank for rank in others if _read(store, _answer(rank)) != name]

    _wait(lambda: not missing(), deadline, lambda: f"ranks {missing()} have not joined")
    store.set(f"{PREFIX}/go", name)
    return name


def _follow(store: dist.Store, rank: int, word: str, deadline: float) -> str:
    """Another rank: answer each roster that has this rank's word."""
    name = ""

    def begun() -> bool:
        nonlocal name
        text = _read(store, f"{PREFIX}/roster")
        roster = json.loads(text) if text else {"name": "", "words": {}}
        if roster["words"].get(str(rank)) == word and roster["name"] != name:
            name = roster["name"]
            store.set(_answer(rank), name)
        return bool(name) and _read(store, f"{PREFIX}/go") == name

    _wait(begun, deadline, lambda: "rank 0 has not joined, or waits for others")
    return name


def _wait(done: Callable[[], bool], deadline: float, problem: Callable[[], str]) -> None:
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{problem()}: all ranks of a run must start, and start again, together"
            )
        time.sleep(POLL_SECONDS)
