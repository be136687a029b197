"""The harness itself: values, failures, deaths and hangs of ranks are reported by rank."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import PRELOAD, RankError, run_ranks, run_ranks_outcomes, stacks


def _sum(rank: int, world: int, tensor: torch.Tensor) -> tuple[int, torch.Tensor, str | None, int]:
    total = tensor * (rank + 1)
    dist.all_reduce(total)
    return rank, total, os.environ.get("RANKS_TEST"), torch.get_num_threads()


def _fail(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("wrong colour")
    dist.barrier()


def _die(rank: int, world: int) -> int:
    dist.barrier()  # rank 0 has joined: a death during its start would be another case
    if rank == 1:
        print("last words", flush=True)
        os._exit(9)
    return rank


def _hang(rank: int, world: int) -> int:
    if rank == 1:
        time.sleep(60)
    return rank


def _loaded(rank: int, world: int) -> set[str]:
    return set(sys.modules)


def test_ranks_start_with_the_package_loaded() -> None:
    # The fork server passes over what it cannot import without a word.
    (loaded,) = run_ranks(_loaded, 1)
    assert set(PRELOAD) <= loaded


def test_values_come_back_by_rank_with_the_callers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKS_TEST", "here")
    values = run_ranks(_sum, 3, torch.ones(2, dtype=torch.float64))
    assert [value[0] for value in values] == [0, 1, 2]
    assert all(torch.equal(value[1], torch.full((2,), 6.0).double()) for value in values)
    assert all(value[2:] == ("here", 1) for value in values)


def test_an_exception_names_its_rank_and_shows_the_traceback() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError: wrong colour") as caught:
        run_ranks(_fail, 2, timeout=30)
    assert 'in _fail\n    raise ValueError("wrong colour")' in str(caught.value)


def test_a_death_is_an_outcome_with_exit_code_and_output() -> None:
    outcomes = run_ranks_outcomes(_die, 2, timeout=30)
    assert outcomes[0].finished and outcomes[0].value == 0
    assert not outcomes[1].finished and outcomes[1].exit_code == 9
    assert "last words" in outcomes[1].output


def test_a_hang_is_killed_and_named() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="ranks that did not finish within 4 s: 1") as caught:
        run_ranks(_hang, 2, timeout=4)
    assert time.monotonic() - started < 15
    assert "in _hang" in str(caught.value)  # where it hung


def _watched(rank: int, world: int) -> list[bool]:
    """Run deep and shallow calls in turn while another thread writes this one's stack."""
    ended = threading.Event()

    def fall(depth: int) -> int:
        return sum(range(depth)) + (fall(depth - 1) if depth else 0)

    def work() -> None:
        while not ended.is_set():
            fall(20)

    worker = threading.Thread(target=work)
    worker.start()
    end = time.monotonic() + 1.0
    seen = []
    while time.monotonic() < end:
        seen.append("in work" in stacks())
        time.sleep(0.001)
    ended.set()
    worker.join()
    return seen


def test_the_stacks_of_a_running_rank_are_read_without_harm() -> None:
    (seen,) = run_ranks(_watched, 1, timeout=30)
    assert len(seen) > 20 and any(seen)
