"""Newton–Schulz against the exact polynomial of the SVD, and its invariants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamuon.optim.coefficients import apply_polynomials
from megamuon.optim.newton_schulz import (
    Counter,
    NewtonSchulzConfig,
    orthogonalize,
    orthogonalize_many,
)

DEFAULT = NewtonSchulzConfig()
SHAPES = ((33, 57), (57, 33), (48, 48), (64, 256), (1, 7), (7, 1), (16, 512))


def gauss(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def with_spectrum(rows: int, cols: int, spectrum: Tensor, seed: int = 0) -> Tensor:
    u, _, vh = torch.linalg.svd(
        gauss(rows, cols, seed=seed, dtype=torch.float64), full_matrices=False
    )
    return u @ torch.diag(spectrum.double()) @ vh


def exact(matrix: Tensor, config: NewtonSchulzConfig) -> Tensor:
    """The polynomial of the singular values, in FP64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (s.norm() * config.named_set.norm_factor)
    return u @ torch.diag(torch.from_numpy(apply_polynomials(s.numpy(), config.polynomials))) @ vh


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize(
    "coefficients",
    [
        "polar_express",
        "polar_express_101",
        "polar_express_102",
        "megatron_polar_express",
        "quintic",
        "jordan",
        "cans",
        "deepseek_v4",
        "cubic5",
    ],
)
def test_fp64_is_the_exact_polynomial(coefficients: str, form: Any) -> None:
    config = NewtonSchulzConfig(coefficients=coefficients, form=form)
    for matrix in (
        gauss(24, 60, dtype=torch.float64),
        gauss(60, 24, dtype=torch.float64),
        with_spectrum(24, 40, torch.logspace(0, -3, 24)),
    ):
        found = orthogonalize(matrix, config)
        assert found.dtype == torch.float64
        assert relative(found, exact(matrix, config)) < 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_forms_agree_with_the_exact_polynomial(shape: tuple[int, int]) -> None:
    matrix = gauss(*shape)
    expected = exact(matrix, DEFAULT)
    for form, tolerance in (("standard", 1e-5), ("gram", 3e-4)):
        config = NewtonSchulzConfig(form=form)
        assert relative(orthogonalize(matrix, config), expected) < tolerance


def test_singular_values_come_near_one() -> None:
    singular = torch.linalg.svdvals(orthogonalize(gauss(40, 200), DEFAULT))
    assert singular.min() > 0.84
    assert singular.max() < 1.13


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(33, 57), (57, 33), (64, 256)])
def test_powers_of_two_change_no_bit(shape: tuple[int, int], form: Any) -> None:
    config = NewtonSchulzConfig(form=form)
    expected = orthogonalize(gauss(*shape), config)
    for exponent in (-100, -60, -1, 1, 60, 120):
        assert torch.equal(orthogonalize(gauss(*shape) * 2.0**exponent, config), expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-15, 1e-8, 1e8, 1e20, 6e37])
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_scale_invariance(scale: float, form: Any) -> None:
    config = NewtonSchulzConfig(form=form)
    matrix = gauss(33, 57)
    expected = orthogonalize(matrix, config)
    found = orthogonalize(matrix * scale, config)
    assert relative(found, expected.double()) < 1e-4


def test_eps_normalisations_lose_small_and_huge_matrices() -> None:
    """What the default avoids; and that these modes are what they are named."""
    for normalization in ("clamp", "add"):
        config = NewtonSchulzConfig(normalization=normalization, coefficients="quintic")
        matrix = gauss(64, 256)
        good = orthogonalize(matrix, config)
        assert relative(good, exact(matrix, config)) < 1e-3
        tiny = matrix / matrix.norm() * 1e-9
        assert orthogonalize(tiny, config).norm() < 0.6 * good.norm()
        assert not orthogonalize(matrix * 1e30, config).any()
    clamp = NewtonSchulzConfig(normalization="clamp", eps=1e-12, coefficients="quintic")
    assert orthogonalize(gauss(64, 256) * 1e-9, clamp).norm() > 0.95 * good.norm()


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("normalization", ["max", "clamp", "add"])
def test_zero_gives_zero(form: Any, dtype: Any, normalization: Any) -> None:
    config = NewtonSchulzConfig(form=form, dtype=dtype, normalization=normalization)
    counter = Counter()
    result = orthogonalize(torch.zeros(6, 14), config, counter=counter)
    assert torch.equal(result, torch.zeros(6, 14))
    assert counter.fallbacks == 0


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("coefficients", ["polar_express", "quintic", "jordan"])
def test_finite_input_gives_finite_output(form: Any, coefficients: str) -> None:
    config = NewtonSchulzConfig(form=form, coefficients=coefficients)
    one_entry = torch.zeros(12, 40)
    one_entry[3, 5] = 3e38
    mixed = gauss(12, 40)
    mixed[0, 0] = 3.4e38
    subnormal = torch.full((12, 40), 1e-45)
    rank_one = torch.outer(gauss(12, seed=1), gauss(40, seed=2))
    for matrix in (one_entry, mixed, subnormal, rank_one, torch.full((12, 40), 3.4e38)):
        for oriented in (matrix, matrix.T.contiguous()):
            result = orthogonalize(oriented, config)
            assert torch.isfinite(result).all()
            assert 0.3 < torch.linalg.matrix_norm(result.double(), 2) < 1.3


def test_non_finite_matrix_is_nan_and_alone() -> None:
    batch = gauss(4, 20, 60)
    clean = orthogonalize(batch, DEFAULT)
    batch[1, 3, 4] = math.nan
    batch[2, 0, 0] = math.inf
    result = orthogonalize(batch, DEFAULT)
    assert torch.isnan(result[1]).all()
    assert torch.isnan(result[2]).all()
    assert torch.equal(result[0], clean[0])
    assert torch.equal(result[3], clean[3])


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(33, 57), (57, 33), (24, 24)])
def test_batched_equals_single_bitwise(shape: tuple[int, int], form: Any) -> None:
    config = NewtonSchulzConfig(form=form)
    batch = gauss(2, 3, *shape)
    single = [orthogonalize(one, config) for one in batch.flatten(0, 1)]
    together = orthogonalize(batch, config).flatten(0, 1)
    many = orthogonalize_many(list(batch.flatten(0, 1)), config)
    for one, two, three in zip(single, together, many, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_list_of_mixed_shapes_keeps_its_order() -> None:
    matrices = [gauss(*shape, seed=index) for index, shape in enumerate(SHAPES * 2)]
    for matrix, result in zip(matrices, orthogonalize_many(matrices, DEFAULT), strict=True):
        assert torch.equal(result, orthogonalize(matrix, DEFAULT))


class Copies(TorchDispatchMode):
    """Records the sizes of the tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_transposed_view_and_no_copy(form: Any) -> None:
    config = NewtonSchulzConfig(form=form)
    matrix = gauss(33, 57)
    assert torch.equal(orthogonalize(matrix.T, config).T, orthogonalize(matrix, config))
    tall = gauss(57, 33)
    with Copies() as copies:
        result = orthogonalize(tall, config)
    assert result.shape == (57, 33)
    assert tall.numel() not in copies.sizes


def test_view_of_a_larger_buffer_is_read_and_left_alone() -> None:
    buffer = gauss(40 * 90 + 7)
    before = buffer.clone()
    view = buffer[5 : 5 + 30 * 90].view(30, 90)
    assert torch.equal(orthogonalize(view, DEFAULT), orthogonalize(view.clone(), DEFAULT))
    assert torch.equal(buffer, before)


def test_counts_matrices_and_forms() -> None:
    counter = Counter()
    matrices = [gauss(64, 256), gauss(256, 64), gauss(20, 20), gauss(20, 60)]
    for _ in range(3):
        orthogonalize_many(matrices, DEFAULT, counter=counter)
    orthogonalize(gauss(2, 5, 64, 256), DEFAULT, counter=counter)
    assert counter.matrices == 3 * 4 + 10
    assert counter.by_kernel == {"gram/fp32": 3 * 2 + 10, "standard/fp32": 3 * 2}
    assert counter.fallbacks == 0


def noisy_rank_one(rows: int, cols: int) -> Tensor:
    """An outer product with 1 % noise: rounding gives its Gram matrix negative eigenvalues."""
    u, v = gauss(rows, seed=1), gauss(cols, seed=2)
    return torch.outer(u / u.norm(), v / v.norm()) + 1e-2 * gauss(rows, cols, seed=3) / math.sqrt(
        rows * cols
    )


def test_restarts_keep_half_precision_gram_tame_on_rank_one() -> None:
    matrix = noisy_rank_one(48, 192)
    counter = Counter()
    config = NewtonSchulzConfig(form="gram", dtype="fp16")
    largest = torch.linalg.matrix_norm(orthogonalize(matrix, config, counter=counter), 2)
    assert counter.by_kernel == {"gram/fp16": 1}
    assert counter.fallbacks == 0
    assert largest < 1.2


def test_gram_form_that_breaks_falls_back_to_the_standard_form() -> None:
    good, bad = gauss(48, 192), noisy_rank_one(48, 192)
    config = NewtonSchulzConfig(form="gram", dtype="fp16", restarts=())
    counter = Counter()
    results = orthogonalize(torch.stack([good, bad]), config, counter=counter)
    assert counter.fallbacks == 1
    assert counter.matrices == 2
    standard = NewtonSchulzConfig(form="standard", dtype="fp16")
    assert torch.equal(results[1], orthogonalize(bad, standard))
    assert torch.isfinite(results).all()
    assert not torch.equal(results[0], orthogonalize(good, standard))


def test_broken_fp64_gram_falls_back_too() -> None:
    """Wild coefficients make q run away in any dtype; the FP64 check must not narrow its input."""
    wild = NewtonSchulzConfig(coefficients=((60.0, -3.0, 1.0),) * 4, form="gram", restarts=(2,))
    counter = Counter()
    result = orthogonalize(gauss(8, 24, dtype=torch.float64), wild, counter=counter)
    assert result.dtype == torch.float64
    assert counter.fallbacks == 1


@pytest.mark.parametrize(
    ("dtype", "form", "tolerance"),
    [
        ("fp16", "gram", 3e-2),
        ("fp16", "standard", 1e-2),
        ("bf16", "gram", 1.5e-1),
        ("bf16", "standard", 1.5e-1),
    ],
)
def test_half_precision_stays_near_the_exact_polynomial(
    dtype: Any, form: Any, tolerance: float
) -> None:
    config = NewtonSchulzConfig(dtype=dtype, form=form)
    for matrix in (gauss(32, 96), with_spectrum(32, 96, torch.logspace(0, -2, 32)).float()):
        result = orthogonalize(matrix, config)
        assert result.dtype == torch.float32
        assert relative(result, exact(matrix, config)) < tolerance


def test_custom_coefficients_repeat_the_last() -> None:
    config = NewtonSchulzConfig(coefficients=((3.4445, -4.7750, 2.0315),), steps=5)
    named = NewtonSchulzConfig(coefficients="jordan")
    assert torch.equal(orthogonalize(gauss(20, 50), config), orthogonalize(gauss(20, 50), named))


def test_symmetric_kernel_changes_only_rounding() -> None:
    matrix = gauss(770, 1600)
    counter = Counter()
    fast = orthogonalize(matrix, DEFAULT, counter=counter)
    plain = orthogonalize(matrix, NewtonSchulzConfig(form="gram", symmetric_kernel=False))
    assert counter.by_kernel == {"gram/fp32/symmetric": 1}
    assert relative(fast, plain.double()) < 1e-3


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"got shape \(7,\).*not flat shards"):
        orthogonalize(torch.zeros(7), DEFAULT)
    with pytest.raises(ValueError, match="int64"):
        orthogonalize(torch.zeros(3, 4, dtype=torch.int64), DEFAULT)
    with pytest.raises(ValueError, match=r"2-D matrices, got shape \(2, 3, 4\)"):
        orthogonalize_many([torch.zeros(2, 3, 4)], DEFAULT)
    assert orthogonalize(torch.zeros(0, 4), DEFAULT).shape == (0, 4)
