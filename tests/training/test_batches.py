"""Streams of micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamuon.mesh import Mesh
from megamuon.training.batches import BatchStream
from megamuon.training.failures import Phase, TrainingError


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index)}


def stream(
    dataset: object, rank: int = 0, world: int = 1, tp: int = 1, **changes: object
) -> BatchStream:
    mesh = Mesh(
        world_size=world,
        rank=rank,
        local_rank=rank,
        replicas=1,
        shards=world // tp,
        tp=tp,
        device=torch.device("cpu"),
        backend="gloo",
    )
    settings = {"split": "training", "consumed": 0, "micro_batch": 2, "kind": "single", **changes}
    return BatchStream(dataset, mesh=mesh, phase=Phase(), **settings)  # type: ignore[arg-type]


def drawn(batches: BatchStream, count: int) -> list[int]:
    return [int(n) for _ in range(count) for n in next(batches)["number"]]


def test_ranks_take_turns_from_the_consumed_samples_on() -> None:
    assert drawn(stream(Numbers(), 0, 2, consumed=4), 2) == [4, 5, 8, 9]
    assert drawn(stream(Numbers(), 1, 2, consumed=4), 2) == [6, 7, 10, 11]


def test_tensor_parallel_ranks_of_a_place_read_the_same() -> None:
    drawn_by = [drawn(stream(Numbers(), rank, 4, 2), 2) for rank in range(4)]
    assert drawn_by == [[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 6, 7], [2, 3, 6, 7]]


def test_a_used_up_set_is_an_error_only_when_it_is_read() -> None:
    batches = stream(Numbers())
    drawn(batches, 6)
    with pytest.raises(TrainingError, match="training set of 12 samples is used up"):
        next(batches)
    assert stream(Numbers(), consumed=12).consumed == 12  # no error yet
    with pytest.raises(TrainingError, match="there is no test set"):
        next(stream(None, split="test"))


def test_cyclic_starts_over() -> None:
    batches = stream(Numbers(), kind="cyclic")
    first = drawn(batches, 6)
    second = drawn(batches, 6)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_the_phase_comes_back() -> None:
    batches = stream(Numbers())
    batches.phase("forward")
    next(batches)
    assert batches.phase.name == "forward"
