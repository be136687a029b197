"""The blocked symmetric product against the full one."""

from __future__ import annotations

import pytest
import torch

from megamuon.kernels.symmetric import pays, symmetric_product, time_fraction


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 37, 130])
@pytest.mark.parametrize("inner", [1, 29, 64])
def test_gram_matrix(size: int, inner: int) -> None:
    x = torch.randn(size, inner, dtype=torch.float64)
    result = symmetric_product(x, x.mT)
    torch.testing.assert_close(result, x @ x.mT, rtol=1e-12, atol=1e-12)
    assert torch.equal(result, result.mT)


@pytest.mark.parametrize("size", [1, 6, 37, 130, 900])
def test_polynomial_of_a_symmetric_matrix(size: int) -> None:
    x = torch.randn(size, size + 3)
    a = x @ x.mT / size
    result = symmetric_product(a, a, a, beta=-1.5, alpha=0.7)
    torch.testing.assert_close(result, -1.5 * a + 0.7 * a @ a, rtol=1e-4, atol=1e-4)
    assert torch.equal(result, result.mT)
    torch.testing.assert_close(symmetric_product(a, a, alpha=0.5), 0.5 * a @ a)


def test_transposed_operand_and_no_nan_from_fresh_memory() -> None:
    for _ in range(3):
        x = torch.randn(70, 33).mT
        assert torch.isfinite(symmetric_product(x, x.mT)).all()
        torch.testing.assert_close(symmetric_product(x, x.mT), x @ x.mT)


def test_refuses_what_is_not_square() -> None:
    with pytest.raises(ValueError, match="not square"):
        symmetric_product(torch.zeros(3, 4), torch.zeros(4, 5))


def test_pays_only_for_large_wide_matrices_on_cpus() -> None:
    for dtype in (torch.float32, torch.float64):
        assert pays(1536, "cpu", dtype)
        assert not pays(352, "cpu", dtype)
        assert not pays(1536, "cuda", dtype)
    for dtype in (torch.bfloat16, torch.float16):
        assert not pays(1536, "cpu", dtype)
        assert time_fraction(1536, "cpu", dtype) == 1.0
    assert time_fraction(352, "cpu", torch.float32) == 1.0
    assert 0.625 <= time_fraction(1536, "cpu", torch.float32) < 0.9
