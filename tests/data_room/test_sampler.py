"""Samplers: which samples a rank gets, and that a resume is a skip."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from megamuon.data.sampler import CyclicSampler, SamplerSpec, SingleSampler, build_sampler


def batches(kind: str, total: int, consumed: int, rank: int, count: int, **more: Any) -> list[Any]:
    spec = SamplerSpec(
        kind=kind,  # type: ignore[arg-type]
        consumed_samples=consumed,
        micro_batch_size=2,
        data_parallel_rank=rank,
        data_parallel_size=3,
        **more,
    )
    return list(islice(build_sampler(total, spec), count))


def test_single_is_sequential_and_ends() -> None:
    assert batches("single", 14, 0, 0, 9) == [[0, 1], [6, 7]]
    assert batches("single", 14, 0, 2, 9) == [[4, 5], [10, 11]]
    # From an offset that is no multiple of the step, as after a batch-size change:
    assert batches("single", 14, 3, 1, 9) == [[5, 6]]


def test_cyclic_matches_its_definition() -> None:
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).tolist()
    rank_one = batches("cyclic", 20, 0, 1, 3)
    assert rank_one == [[6 + i for i in order[k : k + 2]] for k in (0, 2, 4)]
    shared = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()[:18]
    rank_two = batches("cyclic", 20, 0, 2, 3, data_sharding=False)
    assert rank_two == [shared[2::3][k : k + 2] for k in (0, 2, 4)]


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_covers_an_epoch_once(sharding: bool) -> None:
    steps = [batches("cyclic", 20, 0, rank, 6, data_sharding=sharding) for rank in range(3)]
    for epoch in range(2):
        drawn = [i for rank in steps for batch in rank[epoch * 3 : epoch * 3 + 3] for i in batch]
        assert len(set(drawn)) == 18
    assert steps[0][:3] != steps[0][3:]  # another epoch, another order


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("sharding", [True, False])
def test_resume_is_a_skip(kind: str, sharding: bool) -> None:
    for rank in range(3):
        whole = batches(kind, 38, 0, rank, 6, data_sharding=sharding)
        for step in range(6):
            resumed = batches(kind, 38, step * 6, rank, 6 - step, data_sharding=sharding)
            assert resumed == whole[step:]
    for rank in range(3):  # across the end of an epoch
        whole = batches("cyclic", 20, 0, rank, 8, data_sharding=sharding)
        assert batches("cyclic", 20, 30, rank, 3, data_sharding=sharding) == whole[5:8]


def steps(spec: dict[str, Any], total: int, count: int) -> list[list[int]]:
    """Samples of ``count`` micro-steps over all ranks, rank after rank."""
    ranks = []
    for rank in range(spec["data_parallel_size"]):
        made = SamplerSpec(kind="cyclic", data_parallel_rank=rank, **spec)
        ranks.append(list(islice(build_sampler(total, made), count)))
    return [[i for rank in ranks for i in rank[step]] for step in range(count)]


@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize(("micro", "ranks"), [(4, 1), (1, 4), (2, 4), (3, 2), (5, 1), (2, 2)])
def test_cyclic_repeats_nothing_on_other_ranks(sharding: bool, micro: int, ranks: int) -> None:
    """64 samples begun as 2 x 2: the order of a run that never changed, whoever draws it."""
    first = {"micro_batch_size": 2, "data_parallel_size": 2, "data_sharding": sharding}
    order = [i for step in steps(first, 64, 64) for i in step]
    assert sorted(order[:64]) == sorted(order[64:128]) == list(range(64))
    for consumed in (24, 28, 62, 100):
        layout = {"micro_batch_size": micro, "data_parallel_size": ranks, "layout": (2, 2)}
        moved = {**layout, "data_sharding": sharding, "consumed_samples": consumed}
        drawn = [i for step in steps(moved, 64, 80 // (micro * ranks)) for i in step]
        assert drawn == order[consumed : consumed + len(drawn)]


def test_length_of_single() -> None:
    made = SingleSampler(
        total_samples=14,
        consumed_samples=1,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=3,
    )
    assert len(made) == len(list(made)) == 2


def test_errors() -> None:
    with pytest.raises(ValueError, match="all samples are drawn: consumed_samples 14 of 14"):
        batches("single", 14, 14, 0, 1)
    with pytest.raises(ValueError, match="--dataloader-type 'external'"):
        batches("external", 14, 0, 0, 1)
    with pytest.raises(ValueError, match="5 samples are fewer than one step of 6"):
        batches("cyclic", 5, 0, 0, 1)
    with pytest.raises(ValueError, match="rank 3"):
        batches("single", 14, 0, 3, 1)
    with pytest.raises(ValueError, match="--micro-batch-size 0"):
        SamplerSpec(micro_batch_size=0)
    with pytest.raises(ValueError, match=r"layout \(2, 0\)"):
        SamplerSpec(micro_batch_size=2, layout=(2, 0))
    with pytest.raises(ValueError, match="no samples"):
        build_sampler(0, SamplerSpec(micro_batch_size=1))
    assert isinstance(
        build_sampler(4, SamplerSpec(micro_batch_size=1, kind="cyclic")), CyclicSampler
    )
