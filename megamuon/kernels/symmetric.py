"""Products that are known to be symmetric, at five eighths of the work.

Owns ``symmetric_product``: beta C + alpha A B for results that are symmetric by construction (X
X^T, or polynomials of one symmetric matrix). Only the lower block triangle of a 4 x 4 blocking is
multiplied, one GEMM per block row, and mirrored. Invariant: the result is bitwise symmetric,
whatever the size. It pays on CPUs from ``LEAST_SIZE`` on (at 512 the four smaller GEMMs and the
mirroring eat up what is saved), and in FP32 and FP64 only: where a CPU multiplies 16-bit numbers
fast, mirroring costs more than the product saves. Tested by ``tests/kernels/test_symmetric.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = 4
LEAST_SIZE = 768
# Time over that of the full product: median over sizes 768 to 2048, FP32, one thread. The share of
# multiplications is 5/8; the rest is smaller GEMMs and the mirror.
TIME_FRACTION = 0.78
WIDE = (torch.float32, torch.float64)


def pays(size: int, device_type: str, dtype: torch.dtype) -> bool:
    """Whether ``symmetric_product`` is the faster way to a (size, size) result of ``dtype`` on
    this kind of device. BF16 at 1024 on a CPU with AMX: 57 ms with it, 36 without.
    """
    return device_type == "cpu" and size >= LEAST_SIZE and dtype in WIDE


def time_fraction(size: int, device_type: str, dtype: torch.dtype) -> float:
    """Time of the fastest symmetric (size, size) product over that of a full one, on this kind
    of device.
    """
    return TIME_FRACTION if pays(size, device_type, dtype) else 1.0


def symmetric_product(
    left: Tensor,  # (n, k)
    right: Tensor,  # (k, n)
    addend: Tensor | None = None,  # (n, n), symmetric
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    """beta * addend + alpha * left @ right, (n, n) and bitwise symmetric.

    The caller guarantees that the result is symmetric in exact arithmetic; only its lower block
    triangle is computed. ValueError when the shapes do not make a square product.
    """
    size, inner = left.shape
    if right.shape != (inner, size):
        raise ValueError(
            f"symmetric product of {tuple(left.shape)} and {tuple(right.shape)} is not square"
        )
    out = left.new_empty(size, size)
    edges = [size * i // BLOCKS for i in range(BLOCKS + 1)]
    for start, stop in zip(edges, edges[1:], strict=False):
        if start == stop:
            continue
        row = out[start:stop, :stop]
        if addend is None:
            torch.mm(left[start:stop], right[:, :stop], out=row)
            if alpha != 1.0:
                row.mul_(alpha)
        else:
            torch.addmm(
                addend[start:stop, :stop],
                left[start:stop],
                right[:, :stop],
                beta=beta,
                alpha=alpha,
                out=row,
            )
        out[:start, start:stop] = row[:, :start].mT
        diagonal = row[:, start:]
        # Two GEMM orders may round the two halves of this block differently: keep one of them.
        diagonal.copy_(diagonal.tril() + diagonal.tril(-1).mT)
    return out
