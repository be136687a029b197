"""Linear maps of many experts at once: each slice of the rows has a weight of its own.

Owns ``grouped_linear``, the counterpart of ``kernels.linear`` for experts.  Invariants: rows are
sorted by expert; the weights of all experts, where they lie back to back, are read as one 3-D view;
weight gradients go straight to where the runtime reduces them, split by offset, and an expert
without rows gets zeros there and counts as written, so that every rank touches the same experts.  A
plain loop over the experts is oracle and fallback.  Tested by ``tests/kernels/test_grouped.py``.

What torch offers (``torch.nn.functional.grouped_mm``; measured on 2.13): on CPUs it computes FP32,
BF16 and FP16, one expert after the other, refuses FP64, and refuses rows whose length is not a
multiple of 16 bytes; its documentation promises BF16 on GPUs of compute capability 8.0 and up.  It
takes no ``out``, so a weight gradient is one product for all experts and one copy, where the
loop's products write in place.  ``auto`` therefore takes it on such GPUs in BF16 and the
loop everywhere else; the loop has to know the counts on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megamuon.kernels.linear import (
    UNSHARDED,
    Destination,
    adjacent,
    destinations,
    fused,
    weight_gradients,
)

BACKENDS = ("auto", "grouped", "loop")
_PRODUCT = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNMENT = 16  # bytes that the length of a row must be a multiple of


class GroupedBackendError(ValueError):
    """The grouped product was asked for where torch has none."""


def _problem(inputs: Tensor, out_features: int) -> str | None:
    """Why torch's grouped product cannot compute this; None where it can."""
    if _PRODUCT is None:
        return f"torch {torch.__version__} has no grouped_mm"
    if inputs.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it knows no {inputs.dtype}"
    for size in (inputs.shape[-1], out_features):
        if size * inputs.dtype.itemsize % _ALIGNMENT:
            return f"a row of {size} {inputs.dtype} is no multiple of {_ALIGNMENT} bytes"
    return None


def _takes_grouped(inputs: Tensor, out_features: int, backend: str) -> bool:
    if backend not in BACKENDS:
        raise ValueError(f"grouped backend {backend!r}: choose from {', '.join(BACKENDS)}")
    if backend == "loop" or inputs.shape[0] == 0:
        return False
    problem = _problem(inputs, out_features)
    if backend == "grouped":
        if problem is not None:
            raise GroupedBackendError(f"grouped backend 'grouped': {problem}; use auto or loop")
        return True
    return (
        problem is None
        and inputs.device.type == "cuda"
        and inputs.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(inputs.device) >= (8, 0)
    )


def stacked(blocks: Sequence[Sequence[Tensor]]) -> Tensor:
    """Blocks of members ``(out_i, in)`` as one ``(experts, sum of out_i, in)``: a view where all
    lie back to back, else a copy.
    """
    members = [member for block in blocks for member in block]
    if not adjacent(members):
        return torch.stack([fused(block) for block in blocks])
    first = members[0].detach()
    rows, columns = sum(member.shape[0] for member in blocks[0]), first.shape[1]
    size, stride = (len(blocks), rows, columns), (rows * columns, columns, 1)
    return first.as_strided(size, stride, first.storage_offset())


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, counts: Tensor, grouped: bool, rest: bool, *weights: nn.Parameter
    ) -> Tensor:
        members = len(weights) // counts.shape[0]
        blocks = [weights[i : i + members] for i in range(0, len(weights), members)]
        ends = counts.cumsum(0, dtype=torch.int32) if grouped else None
        stops = None if grouped else list(accumulate(counts.tolist()))
        ctx.save_for_backward(inputs, ends)
        # As in `kernels.linear`: parameters, not saved tensors, because only the parameter's
        # UnshardedGradient can bring a released weight back.
        ctx.blocks, ctx.stops, ctx.rest = blocks, stops, rest
        rows = sum(member.shape[0] for member in blocks[0])
        return _rows_by_experts(inputs, blocks, ends, stops, rest, rows, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, ends = ctx.saved_tensors
        blocks: Sequence[Sequence[nn.Parameter]] = ctx.blocks
        for block in blocks:
            for weight in block:
                unsharded = getattr(weight, UNSHARDED, None)
                if unsharded is not None:
                    unsharded.ensure_weights()
        wanted, flat = ctx.needs_input_grad, gradient.contiguous()
        to_inputs = None
        if wanted[0]:
            to_inputs = _rows_by_experts(
                flat, blocks, ends, ctx.stops, ctx.rest, inputs.shape[1], transposed=False
            )
        to_weights: list[Tensor | None] = [None] * (len(wanted) - 4)
        weights = [weight for block in blocks for weight in block]
        asked = destinations(weights, wanted[4:], ctx.next_functions[2:])
        if any(want for want, _ in asked):
            if ends is not None:
                to_weights = _grouped_gradients(blocks, asked, flat, inputs, ends)
            else:
                to_weights = _looped_gradients(blocks, asked, flat, inputs, ctx.stops)
        return (to_inputs, None, None, None, *to_weights)


def _rows_by_experts(
    rows: Tensor,
    blocks: Sequence[Sequence[nn.Parameter]],
    ends: Tensor | None,
    stops: Sequence[int] | None,
    rest: bool,
    width: int,
    *,
    transposed: bool,
) -> Tensor:
    """Each expert's rows times its weight (transposed in the forward pass), ``(rows, width)``."""
    if ends is not None:
        weights = stacked(blocks)
        result = _PRODUCT(  # type: ignore[misc]
            rows.contiguous(), weights.transpose(1, 2) if transposed else weights, offs=ends
        )
        if rest:  # what the product leaves behind the last expert's rows is undefined
            beyond = torch.arange(rows.shape[0], device=rows.device) >= ends[-1]
            result.masked_fill_(beyond[:, None], 0)
        return result
    assert stops is not None  # ends or stops: the backends differ in where they need the counts
    result, start = rows.new_empty(rows.shape[0], width), 0
    for block, stop in zip(blocks, stops, strict=True):
        if stop > start:
            weight = fused(block)
            weight = weight.t() if transposed else weight
            torch.mm(rows[start:stop], weight, out=result[start:stop])
        start = stop
    result[start:].zero_()
    return result


def _looped_gradients(
    blocks: Sequence[Sequence[nn.Parameter]],
    asked: Sequence[Destination],
    flat: Tensor,
    inputs: Tensor,
    stops: Sequence[int],
) -> list[Tensor | None]:
    """One product per expert; a product over no rows stores zeros."""
    results: list[Tensor | None] = []
    start = 0
    for index, (block, stop) in enumerate(zip(blocks, stops, strict=True)):
        here = asked[index * len(block) : (index + 1) * len(block)]
        results += weight_gradients(block, here, flat[start:stop], inputs[start:stop])
        start = stop
    return results


def _grouped_gradients(
    blocks: Sequence[Sequence[nn.Parameter]],
    asked: Sequence[Destination],
    flat: Tensor,
    inputs: Tensor,
    ends: Tensor,
) -> list[Tensor | None]:
    """One product for all experts, then one write where all gradients lie together in one state."""
    product = _PRODUCT(flat.t(), inputs.contiguous(), offs=ends)  # type: ignore[misc]
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    # Kernels differ in what they leave for an expert without rows.
    product.masked_fill_((starts == ends)[:, None, None], 0)
    ready = [unsharded for _, unsharded in asked if unsharded is not None]
    for unsharded in ready:
        unsharded.ensure_storage()
    if len(ready) == len(asked) and len({unsharded.written for unsharded in ready}) == 1:
        gradients, members = [unsharded.gradient for unsharded in ready], len(blocks[0])
        if adjacent(gradients):
            whole = stacked([gradients[i : i + members] for i in range(0, len(asked), members)])
            whole.add_(product) if ready[0].written else whole.copy_(product)
            for unsharded in ready:
                unsharded.written = True
            return [None] * len(asked)
    results: list[Tensor | None] = []
    for index, block in enumerate(blocks):
        parts = product[index].split([weight.shape[0] for weight in block])
        for part in parts:
            want, unsharded = asked[len(results)]
            if unsharded is not None:
                unsharded.store(part)
            results.append(part if want and unsharded is None else None)
    return results


def grouped_linear(
    inputs: Tensor,
    weights: Sequence[nn.Parameter],
    counts: Tensor,
    *,
    backend: str = "auto",
    rest: bool = False,
) -> Tensor:
    """``inputs (rows, in)``, sorted by expert, to ``(rows, out)``: each row times its expert's
    weight.

    ``counts (experts,)``: int64, rows of each expert.  ``weights``: the same number of members
    ``(out_i, in)`` per expert, expert by expert; an expert's weight is its members stacked on dim
    0, and all experts have the same shapes.  ``rest``: rows may follow the last expert's (tokens
    that no expert takes); they give zeros.  ``backend``: ``auto``, ``grouped`` or ``loop``.

    Matches ``F.linear`` expert by expert, first derivatives only.  Raises ValueError for weights
    that do not fit the counts or an unknown backend, GroupedBackendError for ``grouped`` where
    torch cannot compute it.
    """
    experts = counts.shape[0]
    if not weights or len(weights) % experts:
        raise ValueError(
            f"{len(weights)} weights for {experts} experts: give each the same number of members"
        )
    rows = sum(weight.shape[0] for weight in weights[: len(weights) // experts])
    grouped = _takes_grouped(inputs, rows, backend)
    return _Grouped.apply(inputs, counts, grouped, rest, *weights)
