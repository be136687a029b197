"""Loss reports of both styles, and their means."""

from __future__ import annotations

import math

import pytest
import torch

from megamuon.mesh import Mesh
from megamuon.training.reports import Sums, micro_batch_loss

ALONE = Mesh(
    world_size=1,
    rank=0,
    local_rank=0,
    replicas=1,
    shards=1,
    device=torch.device("cpu"),
    backend="gloo",
)


def test_new_style_divides_by_tokens() -> None:
    loss, report = micro_batch_loss((torch.tensor(12.0), 4, {"lm loss": torch.tensor([12.0, 4])}))
    assert float(loss) == 3.0
    assert list(report) == ["lm loss"]
    nothing, _ = micro_batch_loss((torch.tensor(0.0), torch.tensor(0), {}))
    assert float(nothing) == 0.0


def test_old_style_is_a_mean_already() -> None:
    loss, _ = micro_batch_loss((torch.tensor(2.5), {"lm loss": torch.tensor(2.5)}))
    assert float(loss) == 2.5
    with pytest.raises(TypeError, match="1 values"):
        micro_batch_loss((torch.tensor(1.0),))


def test_pairs_weigh_by_count_and_single_numbers_do_not() -> None:
    sums = Sums()
    sums.add({"pair": torch.tensor([10.0, 10.0]), "single": torch.tensor(1.0)})
    sums.add({"pair": torch.tensor([6.0, 2.0]), "single": torch.tensor([4.0])})
    means, extra = sums.reduced(ALONE, [1.0, 0.0])
    assert means == {"pair": 16.0 / 12.0, "single": 2.5}
    assert extra == [1.0, 0.0]
    with pytest.raises(ValueError, match="3 numbers"):
        sums.add({"pair": torch.zeros(3)})


def test_only_the_first_tensor_parallel_rank_of_a_place_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two places of two ranks each: the sum that the ranks would exchange, put together here."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda vector: sent.append(vector.clone()))
    for rank in range(4):
        mesh = Mesh(
            world_size=4,
            rank=rank,
            local_rank=rank,
            replicas=1,
            shards=2,
            tp=2,
            device=torch.device("cpu"),
            backend="gloo",
        )
        sums = Sums()
        place = mesh.sample_rank
        sums.add({"pair": torch.tensor([10.0 + place, 4.0]), "single": torch.tensor(1.0 + place)})
        sums.reduced(mesh, [1.0])
    assert sum(sent).tolist() == [21.0, 8.0, 3.0, 2.0, 4.0]


def test_not_finite_is_seen_in_report_and_in_loss() -> None:
    sums = Sums()
    sums.add({"a": torch.tensor([1.0, 1.0])}, torch.tensor(1.0))
    assert sums.finite()
    sums.add({"a": torch.tensor([1.0, 1.0])}, torch.tensor(float("inf")))
    assert not sums.finite()
    other = Sums()
    other.add({"a": torch.tensor([math.nan, 1.0])})
    assert not other.finite()
    assert math.isnan(other.reduced(ALONE, [])[0]["a"])
