"""NorMuon against its formula, its norm against Muon's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.optim.muon import Muon, MuonConfig
from megamuon.optim.newton_schulz import Counter, orthogonalize
from megamuon.optim.normuon import NorMuon, NorMuonConfig
from megamuon.optim.optimizer import Item, Whole


def textbook(
    config: NorMuonConfig, weight: Tensor, gradients: list[Tensor], lr: float, wd: float
) -> Tensor:
    """The formula, one entry of v per neuron."""
    rows, cols = weight.shape
    by_row = config.neurons == "rows" or rows >= cols
    momentum = torch.zeros_like(weight)
    v = [0.0] * (rows if by_row else cols)
    for gradient in gradients:
        momentum = 0.95 * momentum + gradient
        o = orthogonalize(gradient + 0.95 * momentum, config.muon.newton_schulz)
        new = o.clone()
        for index in range(len(v)):
            neuron = o[index] if by_row else o[:, index]
            v[index] = config.beta2 * v[index] + (1 - config.beta2) * float((neuron**2).mean())
            if config.eps_form == "add_to_root":
                scale = 1 / (v[index] ** 0.5 + config.eps)
            else:
                scale = max(v[index], config.eps) ** -0.5
            (new[index] if by_row else new[:, index]).mul_(scale)
        new *= o.norm() / new.norm()
        weight = weight * (1 - lr * wd) - lr * 0.2 * max(rows, cols) ** 0.5 * new
    return weight


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (5, 5), (33, 57)])
@pytest.mark.parametrize("neurons", ["rows", "longer_dim"])
@pytest.mark.parametrize("eps_form", ["add_to_root", "clamp_square"])
def test_formula(shape: tuple[int, int], neurons: Any, eps_form: Any) -> None:
    config = NorMuonConfig(neurons=neurons, eps_form=eps_form, beta2=0.9)
    normuon = NorMuon(config)
    weight = torch.randn(shape, dtype=torch.float64)
    gradients = [torch.randn(shape, dtype=torch.float64) for _ in range(10)]
    expected = textbook(config, weight, gradients, 0.02, 0.1)
    state = normuon.init_state(weight)
    for gradient in gradients:
        normuon.update([Item("w", weight, gradient, state, 0.02, 0.1, shape)])
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-9)
    by_row = neurons == "rows" or shape[0] >= shape[1]
    assert state["neuron_square"].shape == ((shape[0], 1) if by_row else (1, shape[1]))


def test_norm_is_that_of_muon_and_rows_become_even() -> None:
    normuon, muon = NorMuon(NorMuonConfig()), Muon(MuonConfig())
    state = normuon.init_whole((30, 20), torch.float64, torch.device("cpu"))
    uneven = torch.linspace(0.01, 10, 30, dtype=torch.float64)[:, None]
    for _ in range(3):
        matrix = torch.randn(30, 20, dtype=torch.float64) * uneven
        (ours,) = normuon.directions([Whole("w", matrix, state)])
        (plain,) = muon.directions([Whole("w", matrix, {})])
        assert float(ours.norm()) == pytest.approx(float(plain.norm()), rel=1e-9)
        spreads = [float(x.norm(dim=1).std()) for x in (ours, plain)]
        assert spreads[0] < 0.7 * spreads[1]


def test_first_step_makes_all_rows_equally_long() -> None:
    normuon = NorMuon(NorMuonConfig())
    state = normuon.init_whole((8, 20), torch.float64, torch.device("cpu"))
    (direction,) = normuon.directions([Whole("w", torch.randn(8, 20).double(), state)])
    lengths = direction.norm(dim=1)
    torch.testing.assert_close(lengths, lengths.mean().expand(8))


def test_zero_rows_stay_zero() -> None:
    normuon = NorMuon(NorMuonConfig())
    state = normuon.init_whole((6, 9), torch.float32, torch.device("cpu"))
    matrix = torch.randn(6, 9)
    matrix[2] = 0
    (direction,) = normuon.directions([Whole("w", matrix, state)])
    assert not direction[2].any()
    assert torch.isfinite(direction).all()


def test_counter_and_configurations() -> None:
    counter = Counter()
    normuon = NorMuon(NorMuonConfig(), counter=counter)
    weight = torch.randn(6, 9)
    normuon.update([Item("w", weight, weight, normuon.init_state(weight), 0.1, 0.0, (6, 9))])
    assert counter.matrices == normuon.counter.matrices == 1
    for bad in ({"beta2": 1.0}, {"eps": 0.0}, {"neurons": "cols"}, {"eps_form": "add"}):
        with pytest.raises(ValueError, match=f"NorMuonConfig.{next(iter(bad))}"):
            NorMuonConfig(**bad)
