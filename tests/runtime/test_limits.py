"""Documented limits are errors that say what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megamuon.optim import (
    AdamW,
    AdamWConfig,
    Muon,
    MuonConfig,
    NorMuon,
    NorMuonConfig,
    Sgd,
    SgdConfig,
    Shampoo,
    ShampooConfig,
    Soap,
    SoapConfig,
)
from megamuon.optim.optimizer import Item
from megamuon.runtime import Runtime, shard
from megamuon.runtime.released import ReleasedWeightError
from tests.support.runtime_config import plain_config
from tests.support.scenarios import Block, Stack

OPTIMIZERS: dict[str, Callable[[], object]] = {
    "muon": lambda: Muon(MuonConfig()),
    "normuon": lambda: NorMuon(NorMuonConfig()),
    "shampoo": lambda: Shampoo(ShampooConfig()),
    "soap": lambda: Soap(SoapConfig()),
    "adamw": lambda: AdamW(AdamWConfig()),
    "sgd": lambda: Sgd(SgdConfig()),
}
X = torch.randn(4, 6)


def sharded(stage: int = 3) -> Runtime:
    torch.manual_seed(0)
    return shard(Stack(), layers=(Block,), config=plain_config(zero_stage=stage))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_masters_alone(name: str, dtype: torch.dtype) -> None:
    weight = torch.ones(4, 3).to(dtype)
    with pytest.raises(ValueError, match=r"FP32 masters \(or FP64\)"):
        Item("w", weight, weight.clone(), {}, 0.1, 0.0, (4, 3))
    with pytest.raises(ValueError, match=r"FP32 masters \(or FP64\)"):
        OPTIMIZERS[name]().init_state(weight)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"master_dtype": torch.bfloat16}, "master_dtype=torch.bfloat16"),
        ({"compute_dtype": torch.float16}, "compute_dtype=torch.float16"),
        ({"gather_dtype": torch.float16}, "gather_dtype=torch.float16"),
        ({"reduce_dtype": torch.float16}, "reduce_dtype=torch.float16"),
    ],
    ids=str,
)
def test_dtypes_of_a_runtime(settings: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plain_config(**settings)


def test_autocast_is_refused_with_advice() -> None:
    runtime = sharded()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match=r"--bf16, or RuntimeConfig\(compute_dtype"),
    ):
        runtime.model(X)


def test_second_derivatives_are_refused() -> None:
    loss = sharded().model(X).square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulate_nests(stage: int) -> None:
    runtime = sharded(stage)
    with runtime.accumulate():
        with runtime.accumulate():
            runtime.model(X).sum().backward()
        assert runtime.engine.accumulate_only
        runtime.model(X).sum().backward()
        assert all(group.sharded_empty for group in runtime.groups)
    assert not runtime.engine.accumulate_only
    twice = runtime.step(0.0).gradient_norm
    runtime.model(X).sum().backward()
    assert twice == pytest.approx(2 * runtime.step(0.0).gradient_norm, rel=1e-5)


class Writing(Block):
    """Changes its own weight while it computes, as ``nn.Embedding(max_norm=)`` does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-1, 1)
        return super().forward(x)


def test_a_write_inside_a_forward_is_found() -> None:
    model = Stack()
    model.blocks = nn.ModuleList([Writing()])
    runtime = shard(model, layers=(Writing,), config=plain_config())
    with pytest.raises(ReleasedWeightError, match=r"blocks.0.* changed in place"):
        runtime.model(X, order=(0,))


def test_gathered_weights_are_read_between_the_passes_and_not_written() -> None:
    runtime = sharded(2)
    weight = runtime.model.head.weight
    out = runtime.model(X)
    loss = out.square().sum() + 0.5 * weight.square().sum()  # a loss that wants the weights
    with pytest.raises(ReleasedWeightError, match="load_parameters"):
        weight.data.zero_()
    loss.backward()
    assert runtime.step(0.0).gradient_norm > 0
    with pytest.raises(ReleasedWeightError, match="gathered"):
        weight.square()
    runtime.model(X)
    weight.detach().add_(1)
    with pytest.raises(ReleasedWeightError, match="changed in place"):
        runtime.model(X)
