"""The cache: content addresses, damage, order of the ranks, waiting with a bound."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megamuon.data import index_cache
from megamuon.data.index_cache import (
    Arrays,
    CacheEntry,
    IndexCache,
    IndexCacheError,
    Ranks,
    hash_arrays,
)
from megamuon.data.temporary import temporary_path


def entry(directory: Path, **inputs: object) -> CacheEntry:
    return CacheEntry(directory=directory, kind="Test", split="train", names=("a",), inputs=inputs)


def counting(value: int = 1) -> tuple[list[int], Callable[[], Arrays]]:
    calls: list[int] = []

    def build() -> Arrays:
        calls.append(value)
        return {"a": np.arange(value, value + 5)}

    return calls, build


def test_second_load_builds_nothing(tmp_path: Path) -> None:
    calls, build = counting()
    first, digest = IndexCache().arrays(entry(tmp_path, seed=1), build)
    second, again = IndexCache().arrays(entry(tmp_path, seed=1), build)
    assert (len(calls), digest) == (1, again)
    assert np.array_equal(first["a"], second["a"])
    assert isinstance(second["a"], np.memmap)
    assert digest == hash_arrays(second)
    assert not [p for p in tmp_path.iterdir() if ".tmp-" in p.name]


def test_every_input_is_in_the_address(tmp_path: Path) -> None:
    calls, build = counting()
    for inputs in ({"seed": 1}, {"seed": 2}, {"seed": 1, "extra": True}):
        IndexCache().arrays(entry(tmp_path, **inputs), build)
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["a", "description"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty"])
def test_damage_is_rebuilt(tmp_path: Path, name: str, damage: str) -> None:
    calls, build = counting()
    where = entry(tmp_path, seed=1)
    IndexCache().arrays(where, build)
    path = where.path(name)
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        content[-12] ^= 0x40
        path.write_bytes(content)
    else:
        path.write_bytes(content[: 0 if damage == "empty" else len(content) - 9])
    arrays, _ = IndexCache().arrays(where, build)
    assert len(calls) == 2
    assert arrays["a"].tolist() == [1, 2, 3, 4, 5]


def test_trust_skips_the_hash(tmp_path: Path) -> None:
    calls, build = counting()
    where = entry(tmp_path, seed=1)
    IndexCache().arrays(where, build)
    content = bytearray(where.path("a").read_bytes())
    content[-8] = 99
    where.path("a").write_bytes(content)
    arrays, _ = IndexCache(trust=True).arrays(where, build)
    assert (len(calls), int(arrays["a"][-1])) == (1, 99)


def test_what_is_untouched_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, build = counting()
    where = entry(tmp_path, seed=1)
    IndexCache().arrays(where, build)
    hashed: list[Arrays] = []
    monkeypatch.setattr(index_cache, "hash_arrays", lambda a: (hashed.append(a), hash_arrays(a))[1])
    IndexCache().arrays(where, build)
    assert (len(calls), len(hashed)) == (1, 0)
    shutil.copytree(tmp_path, tmp_path / "copy")  # other times: hashed, and not built again
    moved = entry(tmp_path / "copy", seed=1)
    IndexCache().arrays(moved, build)
    assert (len(calls), len(hashed)) == (1, 1)


def test_a_change_cannot_hide_behind_the_old_time(tmp_path: Path) -> None:
    calls, build = counting()
    where = entry(tmp_path, seed=1)
    IndexCache().arrays(where, build)
    path = where.path("a")
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    arrays, _ = IndexCache().arrays(where, build)
    assert (len(calls), arrays["a"].tolist()) == (2, [1, 2, 3, 4, 5])


def test_names_of_unfinished_files_differ_between_threads(tmp_path: Path) -> None:
    names = {temporary_path(tmp_path / "x") for _ in range(100)}
    assert len(names) == 100


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    calls, build = counting()
    where = entry(tmp_path, seed=1)
    IndexCache().arrays(where, build)
    np.save(where.path("a"), np.array([print], dtype=object), allow_pickle=True)
    IndexCache(trust=True).arrays(where, build)
    assert len(calls) == 2  # refused, and built again


def test_other_ranks_wait_for_local_rank_zero(tmp_path: Path) -> None:
    _, build = counting()
    where = entry(tmp_path, seed=1)
    other_calls, other_build = counting(9)
    waiter = IndexCache(ranks=Ranks(rank=1, local_rank=1, world_size=2), timeout=20)
    found: list[tuple[Arrays, str]] = []
    thread = threading.Thread(target=lambda: found.append(waiter.arrays(where, other_build)))
    thread.start()
    _, digest = IndexCache(ranks=Ranks(world_size=2)).arrays(where, build)
    thread.join(timeout=30)
    assert found[0][1] == digest
    assert other_calls == []


def test_waiting_ends_with_the_path(tmp_path: Path) -> None:
    _, build = counting()
    waiter = IndexCache(ranks=Ranks(rank=5, local_rank=1, world_size=8), timeout=0.3)
    with pytest.raises(IndexCacheError, match=rf"rank 5: {tmp_path}.*within 0.3 s.*--data-cache"):
        waiter.arrays(entry(tmp_path, seed=1), build)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(IndexCacheError, match="--data-cache-path"):
        IndexCache().arrays(entry(tmp_path / "cache", seed=1), counting()[1])


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IndexCacheError, match=r"file/cache.*--data-cache-path"):
        IndexCache().arrays(entry(tmp_path / "file" / "cache", seed=1), counting()[1])


def run_ranks(work: Callable[[int], Callable[[], str]], local_ranks: list[int]) -> list[object]:
    """Every rank in a thread, with a real barrier; gives results or exceptions."""
    size = len(local_ranks)
    meeting = threading.Barrier(size, timeout=20)
    results: list[object] = [None] * size

    def rank_main(rank: int) -> None:
        cache = IndexCache(
            ranks=Ranks(rank=rank, local_rank=local_ranks[rank], world_size=size),
            barrier=lambda label: (meeting.wait(), None)[1],
        )
        try:
            results[rank] = cache.staged("test", work(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_turns_are_rank_zero_then_local_zeros_then_all() -> None:
    order: list[int] = []
    lock = threading.Lock()

    def work(rank: int) -> Callable[[], str]:
        def inner() -> str:
            with lock:
                order.append(rank)
            return f"rank {rank}"

        return inner

    results = run_ranks(work, [0, 1, 0, 1])
    assert results == [f"rank {rank}" for rank in range(4)]
    assert order[:2] == [0, 2]
    assert sorted(order[2:]) == [1, 3]


def test_a_failing_builder_leaves_nobody_waiting() -> None:
    def work(rank: int) -> Callable[[], str]:
        def inner() -> str:
            raise ValueError(f"bad input on rank {rank}")

        return inner

    results = run_ranks(work, [0, 1, 0, 1])
    assert [str(error) for error in results] == [f"bad input on rank {rank}" for rank in range(4)]
