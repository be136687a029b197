"""Eigenvectors and inverse roots of Kronecker factors, for Shampoo and SOAP.

Owns the decompositions, and what happens when one fails. Invariant: nothing here changes its
arguments; results have the dtype and device of the factor. Tested by ``tests/optim/test_eigen.py``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Perturbation = Literal["after", "before"]


class FactorError(ArithmeticError):
    """A Kronecker factor holds NaN or Inf, or cannot be decomposed."""


def check_finite(optimizer: str, name: str, side: str, tensor: Tensor) -> None:
    """FactorError unless every entry is finite. One flag is read by the host."""
    if not bool(torch.isfinite(tensor).all()):
        raise FactorError(
            f"{optimizer} item {name!r}: its {side} factor ({tensor.shape[0]} x {tensor.shape[1]}, "
            f"{tensor.dtype}) holds NaN or Inf. Look for a non-finite gradient, or for one whose "
            "squares overflow; clip the gradient, lower the learning rate, or use FP64 masters"
        )


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors, as columns, of a symmetric matrix; where that
    fails, a second attempt in FP64. RuntimeError when that fails too.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if matrix.dtype == torch.float64:
            raise
        values, vectors = torch.linalg.eigh(matrix.double())
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def inverse_root(
    matrix: Tensor, exponent: float, eps: float, perturbation: Perturbation = "after"
) -> Tensor:
    """``matrix`` to the power -``exponent``, of a symmetric positive semi-definite matrix.

    ``after``: eigenvalues are raised by -min(smallest, 0), then by eps. ``before``: eps I is added
    first, and if the smallest eigenvalue still is below eps, all are raised so that it becomes
    eps. (facebookresearch/optimizers knows both.) RuntimeError as ``eigen``.
    """
    if perturbation == "before":
        matrix = matrix.clone()
        matrix.diagonal().add_(eps)
    values, vectors = eigen(matrix)
    smallest = values[0]  # stays on the device
    if perturbation == "before":
        values = values + torch.where(smallest < eps, eps - smallest, 0.0)
    else:
        values = values - smallest.clamp(max=0.0) + eps
    return (vectors * values.pow(-exponent)) @ vectors.mT


def orthogonal_iteration(
    matrix: Tensor, basis: Tensor, iterations: int, tolerance: float
) -> Tensor:
    """An approximate eigenbasis, eigenvalues ascending, from a former one by QR iterations on the
    matrix in that basis. They stop, perhaps before the first, when the norm off the diagonal is at
    most ``tolerance`` times the norm.
    """
    rotated = basis.mT @ matrix @ basis
    for _ in range(iterations):
        off_diagonal = torch.linalg.vector_norm(rotated - torch.diag(rotated.diagonal()))
        if bool(off_diagonal <= tolerance * torch.linalg.vector_norm(rotated)):
            break
        q, r = torch.linalg.qr(rotated)
        rotated = r @ q
        basis = basis @ q
    return basis[:, rotated.diagonal().argsort(stable=True)]


def power_iteration(
    matrix: Tensor, basis: Tensor, *, fixed_null_space: bool = False
) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration after sorting: the former basis' columns go by descending
    Rayleigh quotient, then Q of the QR of matrix times basis. Returns Q and the order taken.
    ``fixed_null_space``: the columns of Q that only rounding determines come from ``nearest``,
    guided by the former basis.
    """
    order = (basis * (matrix @ basis)).sum(dim=0).argsort(descending=True, stable=True)
    former = basis[:, order]
    q, r = torch.linalg.qr(matrix @ former)
    return (nearest(q, r.diagonal().abs(), former) if fixed_null_space else q), order


def nearest(basis: Tensor, weights: Tensor, guide: Tensor) -> Tensor:
    """The orthonormal ``basis`` with its columns from the first negligible weight on turned among
    themselves until they are as near as can be to the same columns of ``guide`` (the orthogonal
    Procrustes problem). Negligible is at most eps^(3/4) times the largest, with the machine's eps:
    rounding in a QR without pivoting grows with the condition of the columns before.
    """
    bound = weights.max() * torch.finfo(weights.dtype).eps ** 0.75
    rank = int((weights > bound).to(torch.int64).cumprod(0).sum())
    if rank == len(weights):
        return basis
    free = basis[:, rank:]
    left, _, right = torch.linalg.svd(free.mT @ guide[:, rank:])
    return torch.cat([basis[:, :rank], free @ (left @ right)], dim=1)
