"""Root-mean-square normalisation with a lean backward.

Owns ``rms_norm``.  Invariant: the numbers are those of Qwen2 and Llama: normalise in FP32 (FP64 for
FP64 inputs), cast back, then multiply by the gain in the input dtype; the backward keeps only the
input and one scale per row. Tested by ``tests/models/test_layers.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, rotations, softmax and losses are computed: FP64 for FP64 inputs,
    else FP32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, gain: Tensor, epsilon: float, zero_centred: bool
    ) -> Tensor:
        wide = inputs.to(wide_dtype(inputs.dtype))
        size = inputs.shape[-1]
        # vector_norm reads the row once and writes no squares.
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(size)
        scale = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(inputs, gain, scale)
        ctx.zero_centred = zero_centred
        normed = (wide * scale).to(inputs.dtype)
        if zero_centred:
            return normed * (1 + gain)
        return normed.mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, gain, scale = ctx.saved_tensors
        wide = wide_dtype(inputs.dtype)
        normed = inputs.to(wide) * scale
        to_inputs = to_gain = None
        if ctx.needs_input_grad[1]:
            product = gradient.to(wide) * normed.to(inputs.dtype)
            to_gain = product.flatten(0, -2).sum(0).to(gain.dtype)
        if ctx.needs_input_grad[0]:
            factor = 1 + gain if ctx.zero_centred else gain
            inner = (gradient * factor).to(wide)
            projection = (inner * normed).mean(-1, keepdim=True)
            to_inputs = inner.sub_(normed.mul_(projection)).mul_(scale).to(inputs.dtype)
        return to_inputs, to_gain, None, None


def rms_norm(inputs: Tensor, gain: Tensor, *, epsilon: float, zero_centred: bool = False) -> Tensor:
    """``inputs (..., size)`` over its root mean square, times ``gain (size,)`` (``1 + gain`` if
    zero-centred).

    Matches the RMSNorm of Qwen2 in ``transformers``.  First derivatives only.
    """
    return _RMSNorm.apply(inputs, gain, epsilon, zero_centred)
