"""Rotary position embedding: frequencies, tables and the rotation.

Owns ``RotaryTable`` (cosines and sines, cached per device and dtype, outside any module's state)
and ``rotate``. Invariant: angles are computed in FP32 as ``transformers`` and Megatron do (in FP64
for FP64 models), the tables are cast to the activation dtype, and the backward of a rotation is the
opposite rotation. Tested by ``tests/models/test_layers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamuon.kernels.norm import wide_dtype


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3.1 frequency scaling (Megatron's ``--use-rope-scaling``): long wavelengths are
    stretched by ``factor``.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192


def inverse_frequencies(
    size: int, base: float, scaling: RopeScaling | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The ``size / 2`` angular steps per position, in ``dtype`` (FP32 or FP64)."""
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device=device).to(dtype) / size
    steps = 1.0 / (base**exponents)
    if scaling is None:
        return steps
    wavelengths = 2 * math.pi / steps
    longest = scaling.original_max_positions / scaling.low_frequency_factor
    shortest = scaling.original_max_positions / scaling.high_frequency_factor
    # Between the two wavelengths the step slides from the stretched one to the original one.
    blend = (scaling.original_max_positions / wavelengths - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    mixed = (1 - blend) * steps / scaling.factor + blend * steps
    result = torch.where(wavelengths > longest, steps / scaling.factor, mixed)
    return torch.where(wavelengths < shortest, steps, result)


class RotaryTable:
    """Cosines and sines for positions from 0; grows on demand, holds no module state."""

    def __init__(
        self,
        *,
        size: int,
        base: float,
        scaling: RopeScaling | None = None,
        interpolation: float = 1.0,
    ) -> None:
        self.size, self.base, self.scaling, self.interpolation = size, base, scaling, interpolation
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each ``(length, size / 2)``, in ``dtype``."""
        key = (device, dtype)
        table = self._tables.get(key)
        if table is None or table[0].shape[0] < length:
            positions = torch.arange(length, device=device)
            table = self._tables[key] = self.at(positions, dtype)
        return table[0][:length], table[1][:length]

    @torch.no_grad()
    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines at ``positions (...)``, each ``(..., size / 2)``, in ``dtype``."""
        wide = wide_dtype(dtype)
        steps = inverse_frequencies(self.size, self.base, self.scaling, positions.device, wide)
        angles = (positions.to(wide) / self.interpolation).unsqueeze(-1) * steps
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _turn(inputs: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool, sign: int) -> Tensor:
    turned = 2 * cosines.shape[-1]
    result = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    if turned < inputs.shape[-1]:
        result[..., turned:] = inputs[..., turned:]

    def halves(tensor: Tensor) -> tuple[Tensor, Tensor]:
        if interleaved:
            return tensor[..., 0:turned:2], tensor[..., 1:turned:2]
        return tensor[..., : turned // 2], tensor[..., turned // 2 : turned]

    first, second = halves(inputs)
    to_first, to_second = halves(result)
    torch.mul(first, cosines, out=to_first)
    torch.mul(second, cosines, out=to_second)
    to_first.addcmul_(second, sines, value=-sign)
    to_second.addcmul_(first, sines, value=sign)
    return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool
    ) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.interleaved = interleaved
        return _turn(inputs, cosines, sines, interleaved, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return _turn(gradient, cosines, sines, ctx.interleaved, -1), None, None, None


def rotate(inputs: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first ``2 * r`` channels of ``inputs (batch, positions, heads, channels)``; the
    rest passes through.

    ``cosines`` and ``sines``: ``(positions, 1, r)`` or ``(batch, positions, 1, r)``.  Pairs are (i,
    i + r) (the half-split form of Qwen and Llama in ``transformers``), or (2i, 2i + 1) if
    ``interleaved``.
    """
    return _Rotate.apply(inputs, cosines, sines, interleaved)
