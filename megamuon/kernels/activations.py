"""Gated activation over a fused gate|up tensor.

Owns ``swiglu``.  Invariant: the value is ``silu(gate) * up``; the backward keeps only the fused
input and writes one fused gradient, so the two halves are never copied together.  Tested by
``tests/models/test_layers.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        to_gate, to_up = result.chunk(2, dim=-1)
        torch.mul(gradient, silu(gate), out=to_up)
        to_gate.copy_(torch.ops.aten.silu_backward(gradient * up, gate))
        return result


def swiglu(gate_up: Tensor) -> Tensor:
    """``gate_up (..., 2 * width)``, gate first, to ``silu(gate) * up (..., width)``.

    Matches ``transformers``' Qwen2MLP and Megatron's ``--swiglu``.  First derivatives only.
    """
    return _SwiGLU.apply(gate_up)
