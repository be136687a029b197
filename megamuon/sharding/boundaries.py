"""Collectives at tensor-parallel boundaries: autograd functions on plain local tensors.

Owns ``TpAxis`` and the transitions between the forms of an activation. Invariants: sums run over
ranks 0, 1, ... in FP32 (or the tensor's own wider dtype) and are rounded once, on every rank from
the same numbers, so that copies of an activation stay bit for bit equal and no result depends on a
library's order of additions; a transition keeps nothing but sizes, so it can be recomputed; every
rank of the axis issues the same collectives. Tested by
``tests/distributed/test_tensor_parallel.py``.

| transition | forward | backward |
|---|---|---|
| whole -> whole, into a cut region | identity | all-reduce |
| sequence -> whole | all-gather | reduce-scatter |
| partial -> whole | all-reduce | identity |
| partial -> sequence | reduce-scatter | all-gather |
| vocabulary -> whole | all-gather | own piece |
| sequence -> whole, for the same computation on all | all-gather | own piece |
| whole -> sequence | own piece | all-gather |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamuon.kernels.norm import wide_dtype
from megamuon.sharding.templates import Flow, ShardingError

POSITIONS = 1  # dim of (batch, positions, ...) that sequence parallelism cuts


@dataclass(frozen=True, kw_only=True)
class TpAxis:
    """This rank's place among the tensor-parallel ranks, and how to reach the others."""

    rank: int
    size: int
    group: dist.ProcessGroup


def gather_stack(axis: TpAxis, part: Tensor) -> Tensor:
    """``part`` of every rank, stacked on a new dim 0 in rank order."""
    part = part.contiguous()
    stack = part.new_empty((axis.size, *part.shape))
    # Newer torch warns of the older name, older torch lacks the newer one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(stack.flatten(0, 1) if part.ndim else stack, part, group=axis.group)
    return stack


def ordered_sum(stack: Tensor) -> Tensor:
    """Sum over dim 0 from the first to the last, in FP32 or wider, in the dtype of ``stack``."""
    total = stack[0].to(wide_dtype(stack.dtype), copy=True)
    for part in stack[1:]:
        total += part
    return total.to(stack.dtype)


def _exchange(axis: TpAxis, outgoing: Tensor) -> Tensor:
    """``outgoing[r]`` goes to rank r; what they send to this rank comes back, in rank order."""
    outgoing = outgoing.contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=axis.group)
    return incoming


def all_reduce(axis: TpAxis, tensor: Tensor) -> Tensor:
    """Sum of ``tensor`` over the ranks, the same bits on all of them."""
    if axis.size == 2:  # one exchange moves the same bytes as the two steps below
        return ordered_sum(gather_stack(axis, tensor))
    share = -(-tensor.numel() // axis.size)
    padded = tensor.new_zeros(axis.size * share)
    padded[: tensor.numel()] = tensor.reshape(-1)
    mine = ordered_sum(_exchange(axis, padded.view(axis.size, share)))
    return gather_stack(axis, mine).view(-1)[: tensor.numel()].view(tensor.shape)


def all_gather(axis: TpAxis, part: Tensor, dim: int) -> Tensor:
    """Equal parts of all ranks, side by side along ``dim``."""
    return torch.cat(gather_stack(axis, part).unbind(), dim=dim)


def reduce_scatter(axis: TpAxis, tensor: Tensor, dim: int) -> Tensor:
    """This rank's part along ``dim`` of the sum over the ranks.  Raises ShardingError where the
    dim does not divide.
    """
    check_divides(tensor.shape[dim], axis.size)
    parts = torch.stack(tensor.chunk(axis.size, dim=dim))
    return ordered_sum(_exchange(axis, parts))


def all_gather_uneven(axis: TpAxis, part: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Pieces of the last dim, which ``bounds`` cut, side by side."""
    sizes = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    padded = part.new_zeros((*part.shape[:-1], max(sizes)))
    padded[..., : part.shape[-1]] = part
    stack = gather_stack(axis, padded)
    return torch.cat([piece[..., :size] for piece, size in zip(stack, sizes, strict=True)], dim=-1)


def check_divides(positions: int, tp: int) -> None:
    """Raise ShardingError where a sequence cannot be cut into equal parts."""
    if positions % tp:
        raise ShardingError(
            f"a sequence of {positions} positions does not divide by {tp} tensor-parallel ranks:"
            " choose another --seq-length, or drop --sequence-parallel"
        )


def own_positions(axis: TpAxis, tensor: Tensor, dim: int) -> Tensor:
    """This rank's part of a tensor that is the same on all ranks."""
    check_divides(tensor.shape[dim], axis.size)
    share = tensor.shape[dim] // axis.size
    return tensor.narrow(dim, axis.rank * share, share)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TpAxis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(ctx.axis, gradient), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TpAxis) -> Tensor:
        return all_reduce(axis, tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TpAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(axis, tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(ctx.axis, gradient, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TpAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(axis, tensor, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(ctx.axis, gradient, ctx.dim), None, None


class _ReplicatedGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TpAxis) -> Tensor:
        ctx.axis = axis
        return all_gather(axis, tensor, POSITIONS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return own_positions(ctx.axis, gradient, POSITIONS), None


class _ReplicatedOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TpAxis) -> Tensor:
        ctx.axis = axis
        return own_positions(axis, tensor, POSITIONS).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(ctx.axis, gradient, POSITIONS), None


def replicated_gather(axis: TpAxis, tensor: Tensor) -> Tensor:
    """Parts of the sequence into the whole, of which every rank computes the same function."""
    return _ReplicatedGather.apply(tensor, axis)


def replicated_own(axis: TpAxis, tensor: Tensor) -> Tensor:
    """Out of such a computation again: this rank's part of the sequence."""
    return _ReplicatedOwn.apply(tensor, axis)


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, axis: TpAxis, bounds: tuple[int, ...]) -> Tensor:
        ctx.edges = bounds[axis.rank], bounds[axis.rank + 1]
        return all_gather_uneven(axis, logits, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.edges
        return gradient[..., start:stop], None, None


def gather_vocabulary(axis: TpAxis, logits: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Logits of this rank's rows to those of the whole vocabulary, on every rank."""
    return _GatherVocabulary.apply(logits, axis, bounds)


def sum_parts(axis: TpAxis, tensor: Tensor) -> Tensor:
    """Sum of ``tensor`` over the ranks, of which every rank then computes the same function: the
    gradient passes unchanged.
    """
    return _Reduce.apply(tensor, axis)


Transition = Callable[[Tensor], Tensor]


def entering(given: Flow, computed: Flow, axis: TpAxis) -> Transition:
    """What brings an activation into a region that each rank computes a part of.

    Compiled once, when a plan is applied.  Raises ShardingError for a pair that has no collective.
    """
    if (given, computed) == (Flow.WHOLE, Flow.WHOLE):
        return lambda tensor: _Enter.apply(tensor, axis)
    if (given, computed) == (Flow.SEQUENCE, Flow.WHOLE):
        return lambda tensor: _GatherSequence.apply(tensor, axis, POSITIONS)
    raise ShardingError(f"no collective brings {given.value} into {computed.value}")


def leaving(produced: Flow, returned: Flow, axis: TpAxis) -> Transition:
    """What makes the result of such a region: the counterpart of ``entering``."""
    if (produced, returned) == (Flow.PARTIAL, Flow.WHOLE):
        return lambda tensor: _Reduce.apply(tensor, axis)
    if (produced, returned) == (Flow.PARTIAL, Flow.SEQUENCE):
        return lambda tensor: _ReduceScatter.apply(tensor, axis, POSITIONS)
    raise ShardingError(f"no collective brings {produced.value} into {returned.value}")
