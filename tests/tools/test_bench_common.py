"""What the benches share: ranks, counted calls, the look at the load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tools.bench.common import run_bench_ranks, warn_if_busy
from tools.bench.wire import count_bytes


def sum_and_count(rank: int, world: int, factor: int) -> tuple[float, dict[str, int], int]:
    value = torch.tensor(float(factor * (rank + 1)))
    dist.all_reduce(value)  # outside the block: not counted
    with count_bytes() as counter:
        dist.all_reduce(torch.zeros(3))
        received = torch.empty(world)
        dist.all_to_all_single(received, torch.ones(world), async_op=True).wait()
        torch.ones(2).add_(1)  # computes, moves nothing
    return float(value), counter.by_operation(), torch.get_num_threads()


def fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()  # hangs alone, until it is ended


def test_values_come_by_rank_and_collectives_are_counted(tmp_path: Path) -> None:
    results = run_bench_ranks(sum_and_count, 2, 10, folder=tmp_path, timeout=120)
    assert [value for value, _, _ in results] == [30.0, 30.0]
    for _, counted, threads in results:
        assert sorted(counted.values()) == [1, 1]
        assert {name.split("_")[0] for name in counted} == {"allreduce", "alltoall"}
        assert threads == 1


def test_a_failing_rank_is_named_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="(?s)rank 1 failed:.*rank one has had enough"):
        run_bench_ranks(fail_on_one, 2, folder=tmp_path, timeout=120)


@pytest.mark.parametrize(("load", "warned"), [(0.1, False), (1.5, True)])
def test_a_busy_machine_is_pointed_out(
    load: float,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    warn_if_busy()
    assert ("times are too high" in capsys.readouterr().err) is warned
