"""The runtime on one rank without a process group: memory, state and awkward gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamuon.matrices import Route, RoutingError
from megamuon.runtime import OptimizerSettings, Runtime, shard
from tests.support.runtime_config import plain_config
from tests.support.scenarios import Block, Stack


def make(**settings: object) -> Runtime:
    torch.manual_seed(3)
    config = plain_config(unit_threshold=50, **settings)  # type: ignore[arg-type]
    return shard(Stack(), layers=(Block,), config=config)


def inputs() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def test_only_masters_windows_and_state_are_resident_after_sharding() -> None:
    held = make().memory()
    assert held["gathered_weights"] == held["unsharded_gradients"] == 0
    assert held["masters"] == held["sharded_gradients"] > 0


def test_a_finite_gradient_whose_square_overflows_is_clipped_not_skipped() -> None:
    runtime = make(optimizer=OptimizerSettings(clip=1.0))
    before = {n: t.clone() for n, t in runtime.full_parameters()}
    (runtime.model(inputs()).sum() * 1e25).backward()
    result = runtime.step(0.1)
    assert not result.skipped and result.nonfinite == ()
    assert 1e24 < result.gradient_norm < 1e28
    for name, after in runtime.full_parameters():
        assert bool(after.isfinite().all()) and not torch.equal(after, before[name])


def test_an_infinite_gradient_is_still_named() -> None:
    runtime = make()
    out = runtime.model(inputs())
    (out * torch.tensor(float("inf"))).sum().backward()
    result = runtime.step(0.1)
    assert result.skipped and "head.weight" in result.nonfinite


def test_reading_parameters_leaves_the_grad_mode_of_the_reader_alone() -> None:
    runtime = make()
    for _, whole in runtime.full_parameters():
        assert torch.is_grad_enabled() and not whole.requires_grad
    next(runtime.full_parameters())
    assert torch.is_grad_enabled()


def test_a_layer_called_without_the_root_sees_the_newest_weights() -> None:
    runtime = make(zero_stage=2)
    block, x = runtime.model.blocks[0], inputs()
    runtime.model(x).sum().backward()
    old = block(x)  # at ZeRO-2 its weights stay for a backward that never comes
    runtime.step(0.5)
    new = block(x)
    whole = dict(runtime.full_parameters())
    plain = Block()
    plain.load_state_dict({n: whole[f"blocks.0.{n}"] for n, _ in plain.named_parameters()})
    assert not torch.equal(old, new)
    torch.testing.assert_close(new, plain(x))


def test_muon_on_slices_is_refused() -> None:
    config = plain_config(owner_layout=False, optimizer=OptimizerSettings(matrices="adam"))

    def route(name: str, *_: object) -> Route | None:
        return Route.MATRIX if name == "blocks.0.up.weight" else None

    with pytest.raises(RoutingError, match=r"blocks\.0\.up\.weight.*whole matrices"):
        shard(Stack(), layers=(Block,), config=config, route=route)
