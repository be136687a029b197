"""SOAP's variants against their formulas written out, hand-checked values, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.optim.eigen import FactorError
from megamuon.optim.optimizer import Item
from megamuon.optim.soap import Soap, SoapConfig

FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "matrix_optimizers.json").read_text()
)
LR, WD, STEPS = 0.02, 0.1, 12


def update(soap: Soap, weight: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
    soap.update([Item("w", weight, gradient, state, LR, WD, tuple(weight.shape))])


def authors(config: SoapConfig, weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """``nikhilvyas``, both sides by one loop; the moment is kept in the plain basis."""
    sides = [size <= config.max_precond_dim for size in weight.shape]
    factors = [torch.zeros(size, size).double() for size in weight.shape]
    bases = [torch.eye(size).double() for size in weight.shape]
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, g in enumerate(gradients):
        if t:
            rotated = bases[0].T @ g @ bases[1]
            m = config.beta1 * m + (1 - config.beta1) * g
            v = config.beta2 * v + (1 - config.beta2) * rotated**2
            adam = (bases[0].T @ m @ bases[1]) / (v**0.5 + config.eps)
            back = bases[0] @ adam @ bases[1].T
            if config.normalize_gradient:
                back = back / (back**2).mean() ** 0.5
            rate = LR
            if config.bias_correction:
                rate *= (1 - config.beta2**t) ** 0.5 / (1 - config.beta1**t)
            weight = weight - rate * back
            weight = weight - LR * WD * weight
        for side in (0, 1):
            outer = g @ g.T if side == 0 else g.T @ g
            factors[side] = factors[side].lerp(outer, 1 - config.factor_beta)
            if not sides[side]:
                continue
            if t == 0:
                bases[side] = torch.linalg.eigh(factors[side])[1].flip(1)
            elif t % config.precondition_frequency == 0:
                q = bases[side]
                order = torch.diag(q.T @ factors[side] @ q).argsort(descending=True)
                v = v.index_select(side, order)
                bases[side] = torch.linalg.qr(factors[side] @ q[:, order])[0]
    return weight


def eigenvalue_corrected(config: SoapConfig, weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """``fb`` with bases by eigh, averages from all past gradients."""
    bases = [torch.eye(size).double() for size in weight.shape]
    v = torch.zeros_like(weight)
    for t, g in enumerate(gradients, 1):
        past = [(1 - config.beta2) * config.beta2 ** (t - k) for k in range(1, t + 1)]
        seen = list(zip(past, gradients[:t], strict=True))
        if t == config.start or (t > config.start and t % config.precondition_frequency == 0):
            factors = [sum(w * x @ x.T for w, x in seen), sum(w * x.T @ x for w, x in seen)]
            bases = [torch.linalg.eigh(f / (1 - config.beta2**t))[1] for f in factors]
        v = config.beta2 * v + (1 - config.beta2) * (bases[0].T @ g @ bases[1]) ** 2
        averages = [
            (1 - config.beta1) * config.beta1 ** (t - k) * gradients[k - 1] for k in range(1, t + 1)
        ]
        m = sum(averages) / (1 - config.beta1**t)
        root = (v / (1 - config.beta2**t)) ** 0.5 + config.eps
        direction = bases[0] @ ((bases[0].T @ m @ bases[1]) / root) @ bases[1].T
        weight = weight - LR * (direction + WD * weight)
    return weight


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5), (1, 7)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias_correction": False},
        {"normalize_gradient": True},
        {"shampoo_beta": 0.8, "beta1": 0.9},
        {"max_precond_dim": 6},
        {"max_precond_dim": 1},
    ],
    ids=str,
)
def test_authors_formula(settings: dict[str, Any], shape: tuple[int, int], frequency: int) -> None:
    config = SoapConfig(precondition_frequency=frequency, **settings)
    soap = Soap(config)
    weight = torch.randn(shape, dtype=torch.float64)
    gradients = [torch.randn(shape, dtype=torch.float64) for _ in range(STEPS)]
    expected, state = authors(config, weight, gradients), soap.init_state(weight)
    for gradient in gradients:
        update(soap, weight, gradient, state)
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("start", [None, 5])
def test_eigenvalue_corrected_formula(frequency: int, start: int | None) -> None:
    config = SoapConfig(
        variant="fb",
        precondition_frequency=frequency,
        start_preconditioning_step=start,
        refresh="eigh",
        beta1=0.9,
        eps=1e-5,  # the first gradient is diagonal in its own basis: zeros, so rounding, over eps
    )
    soap = Soap(config)
    weight = torch.randn(6, 6, dtype=torch.float64)
    gradients = [torch.randn(6, 6, dtype=torch.float64) for _ in range(STEPS)]
    expected, state = eigenvalue_corrected(config, weight, gradients), soap.init_state(weight)
    for gradient in gradients:
        update(soap, weight, gradient, state)
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-9)


def test_qr_refresh_approaches_the_eigenbasis() -> None:
    config = SoapConfig(variant="fb", precondition_frequency=1, qr_iterations=60, qr_tolerance=0.0)
    states = []
    gradient = torch.randn(6, 9).double()
    for refresh in ("qr", "eigh"):
        soap = Soap(SoapConfig(**{**vars(config), "refresh": refresh}))
        weight = torch.zeros(6, 9).double()
        states.append(soap.init_state(weight))
        update(soap, weight, gradient, states[-1])
    overlap = (states[0]["row_basis"].mT @ states[1]["row_basis"]).abs()
    torch.testing.assert_close(overlap, torch.eye(6).double(), rtol=0, atol=1e-2)


@pytest.mark.parametrize("fact", FACTS["soap_diagonal"], ids=lambda fact: fact["why"][:20])
def test_hand_checked_values(fact: dict[str, Any]) -> None:
    soap = Soap(SoapConfig(eps=1e-15))
    weight = torch.zeros(2, 2, dtype=torch.float64)
    state = soap.init_state(weight)
    for value, expected in zip(fact["gradients"], fact["directions"], strict=True):
        before = weight.clone()
        gradient = torch.diag(torch.tensor([value, 2.0 * value], dtype=torch.float64))
        soap.update([Item("w", weight, gradient, state, 1.0, 0.0, (2, 2))])
        wanted = expected * torch.eye(2, dtype=torch.float64)
        torch.testing.assert_close(before - weight, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (4, 17)])
@pytest.mark.parametrize("frequency", [1, 4])
def test_fixed_null_space_forgives_the_last_bit(shape: tuple[int, int], frequency: int) -> None:
    """The free one does not, which is why there is the other."""
    apart: dict[str, float] = {}
    gradients = [torch.randn(shape, dtype=torch.float64) for _ in range(STEPS)]
    noise = [1 + 1e-16 * torch.randn(shape, dtype=torch.float64) for _ in range(STEPS)]
    for null_space in ("free", "fixed"):
        soap = Soap(SoapConfig(precondition_frequency=frequency, null_space=null_space))  # type: ignore[arg-type]
        weights = [torch.zeros(shape, dtype=torch.float64) for _ in range(2)]
        states = [soap.init_state(weight) for weight in weights]
        for gradient, factor in zip(gradients, noise, strict=True):
            update(soap, weights[0], gradient, states[0])
            update(soap, weights[1], gradient * factor, states[1])
        apart[null_space] = float((weights[0] - weights[1]).abs().max())
    assert apart["fixed"] < 1e-11
    assert apart["free"] > 1e-4


def test_fixed_null_space_is_an_eigenbasis() -> None:
    for shape in ((4, 9), (9, 4)):
        soap = Soap(SoapConfig(null_space="fixed"))
        weight = torch.zeros(shape, dtype=torch.float64)
        state = soap.init_state(weight)
        update(soap, weight, torch.randn(shape).double(), state)
        for factor, basis in (("row_factor", "row_basis"), ("col_factor", "col_basis")):
            q = state[basis]
            torch.testing.assert_close(q.mT @ q, torch.eye(len(q)).double())
            rotated = q.mT @ state[factor] @ q
            torch.testing.assert_close(rotated, torch.diag(rotated.diagonal()), rtol=0, atol=1e-12)


def test_first_step_sets_the_bases_and_leaves_the_weight() -> None:
    soap = Soap(SoapConfig())
    weight, gradient = torch.randn(4, 6), torch.randn(4, 6)
    kept, state = weight.clone(), soap.init_state(weight)
    told: list[str] = []
    one = Item("w", weight, gradient, state, LR, WD, (4, 6))
    soap.update([one], lambda done: told.append(done.name))
    assert told == ["w"]
    assert torch.equal(weight, kept)
    factor, basis = state["row_factor"], state["row_basis"]
    torch.testing.assert_close(factor, 0.05 * gradient @ gradient.T)
    spectrum = (basis.T @ factor @ basis).diagonal()
    assert torch.equal(spectrum, spectrum.sort(descending=True)[0])
    assert not state["exp_avg_sq"].any()
    soap.update([one])
    assert not torch.equal(weight, kept)


def test_rotation_of_the_problem_rotates_the_update() -> None:
    """What the eigenbasis is for: SOAP commutes with rotations, which Adam does not."""
    soap = Soap(SoapConfig(precondition_frequency=2))
    turn = torch.linalg.qr(torch.randn(6, 6).double())[0]
    plain, turned = torch.zeros(6, 6).double(), torch.zeros(6, 6).double()
    states = [soap.init_state(plain), soap.init_state(turned)]
    for _ in range(8):
        gradient = torch.randn(6, 6).double()
        update(soap, plain, gradient, states[0])
        update(soap, turned, turn @ gradient, states[1])
    torch.testing.assert_close(turned, turn @ plain, rtol=0, atol=1e-9)


def test_sides_above_the_limit_have_no_state() -> None:
    soap = Soap(SoapConfig(max_precond_dim=5))
    state = soap.init_state(torch.zeros(4, 6))
    assert state["row_factor"].shape == state["row_basis"].shape == (4, 4)
    assert state["col_factor"].shape == state["col_basis"].shape == (0, 0)
    neither = Soap(SoapConfig(max_precond_dim=1, eps=1e-12))
    weight, gradient = torch.zeros(4, 6).double(), torch.randn(4, 6).double()
    its = neither.init_state(weight)
    for _ in range(2):
        update(neither, weight, gradient, its)
    torch.testing.assert_close(weight, -LR * gradient.sign() * (1 - LR * WD))


@pytest.mark.parametrize("variant", ["nikhilvyas", "fb"])
@pytest.mark.parametrize("value", [float("nan"), 1e20])
def test_a_factor_that_is_not_finite_names_its_parameter(variant: Any, value: float) -> None:
    soap = Soap(SoapConfig(variant=variant, precondition_frequency=1))
    weight = torch.randn(4, 6)
    with pytest.raises(FactorError, match=r"SOAP item 'w': its row factor .* NaN or Inf"):
        update(soap, weight, torch.full((4, 6), value), soap.init_state(weight))


def test_eigenvectors_that_fail_name_their_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(matrix: Tensor) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    soap, weight = Soap(SoapConfig()), torch.randn(4, 6)
    with pytest.raises(FactorError, match="'w': no eigenvectors of its row factor"):
        update(soap, weight, weight, soap.init_state(weight))


def test_configurations() -> None:
    bad: tuple[dict[str, Any], ...] = (
        {"variant": "eo"},
        {"beta1": 1.0},
        {"beta2": 1.0},
        {"shampoo_beta": -1.0},
        {"eps": 0.0},
        {"precondition_frequency": 0},
        {"max_precond_dim": 0},
        {"qr_iterations": 0},
        {"qr_tolerance": 1.0},
        {"refresh": "eigh"},
        {"start_preconditioning_step": 20},
        {"normalize_gradient": True, "variant": "fb"},
        {"null_space": "fixed", "variant": "fb"},
        {"null_space": "mine"},
        {"start_preconditioning_step": 5, "variant": "fb"},
    )
    for settings in bad:
        with pytest.raises(ValueError, match=f"SoapConfig.{next(iter(settings))} = "):
            SoapConfig(**settings)
    names = [Soap(SoapConfig(variant=v)).whole_names[0] for v in ("nikhilvyas", "fb")]
    assert names == ["exp_avg_rotated", "exp_avg"]  # not the same thing, so no silent exchange
