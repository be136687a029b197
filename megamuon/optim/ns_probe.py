"""A measurement at start: which dtype this CPU multiplies matrices in fastest.

Owns ``bf16_gain``, a measurement of milliseconds: CPUs with AMX or AVX512-BF16 multiply BF16 some
two to seven times as fast as FP32, all others emulate it, hundreds of times slower. Invariant: it
measures and decides nothing; ranks must agree on what follows, since they iterate matrices of one
model. Tested by ``tests/optim/test_ns_probe.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

# BF16 must beat FP32 products by this much before it is worth its rounding and its conversions.
LEAST_GAIN = 1.25
_GLANCE, _SIZE = 128, 384  # rows: an emulated product of the first takes 4 ms, of the second 200
_BUDGET = 0.02  # seconds of interleaved repeats; threads that share their cores are slow to start


def bf16_gain(clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of a square FP32 product over that of a BF16 one on this CPU, with torch's threads.

    Takes some 25 ms: the fastest of interleaved repeats, which other load slows alike. Where a
    small product shows that BF16 is emulated, the gain is that of the small one.
    """
    glance = _gain(_GLANCE, 0.0, clock)
    return glance if glance < 0.25 else _gain(_SIZE, _BUDGET, clock)


def _gain(size: int, budget: float, clock: Callable[[], float]) -> float:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(size, size, generator=generator)
    fastest = {}
    pair = (wide, wide.bfloat16())
    for matrix in pair:
        torch.mm(matrix, matrix)  # the first call of a kind also prepares it
    start, repeats = clock(), 0
    while repeats < 2 or clock() - start < budget:
        repeats += 1
        for matrix in pair:
            seconds = _seconds(matrix, clock)
            fastest[matrix.dtype] = min(seconds, fastest.get(matrix.dtype, seconds))
    return fastest[torch.float32] / max(fastest[torch.bfloat16], 1e-9)


def _seconds(matrix: Tensor, clock: Callable[[], float]) -> float:
    start = clock()
    torch.mm(matrix, matrix)
    return clock() - start
