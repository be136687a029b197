"""Inverse roots and eigenbases against their definitions, and what happens when eigh fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.optim import eigen
from megamuon.optim.eigen import FactorError


def positive(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(size, 2 * size, dtype=dtype)
    return x @ x.mT


@pytest.mark.parametrize("perturbation", ["after", "before"])
@pytest.mark.parametrize("power", [2, 4])
def test_inverse_root_is_one(perturbation: Any, power: int) -> None:
    matrix = positive(6)
    root = eigen.inverse_root(matrix, 1 / power, 1e-3, perturbation)
    ridged = matrix + 1e-3 * torch.eye(6, dtype=torch.float64)
    product = torch.linalg.matrix_power(root, power) @ ridged
    torch.testing.assert_close(product, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(root, root.mT)


@pytest.mark.parametrize(
    ("perturbation", "values", "raised"),
    [
        ("after", (-0.5, 1.0), (0.25, 1.75)),
        ("after", (0.0, 1.0), (0.25, 1.25)),
        ("after", (2.0, 3.0), (2.25, 3.25)),
        ("before", (-0.5, 1.0), (0.25, 1.75)),
        ("before", (2.0, 3.0), (2.25, 3.25)),
    ],
)
def test_eigenvalues_are_raised(
    perturbation: Any, values: tuple[float, ...], raised: tuple[float, ...]
) -> None:
    matrix = torch.diag(torch.tensor(values, dtype=torch.float64))
    root = eigen.inverse_root(matrix, 0.5, 0.25, perturbation)
    expected = torch.diag(torch.tensor(raised, dtype=torch.float64) ** -0.5)
    torch.testing.assert_close(root, expected)


def test_second_attempt_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = torch.linalg.eigh, []

    def fails_in_fp32(matrix: Tensor) -> Any:
        calls.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return whole(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_fp32)
    matrix = positive(5, torch.float32)
    values, vectors = eigen.eigen(matrix)
    assert calls == [torch.float32, torch.float64]
    assert values.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(vectors @ torch.diag(values) @ vectors.mT, matrix)


@pytest.mark.parametrize("error", [torch.linalg.LinAlgError, torch.OutOfMemoryError])
def test_no_third_attempt(monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError]) -> None:
    calls = []

    def fails(matrix: Tensor) -> Any:
        calls.append(matrix.dtype)
        raise error("no")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(error):
        eigen.eigen(torch.eye(3))
    assert len(calls) == (1 if error is torch.OutOfMemoryError else 2)


def test_iterations_converge_to_the_eigenbasis() -> None:
    spectrum = torch.tensor([1.0, 9.0, 3.0, 27.0], dtype=torch.float64)
    vectors = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    matrix = vectors @ torch.diag(spectrum) @ vectors.mT
    basis = eigen.orthogonal_iteration(matrix, torch.eye(4, dtype=torch.float64), 40, 1e-12)
    expected = vectors[:, spectrum.argsort()]
    torch.testing.assert_close((basis.mT @ expected).abs(), torch.eye(4, dtype=torch.float64))
    basis = torch.eye(4, dtype=torch.float64)
    for _ in range(40):
        basis, _ = eigen.power_iteration(matrix, basis)
    torch.testing.assert_close((basis.mT @ expected.flip(1)).abs(), torch.eye(4).double())


def test_nearest_turns_the_free_columns_only() -> None:
    basis = torch.linalg.qr(torch.randn(5, 5).double())[0]
    turn = torch.linalg.qr(torch.randn(3, 3).double())[0]
    turned = torch.cat([basis[:, :2], basis[:, 2:] @ turn], dim=1)
    weights = torch.tensor([4.0, 1.0, 0.0, 1e-17, -1e-17]).double()
    torch.testing.assert_close(eigen.nearest(turned, weights, basis), basis)
    assert eigen.nearest(turned, weights + 1, basis) is turned
    torch.testing.assert_close(eigen.nearest(turned, weights * 0, basis), basis)


def test_a_good_basis_is_kept_but_for_its_order() -> None:
    matrix = torch.diag(torch.tensor([4.0, 1.0, 2.0]))
    basis = eigen.orthogonal_iteration(matrix, torch.eye(3), 5, 0.0)
    assert torch.equal(basis, torch.eye(3)[:, [1, 2, 0]])


def test_finite() -> None:
    eigen.check_finite("SOAP", "w", "row", torch.zeros(2, 2))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(FactorError, match=r"SOAP item 'w'.*row factor \(2 x 2, torch.float32"):
            eigen.check_finite("SOAP", "w", "row", torch.full((2, 2), bad))
