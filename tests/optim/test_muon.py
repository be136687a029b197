"""Muon against torch.optim.Muon (bit for bit) and against its formula written out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamuon.optim.muon import Muon, MuonConfig, update_scale
from megamuon.optim.newton_schulz import Counter, NewtonSchulzConfig, orthogonalize
from megamuon.optim.optimizer import Item, OwnerOptimizer

FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "newton_schulz.json").read_text()
)


def item(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 0.02,
    wd: float = 0.1,
    logical_shape: tuple[int, ...] | None = None,
) -> Item:
    shape = tuple(parameter.shape) if logical_shape is None else logical_shape
    return Item("weight", parameter, gradient, state, lr, wd, shape)


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (33, 57), (57, 33), (5, 5), (64, 40)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_torch_preset_is_torch_muon_bit_for_bit(
    shape: tuple[int, int], nesterov: bool, adjust: Any
) -> None:
    theirs = nn.Parameter(torch.randn(shape))
    ours = theirs.detach().clone()
    optimizer = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust
    )
    muon = Muon(MuonConfig.torch_preset(nesterov=nesterov, adjust_lr_fn=adjust))
    state = muon.init_state(ours)
    for step in range(5):
        gradient = torch.randn(shape) * 10.0 ** (step - 3)
        theirs.grad = gradient.clone()
        optimizer.step()
        muon.update([item(ours, gradient, state)])
        assert torch.equal(ours, theirs)
        assert torch.equal(state["momentum_buffer"], optimizer.state[theirs]["momentum_buffer"])


def test_torch_preset_with_other_arguments() -> None:
    settings: dict[str, Any] = {
        "momentum": 0.8,
        "ns_coefficients": (2.0, -1.5, 0.5),
        "eps": 1e-3,
        "ns_steps": 7,
    }
    theirs = nn.Parameter(torch.randn(12, 20))
    ours = theirs.detach().clone()
    optimizer = torch.optim.Muon([theirs], lr=1e-3, weight_decay=0.0, **settings)
    muon = Muon(MuonConfig.torch_preset(**settings))
    state = muon.init_state(ours)
    for scale in (1.0, 1e-4, 1e-6, 1.0):
        gradient = torch.randn(12, 20) * scale
        theirs.grad = gradient.clone()
        optimizer.step()
        muon.update([item(ours, gradient, state, lr=1e-3, wd=0.0)])
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum_form", ["sgd", "ema"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay_order", ["before_update", "after_update"])
def test_formula(dtype: torch.dtype, momentum_form: Any, nesterov: bool, decay_order: Any) -> None:
    config = MuonConfig(momentum_form=momentum_form, nesterov=nesterov, decay_order=decay_order)
    muon = Muon(config)
    weight = torch.randn(20, 50, dtype=dtype)
    expected, buffer, mu = weight.clone(), torch.zeros_like(weight), 0.95
    state = muon.init_state(weight)
    for _ in range(3):
        gradient = torch.randn(20, 50, dtype=dtype)
        if momentum_form == "sgd":
            buffer = mu * buffer + gradient
            direction = gradient + mu * buffer if nesterov else buffer
        else:
            buffer = mu * buffer + (1 - mu) * gradient
            direction = (1 - mu) * gradient + mu * buffer if nesterov else buffer
        update = 0.02 * 0.2 * math.sqrt(50) * orthogonalize(direction, config.newton_schulz)
        decay = 1 - 0.02 * 0.1
        before = decay_order == "before_update"
        expected = expected * decay - update if before else (expected - update) * decay
        muon.update([item(weight, gradient, state)])
    tight = dtype == torch.float64
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12 if tight else 1e-5)
    torch.testing.assert_close(state["momentum_buffer"], buffer)
    assert weight.dtype == state["momentum_buffer"].dtype == dtype


def test_momentum_forms_agree_up_to_their_factor() -> None:
    weights = [torch.randn(16, 40, dtype=torch.float64)]
    weights.append(weights[0].clone())
    muons = [Muon(MuonConfig(momentum_form=form)) for form in ("sgd", "ema")]
    states = [muon.init_state(weight) for muon, weight in zip(muons, weights, strict=True)]
    for _ in range(4):
        gradient = torch.randn(16, 40, dtype=torch.float64)
        for muon, weight, state in zip(muons, weights, states, strict=True):
            muon.update([item(weight, gradient, state)])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-12)
    ratio = states[1]["momentum_buffer"] / states[0]["momentum_buffer"]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.05))


@pytest.mark.parametrize("fact", FACTS["update_scale"])
def test_update_scales(fact: dict[str, Any]) -> None:
    rows, cols = fact["shape"]
    for scale in ("original", "match_rms_adamw", "unit_rms_norm"):
        assert update_scale(scale, rows, cols) == pytest.approx(fact[scale], abs=6e-3)
    assert update_scale("shape_scaling", rows, cols) == update_scale("original", rows, cols)
    spectral = update_scale("spectral", rows, cols)
    assert 0.2 * spectral == update_scale("match_rms_adamw", rows, cols)


def test_spectral_with_extra_scale_is_the_default() -> None:
    default, megatron = MuonConfig(), MuonConfig(scale="spectral", extra_scale=0.2)
    weights = [torch.zeros(12, 30, dtype=torch.float64) for _ in range(2)]
    gradient = torch.randn(12, 30, dtype=torch.float64)
    for config, weight in zip((default, megatron), weights, strict=True):
        muon = Muon(config)
        muon.update([item(weight, gradient, muon.init_state(weight))])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-14, atol=0)


def test_update_has_the_rms_of_adamw() -> None:
    weight = torch.zeros(64, 96)
    muon = Muon(MuonConfig())
    muon.update([item(weight, torch.randn(64, 96), muon.init_state(weight), lr=1.0)])
    assert float(weight.square().mean().sqrt()) == pytest.approx(0.2, rel=0.1)


def test_scale_comes_from_the_logical_shape() -> None:
    """A matrix held as something wider (say, padded) must not be scaled as something wider."""
    gradient = torch.randn(10, 24)
    padded = torch.zeros(10, 40)
    padded[:, :24] = gradient
    plain, wide = torch.zeros(10, 24), torch.zeros(10, 40)
    muon = Muon(MuonConfig())
    muon.update([item(plain, gradient, muon.init_state(plain))])
    muon.update([item(wide, padded, muon.init_state(wide), logical_shape=(10, 24))])
    torch.testing.assert_close(wide[:, :24], plain, rtol=0, atol=1e-5)
    assert not wide[:, 24:].any()


def test_views_of_buffers_are_updated_in_place_and_nothing_else() -> None:
    parameters, gradients = torch.randn(1000), torch.randn(1000)
    before = parameters.clone()
    weight, gradient = parameters[7:607].view(20, 30), gradients[7:607].view(20, 30)
    alone = weight.clone()
    muon = Muon(MuonConfig())
    muon.update([item(weight, gradient, muon.init_state(weight))])
    muon.update([item(alone, gradient.clone(), muon.init_state(alone))])
    assert torch.equal(weight, alone)
    assert torch.equal(parameters[:7], before[:7])
    assert torch.equal(parameters[607:], before[607:])
    assert not torch.equal(parameters[7:607], before[7:607])


def test_every_matrix_is_orthogonalised_once_per_step() -> None:
    shapes = [(64, 256), (64, 256), (256, 64), (16, 16), (48, 192)]
    counter = Counter()
    muon = Muon(MuonConfig(), counter=counter)
    weights = [torch.randn(shape) for shape in shapes]
    states = [muon.init_state(weight) for weight in weights]
    for _ in range(4):
        muon.update(
            [item(w, torch.randn(w.shape), s) for w, s in zip(weights, states, strict=True)]
        )
    assert counter.matrices == len(shapes) * 4
    assert counter.by_kernel == {"gram/fp32": 16, "standard/fp32": 4}


def test_items_are_independent_of_their_company() -> None:
    weights = [torch.randn(20, 60) for _ in range(3)]
    gradients = [torch.randn(20, 60) for _ in range(3)]
    alone = [weight.clone() for weight in weights]
    muon = Muon(MuonConfig())
    muon.update([item(w, g, muon.init_state(w)) for w, g in zip(weights, gradients, strict=True)])
    for weight, gradient in zip(alone, gradients, strict=True):
        muon.update([item(weight, gradient, muon.init_state(weight))])
    for one, two in zip(weights, alone, strict=True):
        assert torch.equal(one, two)


def test_zero_gradient_only_decays() -> None:
    weight = torch.randn(12, 20)
    expected = weight * (1 - 0.02 * 0.1)
    muon = Muon(MuonConfig())
    muon.update([item(weight, torch.zeros(12, 20), muon.init_state(weight))])
    assert torch.equal(weight, expected)


def test_bad_items_and_configurations() -> None:
    muon = Muon(MuonConfig())
    flat = torch.zeros(12)
    with pytest.raises(ValueError, match=r"'weight'.*\(12,\).*not a shard"):
        muon.update([item(flat, flat, muon.init_state(flat))])
    weight = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="momentum_buffer.*missing"):
        muon.update([item(weight, weight, {})])
    with pytest.raises(ValueError, match=r"logical shape \(12,\)"):
        muon.update([item(weight, weight, muon.init_state(weight), logical_shape=(12,))])
    with pytest.raises(ValueError, match="float64.*both must be the same"):
        item(weight, weight.double(), {})
    for bad in ({"momentum": 1.0}, {"scale": "spectral_norm"}, {"extra_scale": 0.0}):
        with pytest.raises(ValueError, match=f"MuonConfig.{next(iter(bad))}"):
            MuonConfig(**bad)
    with pytest.raises(ValueError, match="choose one of match_rms_adamw"):
        update_scale("spectral_norm", 3, 4)  # type: ignore[arg-type]


def test_protocol() -> None:
    muon = Muon(MuonConfig(newton_schulz=NewtonSchulzConfig(coefficients="quintic")))
    assert isinstance(muon, OwnerOptimizer)
    assert muon.state_names == tuple(muon.init_state(torch.zeros(2, 3)))
