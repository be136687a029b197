"""Newton–Schulz orthogonalisation of whole matrices.

Owns ``orthogonalize`` (one matrix or a batch) and ``orthogonalize_many`` (a list, grouped by
shape), in the standard form and in the Gram form. Invariants: with the default normalisation the
result does not depend on the scale of the input; zero gives zero; finite input gives finite output;
a matrix's result does not depend on what it is batched with (bit for bit on CPUs); tall matrices
are iterated on their transposed view, never on a copy. A matrix that holds a NaN or an infinity
gives NaN in all of itself and in no other, without an exception: finding that out, and skipping the
step, is the caller's part. Tested by ``tests/optim/test_newton_schulz.py``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from megamuon.kernels import symmetric
from megamuon.optim.coefficients import Triple
from megamuon.optim.ns_plan import Counter, NewtonSchulzConfig, NewtonSchulzPlan

__all__ = [
    "Counter",
    "NewtonSchulzConfig",
    "NewtonSchulzPlan",
    "orthogonalize",
    "orthogonalize_many",
]

# Per stacked batch: 512 MiB of FP32, far more than it takes to fill a device.
_BATCH_ELEMENTS = 1 << 27
# No listed polynomial exceeds 2, so singular values of 4 in the mean are a broken iteration.
_RUNAWAY = 4.0


def _matrix_norm(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=dtype)


def _wide_norm(x: Tensor) -> Tensor:
    """The norm of each matrix in FP32 at least: the squares of half precision overflow early."""
    return _matrix_norm(x, torch.promote_types(x.dtype, torch.float32))


def _normalized(x: Tensor, config: NewtonSchulzConfig, dtype: torch.dtype) -> Tensor:
    """``x`` over its Frobenius norm (times the set's factor), in ``dtype``; zero stays zero."""
    chosen = config.named_set
    if not config.norm_in_iteration_dtype:
        x = x.to(torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32)
        if config.normalization == "max":
            # The squares of 1e-30 underflow and those of 1e20 overflow, so bring the largest entry
            # to 1 first.
            largest = x.abs().amax(dim=(-2, -1), keepdim=True)
            largest = torch.where(largest == 0, 1.0, largest)
            x = x / torch.where(torch.isfinite(largest), largest, math.nan)
            norm = _matrix_norm(x) * chosen.norm_factor
            return x.div_(torch.where(norm == 0, 1.0, norm)).to(dtype)
    else:
        x = x.to(dtype)
    eps = chosen.eps if config.eps is None else config.eps
    norm = _matrix_norm(x)
    if chosen.norm_factor != 1.0:
        norm = norm * chosen.norm_factor
    return (x / (norm.clamp(min=eps) if config.normalization == "clamp" else norm + eps)).to(dtype)


def _add(addend: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """beta addend + alpha left right, accumulated and added up in FP32 where the operands are
    shorter.
    """
    fused = torch.addmm if addend.ndim == 2 else torch.baddbmm
    return fused(addend, left, right, beta=beta, alpha=alpha)


class _Products:
    """The symmetric products of one iteration, by the plan's kernel."""

    def __init__(self, plan: NewtonSchulzPlan) -> None:
        self.symmetric = plan.symmetric

    def gram(self, x: Tensor) -> Tensor:
        """X X^T."""
        if self.symmetric and x.ndim == 2:
            return symmetric.symmetric_product(x, x.mT)
        return x @ x.mT

    def add(
        self, addend: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0
    ) -> Tensor:
        """beta addend + alpha left right for polynomials of one symmetric matrix."""
        if self.symmetric and addend.ndim == 2:
            return symmetric.symmetric_product(left, right, addend, beta=beta, alpha=alpha)
        return _add(addend, left, right, beta, alpha)

    def inner(self, gram: Tensor, b: float, c: float) -> Tensor:
        """b R + c R^2."""
        return self.add(gram, gram, gram, b, c) if c else gram * b


def _standard(x: Tensor, polynomials: Sequence[Triple], products: _Products) -> Tensor:
    """X <- a X + (b R + c R^2) X with R = X X^T, for each (a, b, c)."""
    for a, b, c in polynomials:
        gram = products.gram(x)
        # A cubic takes b as the factor of its product, as Megatron's does: b R is not rounded.
        x = _add(x, products.inner(gram, b, c), x, a) if c else _add(x, gram, x, a, b)
    return x


def _gram(
    x: Tensor, polynomials: Sequence[Triple], restarts: Sequence[int], products: _Products
) -> Tensor:
    """The same polynomial from small square products: R and the accumulated factor Q follow the
    iteration, and the long matrix is multiplied only at restarts and at the end. (Gram
    Newton–Schulz; a I stays out of Z, since Z's rounding would take a's last digits.)
    """
    r = products.gram(x)
    q: Tensor | None = None
    last = len(polynomials) - 1
    for index, (a, b, c) in enumerate(polynomials):
        if q is not None and index in restarts:
            x = q @ x
            r = products.gram(x)
            q = None
        z = products.inner(r, b, c)
        if q is None:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = products.add(q, q, z, a)
        if index < last and index + 1 not in restarts:
            rz = products.add(r, r, z, a)
            r = products.add(rz, z, rz, a)
    return x if q is None else q @ x


def _run(
    wide: Tensor, config: NewtonSchulzConfig, plan: NewtonSchulzPlan, counter: Counter | None
) -> Tensor:
    """One wide matrix, or a batch of them in one go; in the plan's dtype."""
    polynomials, products = config.polynomials, _Products(plan)
    x = _normalized(wide, config, plan.dtype)
    if plan.form == "standard":
        return _standard(x, polynomials, products)
    y = _gram(x, polynomials, plan.restarts, products)
    sane = _wide_norm(y) <= _RUNAWAY * math.sqrt(wide.shape[-2])  # False for NaN
    # One flag read by the host: to avoid it, every matrix would have to be iterated in both forms.
    if not bool(sane.all()):
        broken = ~sane & torch.isfinite(_wide_norm(x))
        fallbacks = int(broken.sum())
        if fallbacks:
            y = torch.where(broken, _standard(x, polynomials, products), y)
            if counter is not None:
                counter.fallbacks += fallbacks
    return y


def orthogonalize(
    matrices: Tensor,  # (..., rows, cols)
    config: NewtonSchulzConfig,
    *,
    counter: Counter | None = None,
) -> Tensor:
    """The iteration's polynomial of each matrix's singular values: U p(S) V^T, near U V^T.

    Returns the same shape in FP64 for FP64 input, else in FP32; tall results are transposed views.
    The input is not changed. ValueError for fewer than two dims or an integer dtype.
    """
    if matrices.ndim < 2 or not matrices.is_floating_point():
        raise ValueError(
            "Newton–Schulz takes floating-point matrices (..., rows, cols), got shape "
            f"{tuple(matrices.shape)} "
            f"of {matrices.dtype}: pass whole matrices, not flat shards"
        )
    out_dtype = torch.float64 if matrices.dtype == torch.float64 else torch.float32
    if matrices.numel() == 0:
        return matrices.to(out_dtype, copy=True)
    rows, cols = matrices.shape[-2:]
    plan = config.plan(rows, cols, device_type=matrices.device.type, input_dtype=matrices.dtype)
    if counter is not None:
        counter.count(plan.kernel, matrices.numel() // (rows * cols))
    tall = rows > cols
    wide = matrices.mT if tall else matrices
    if wide.ndim == 2:
        result = _run(wide, config, plan, counter)
    else:
        flat = wide.flatten(0, -3)
        if matrices.is_cuda and not config.norm_in_iteration_dtype:
            result = _run(flat, config, plan, counter)
        else:
            # CPUs gain nothing from batched products, and torch.optim.Muon's bits come from single
            # ones.
            result = torch.stack([_run(one, config, plan, counter) for one in flat])
        result = result.unflatten(0, wide.shape[:-2])
    return (result.mT if tall else result).to(out_dtype)


def orthogonalize_many(
    matrices: Sequence[Tensor],  # each (rows, cols)
    config: NewtonSchulzConfig,
    *,
    counter: Counter | None = None,
) -> list[Tensor]:
    """``orthogonalize`` of each, in order. On CUDA, matrices of one shape run as batches (small
    ones are bound by launches); elsewhere each runs alone. ValueError as ``orthogonalize``, and
    for anything but two dims.
    """
    for one in matrices:
        if one.ndim != 2:
            raise ValueError(f"orthogonalize_many takes 2-D matrices, got shape {tuple(one.shape)}")
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, one in enumerate(matrices):
        alone = not one.is_cuda or config.norm_in_iteration_dtype
        groups[(tuple(one.shape), one.dtype, one.device, index if alone else None)].append(index)
    results: dict[int, Tensor] = {}
    for indices in groups.values():
        size = max(1, _BATCH_ELEMENTS // max(1, matrices[indices[0]].numel()))
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            if len(batch) == 1:
                results[batch[0]] = orthogonalize(matrices[batch[0]], config, counter=counter)
            else:
                stacked = torch.stack([matrices[index] for index in batch])
                done = orthogonalize(stacked, config, counter=counter)
                results.update(zip(batch, done.unbind(), strict=True))
    return [results[index] for index in range(len(matrices))]
