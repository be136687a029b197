"""Per-token cross entropy that keeps the logits once.

Owns ``cross_entropy``.  Invariant: the loss is computed in FP32 (FP64 for FP64 logits) whatever the
dtype of the logits, and the only large tensors kept for the backward are the logits themselves.
Tested by ``tests/models/test_layers.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamuon.kernels.norm import wide_dtype

IGNORED = -100  # the label that transformers and torch use for "no loss here"


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits.to(wide_dtype(logits.dtype))
        ignored = labels == IGNORED
        index = labels.masked_fill(ignored, 0).unsqueeze(-1)
        total = torch.logsumexp(wide, dim=-1, keepdim=True)
        ctx.save_for_backward(logits, index, total, ignored)
        return (total - wide.gather(-1, index)).squeeze(-1).masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        logits, index, total, ignored = ctx.saved_tensors
        factor = gradient.masked_fill(ignored, 0).unsqueeze(-1)
        result = (logits.to(total.dtype) - total).exp_().mul_(factor)
        result.scatter_add_(-1, index, -factor)
        return result.to(logits.dtype), None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """``logits (..., vocabulary)`` and integer ``labels (...)`` to losses ``(...)`` in nats, FP32
    or FP64.

    Matches ``torch.nn.functional.cross_entropy(reduction="none")`` on widened logits; the label
    -100 gives loss 0. A label outside the vocabulary raises an IndexError or RuntimeError of
    torch's ``gather``.
    """
    return _CrossEntropy.apply(logits, labels)
