"""Token tables, output heads and losses whose vocabulary is cut over the tp ranks.

Owns the lookup in a piece of a table and the cross entropy of pieces of logits. Invariants: losses
are the same bits on every rank; they are computed in FP32 (FP64 for FP64 logits) and keep the local
logits once; a token or label outside the whole vocabulary fails as it does without cuts. The cross
entropy needs one exchange forward (per token: the local log-sum-exp and the target's logit) and
none backward. Source: Megatron-LM's vocabulary parallelism. Tested by
``tests/distributed/test_tensor_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamuon.kernels.cross_entropy import IGNORED
from megamuon.kernels.norm import wide_dtype
from megamuon.sharding.boundaries import TpAxis, gather_stack


def local_rows(index: Tensor, bounds: tuple[int, ...], rank: int) -> tuple[Tensor, Tensor]:
    """Positions of ``index`` in this rank's rows, and a mask of those that lie on other ranks.

    Rows of other ranks become 0; what lies on no rank stays out of range, for the lookup to refuse.
    """
    start, stop = bounds[rank], bounds[rank + 1]
    known = (index >= 0) & (index < bounds[-1])
    elsewhere = known & ((index < start) | (index >= stop))
    local = (index - start).masked_fill(elsewhere, 0).masked_fill(~known, stop - start)
    return local, elsewhere


def lookup(
    table: Callable[..., Tensor], index: Tensor, bounds: tuple[int, ...], rank: int
) -> Tensor:
    """Rows of a cut table, 0 where another rank holds the row: a summand of the whole lookup."""
    local, elsewhere = local_rows(index, bounds, rank)
    return table(local).masked_fill(elsewhere.unsqueeze(-1), 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, axis: TpAxis, bounds: tuple[int, ...]
    ) -> Tensor:
        wide = logits.to(wide_dtype(logits.dtype))
        ignored = labels == IGNORED
        index, elsewhere = local_rows(labels.masked_fill(ignored, 0), bounds, axis.rank)
        target = wide.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0)
        mine = torch.stack((torch.logsumexp(wide, dim=-1), target))
        sums, targets = gather_stack(axis, mine).unbind(1)
        total = torch.logsumexp(sums, dim=0)
        # One rank holds the target, the others hold 0: no order of additions can matter.
        losses = (total - targets.sum(0)).masked_fill_(ignored, 0)
        ctx.save_for_backward(logits, index, total, ignored, elsewhere)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        logits, index, total, ignored, elsewhere = ctx.saved_tensors
        factor = gradient.masked_fill(ignored, 0)
        result = (logits.to(total.dtype) - total.unsqueeze(-1)).exp_().mul_(factor.unsqueeze(-1))
        result.scatter_add_(
            -1, index.unsqueeze(-1), -factor.masked_fill(elsewhere, 0).unsqueeze(-1)
        )
        return result.to(logits.dtype), None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, axis: TpAxis, bounds: tuple[int, ...]) -> Tensor:
    """This rank's ``logits (..., rows)`` and ``labels (...)`` of the whole vocabulary to losses
    ``(...)`` in nats, as ``kernels.cross_entropy`` of the whole logits.

    The gradient that comes back must be the same on every rank.
    """
    return _CrossEntropy.apply(logits, labels, axis, bounds)
