"""Shampoo against its formula written out, hand-checked values, and its errors."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.optim.eigen import FactorError
from megamuon.optim.optimizer import Item
from megamuon.optim.shampoo import GraftingConfig, Shampoo, ShampooConfig

FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "matrix_optimizers.json").read_text()
)
LR, WD, STEPS = 0.02, 0.1, 12


def update(shampoo: Shampoo, weight: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
    shampoo.update([Item("w", weight, gradient, state, LR, WD, tuple(weight.shape))])


def power(matrix: Tensor, exponent: float, eps: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    values = values - min(float(values.min()), 0.0) + eps
    return vectors @ torch.diag(values**exponent) @ vectors.T


def textbook(config: ShampooConfig, weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """One block, written from the formula, sums and averages from all past gradients."""
    rows, cols = weight.shape
    b1, b2 = config.beta1, config.beta2
    b3 = b1 if config.beta3 is None else config.beta3
    left, right = torch.eye(rows).double(), torch.eye(cols).double()
    seen: list[Tensor] = []
    for t, raw in enumerate(gradients, 1):
        seen.append(raw + WD * weight if config.decay == "l2" else raw)
        weights = [1.0 if b2 == 1.0 else (1 - b2) * b2 ** (t - k) for k in range(1, t + 1)]
        due = t >= config.start and (t == config.start or t % config.precondition_frequency == 0)
        if due:
            correction = 1.0 if b2 == 1.0 or not config.bias_correction else 1 - b2**t
            total_left = sum(w * g @ g.T for w, g in zip(weights, seen, strict=True)) / correction
            total_right = sum(w * g.T @ g for w, g in zip(weights, seen, strict=True)) / correction
            left = power(total_left, -config.inverse_exponent, config.eps)
            right = power(total_right, -config.inverse_exponent, config.eps)
        filtered = seen[-1]
        if b1:
            past = sum((1 - b1) * b1 ** (t - 1 - k) * seen[k - 1] for k in range(1, t))
            filtered = b3 * past + (1 - b3) * seen[-1]
            if config.bias_correction:
                filtered = filtered / (1 - b3 * b1 ** (t - 1))
        direction = left @ filtered @ right
        rule, gb, eps = config.grafting.rule, config.grafting.beta2, config.grafting.eps
        if rule != "none":
            scale = {"adagrad": 1.0}.get(rule, 1 - gb)
            decay = {"adagrad": 1.0}.get(rule, gb)
            squares = sum(scale * decay ** (t - k) * seen[k - 1] ** 2 for k in range(1, t + 1))
            if rule == "adam":
                squares = squares / (1 - gb**t)
            graft = filtered if rule == "sgd" else filtered / (squares**0.5 + eps)
            quotient = graft.norm() / direction.norm()
            direction = graft if t < config.start else direction * quotient
        alpha = {
            "decoupled": WD,
            "l2": 0.0,
            "corrected": WD * LR / (config.peak_lr or 1.0),
            "independent": WD / (config.peak_lr or 1.0),
        }[config.decay]
        weight = weight - LR * (direction + alpha * weight)
    return weight


CONFIGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "every third step": {"precondition_frequency": 3},
    "averages": {"beta1": 0.8, "beta2": 0.9},
    "averages, every third step": {"beta2": 0.9, "precondition_frequency": 3},
    "late start": {"precondition_frequency": 3, "start_preconditioning_step": 5},
    "no bias correction": {"beta2": 0.9, "bias_correction": False},
    "no momentum": {"beta1": 0.0},
    "beta3": {"beta3": 0.5, "beta2": 0.95},
    "exponent": {"inverse_exponent": 0.5},
    "l2": {"decay": "l2"},
    "corrected": {"decay": "corrected", "peak_lr": 0.05},
    "independent": {"decay": "independent", "peak_lr": 0.05},
    **{
        f"grafting {rule}": {
            "grafting": GraftingConfig(rule=rule),  # type: ignore[arg-type]
            "beta2": 0.9,
            "precondition_frequency": 3,
        }
        for rule in ("sgd", "adagrad", "rmsprop", "adam")
    },
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5), (1, 7)])
def test_formula(settings: dict[str, Any], shape: tuple[int, int]) -> None:
    config = ShampooConfig(**{"eps": 1e-6, **settings})
    shampoo = Shampoo(config)
    weight = torch.randn(shape, dtype=torch.float64)
    gradients = [torch.randn(shape, dtype=torch.float64) for _ in range(STEPS)]
    state, expected = shampoo.init_state(weight), textbook(config, weight, gradients)
    for gradient in gradients:
        update(shampoo, weight, gradient, state)
    torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-9)
    assert float(state["whole_step"]) == STEPS


def test_blocks_are_matrices_of_their_own() -> None:
    config = ShampooConfig(beta2=0.9, max_preconditioner_dim=4, grafting=GraftingConfig(rule="sgd"))
    shampoo = Shampoo(config)
    weight = torch.randn(6, 11, dtype=torch.float64)
    bounds = [(0, 4, 6), (0, 4, 8, 11)]
    cuts = [
        (slice(*rows), slice(*cols)) for rows in pairwise(bounds[0]) for cols in pairwise(bounds[1])
    ]
    alone = [weight[cut].clone() for cut in cuts]
    state = shampoo.init_state(weight)
    states = [shampoo.init_state(block) for block in alone]
    for _ in range(5):
        gradient = torch.randn(6, 11, dtype=torch.float64)
        update(shampoo, weight, gradient, state)
        for cut, block, its in zip(cuts, alone, states, strict=True):
            update(shampoo, block, gradient[cut], its)
    for cut, block in zip(cuts, alone, strict=True):
        torch.testing.assert_close(weight[cut], block, rtol=1e-12, atol=1e-12)
    assert state["row_factor"].shape == (6, 12)
    assert state["col_factor"].shape == (11, 8)


@pytest.mark.parametrize("fact", FACTS["shampoo_diagonal"], ids=lambda fact: fact["why"][:20])
def test_hand_checked_values(fact: dict[str, Any]) -> None:
    config = ShampooConfig(beta1=fact["beta1"], beta2=fact["beta2"])
    shampoo = Shampoo(config)
    weight = torch.zeros(2, 2, dtype=torch.float64)
    state = shampoo.init_state(weight)
    for value, expected in zip(fact["gradients"], fact["directions"], strict=True):
        before = weight.clone()
        gradient = torch.diag(torch.tensor([value, 2.0 * value], dtype=torch.float64))
        shampoo.update([Item("w", weight, gradient, state, 1.0, 0.0, (2, 2))])
        wanted = expected * torch.eye(2, dtype=torch.float64)  # scale-free, so twice is the same
        torch.testing.assert_close(before - weight, wanted, rtol=1e-9, atol=1e-9)


def test_first_step_is_the_polar_factor() -> None:
    shampoo = Shampoo(ShampooConfig(beta1=0.0))
    weight, gradient = torch.zeros(5, 5).double(), torch.randn(5, 5).double()
    shampoo.update([Item("w", weight, gradient, shampoo.init_state(weight), 1.0, 0.0, (5, 5))])
    left, _, right = torch.linalg.svd(gradient)
    torch.testing.assert_close(weight, -left @ right, rtol=0, atol=1e-8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
def test_a_factor_that_is_not_finite_names_its_parameter(value: float) -> None:
    shampoo = Shampoo(ShampooConfig())
    weight = torch.randn(4, 6)
    kept = weight.clone()
    with pytest.raises(FactorError, match=r"Shampoo item 'w': its row factor .* NaN or Inf"):
        update(shampoo, weight, torch.full((4, 6), value), shampoo.init_state(weight))
    assert torch.equal(weight, kept)


def test_failed_inversions_keep_the_former_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    shampoo = Shampoo(ShampooConfig(tolerated_failures=2))
    weight = torch.randn(4, 6, dtype=torch.float64)
    state = shampoo.init_state(weight)
    update(shampoo, weight, torch.randn(4, 6).double(), state)
    roots = {name: state[name].clone() for name in ("row_inverse_root", "col_inverse_root")}

    def fails(matrix: Tensor) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    for rounds in range(2):  # the second round shows that success resets the count
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", fails)
            for count in (1, 2):
                with pytest.warns(UserWarning, match=f"'w': step .* converge.*for the {count}"):
                    update(shampoo, weight, torch.randn(4, 6).double(), state)
                assert float(state["failed_inversions"]) == count
            if rounds == 0:
                assert all(torch.equal(state[name], root) for name, root in roots.items())
            else:
                with pytest.raises(FactorError, match="'w'.*tolerated_failures = 2"):
                    update(shampoo, weight, torch.randn(4, 6).double(), state)
        if rounds == 0:
            update(shampoo, weight, torch.randn(4, 6).double(), state)
            assert float(state["failed_inversions"]) == 0
            assert not any(torch.equal(state[name], root) for name, root in roots.items())


def test_configurations() -> None:
    for bad in (
        {"beta1": 1.0},
        {"beta2": 0.0},
        {"beta3": -0.1},
        {"eps": 0.0},
        {"inverse_exponent": 0.0},
        {"perturbation": "never"},
        {"precondition_frequency": 0},
        {"start_preconditioning_step": 2, "precondition_frequency": 3},
        {"max_preconditioner_dim": 0},
        {"tolerated_failures": -1},
        {"decay": "none"},
        {"peak_lr": None, "decay": "corrected"},
    ):
        with pytest.raises(ValueError, match=f"ShampooConfig.{next(iter(bad))} = "):
            ShampooConfig(**bad)  # type: ignore[arg-type]
    for bad in ({"rule": "muon"}, {"beta2": 1.0}, {"eps": 0.0}):
        with pytest.raises(ValueError, match=f"GraftingConfig.{next(iter(bad))} = "):
            GraftingConfig(**bad)
    lean = Shampoo(ShampooConfig(beta1=0.0))
    assert "exp_avg" not in lean.state_names
    assert "graft_square" not in lean.state_names
