"""Linear layers that write weight gradients straight into the memory that is reduced.

Owns ``linear``, an autograd function over one or several weights that lie back to back (a *fusion
block*), and the ``UnshardedGradient`` that a runtime may hang on a parameter. Invariant: without
them it is numerically the plain ``F.linear`` with ordinary gradients; with them the weight-gradient
GEMM writes straight into their memory (the first write of a micro-batch stores, later ones add) and
autograd receives None, so no gradient is copied. A backward pass that asks for other gradients only
(``torch.autograd.grad``, ``backward(inputs=...)``) writes nothing. The backward asks
``UnshardedGradient.ensure_weights`` for the weights itself, so it never reads a released view,
whatever the outputs of a module look like. Tested by ``tests/kernels/test_linear.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

UNSHARDED = "unsharded_gradient"  # attribute of a parameter that holds its UnshardedGradient


class UnshardedGradient:
    """Where one parameter's gradient goes, and how to make its weight readable.

    ``gradient`` has the parameter's shape and is an alias outside autograd; a frozen parameter's is
    empty and never used. ``written`` says whether this micro-batch has stored a gradient yet.
    ``ensure_weights`` gathers the parameter's group if it is released.
    """

    __slots__ = ("ensure_storage", "ensure_weights", "gradient", "written")

    def __init__(
        self,
        gradient: Tensor,
        ensure_weights: Callable[[], None],
        ensure_storage: Callable[[], None],
    ) -> None:
        self.gradient = gradient
        self.ensure_weights = ensure_weights
        self.ensure_storage = ensure_storage  # gives ``gradient`` memory before the first write
        self.written = False

    def store(self, value: Tensor) -> None:
        """Add ``value`` to what this micro-batch has written, or store it if it is the first."""
        self.ensure_storage()
        if self.written:
            self.gradient.add_(value)
        else:
            self.gradient.copy_(value)
            self.written = True


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors follow one another in one storage without a gap."""
    first = tensors[0]
    place = first.storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return False
        if tensor.storage_offset() != place or not tensor.is_contiguous():
            return False
        place += tensor.numel()
    return True


def fused(tensors: Sequence[Tensor]) -> Tensor:
    """The members of a fusion block as one tensor, stacked on dim 0: a view where they are
    adjacent, else a copy.
    """
    if len(tensors) == 1:
        return tensors[0].detach()
    if not adjacent(tensors):
        return torch.cat([tensor.detach() for tensor in tensors])
    rows = sum(tensor.shape[0] for tensor in tensors)
    first = tensors[0].detach()
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, count: int, *parameters: nn.Parameter) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(inputs)
        # Weights are kept as parameters, not as saved tensors: their storage may be released and
        # refilled between forward and backward, and only the UnshardedGradient knows how to bring
        # it back.
        ctx.weights, ctx.biases = weights, biases
        bias = fused(biases) if biases else None
        return torch.nn.functional.linear(inputs, fused(weights), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        weights: Sequence[nn.Parameter] = ctx.weights
        for weight in weights:
            unsharded = getattr(weight, UNSHARDED, None)
            if unsharded is not None:
                unsharded.ensure_weights()
        flat = gradient.reshape(-1, gradient.shape[-1])
        wanted = ctx.needs_input_grad
        to_inputs = None
        if wanted[0]:
            to_inputs = (flat @ fused(weights)).view(*gradient.shape[:-1], weights[0].shape[1])
        count = len(weights)
        edges = ctx.next_functions[1:]  # of the tensors among the arguments: inputs come first
        asked = destinations(weights, wanted[2 : 2 + count], edges[:count])
        to_weights = weight_gradients(weights, asked, flat, inputs)
        asked = destinations(ctx.biases, wanted[2 + count :], edges[count:])
        to_biases = _bias_gradients(ctx.biases, asked, flat)
        return (to_inputs, None, *to_weights, *to_biases)


# Whether a gradient is to be computed, and where it goes; None: back to autograd.
Destination = tuple[bool, UnshardedGradient | None]


def destinations(
    parameters: Sequence[nn.Parameter], wanted: Sequence[bool], edges: Sequence[tuple[Any, int]]
) -> list[Destination]:
    """Where each parameter's gradient goes in the running backward pass.

    ``wanted`` and ``edges`` are a function node's ``needs_input_grad`` and ``next_functions`` of
    these parameters. ``needs_input_grad`` says what the forward pass knew; what this pass asks for
    shows in whether autograd will run the node that accumulates into the parameter.
    """
    found: list[Destination] = []
    for parameter, want, (node, _) in zip(parameters, wanted, edges, strict=True):
        unsharded = getattr(parameter, UNSHARDED, None) if want else None
        if unsharded is not None:
            try:
                want = torch._C._will_engine_execute_node(node)
            except RuntimeError:  # torch.autograd.grad asks for this parameter: it gets a tensor
                unsharded = None
        found.append((want, unsharded if want else None))
    return found


def weight_gradients(
    weights: Sequence[nn.Parameter], asked: Sequence[Destination], flat: Tensor, inputs: Tensor
) -> list[Tensor | None]:
    """One GEMM into adjacent gradients where all members are wanted and in the same state; else
    one per member.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    ready = [unsharded for _, unsharded in asked if unsharded is not None]
    for unsharded in ready:
        unsharded.ensure_storage()
    if len(ready) == len(weights) > 1 and len({unsharded.written for unsharded in ready}) == 1:
        gradients = [unsharded.gradient for unsharded in ready]
        if adjacent(gradients):
            _product(fused(gradients), flat, rows, ready[0].written)
            for unsharded in ready:
                unsharded.written = True
            return [None] * len(weights)
    results: list[Tensor | None] = []
    start = 0
    for weight, (want, unsharded) in zip(weights, asked, strict=True):
        part = flat[:, start : start + weight.shape[0]]
        start += weight.shape[0]
        if not want:
            results.append(None)
        elif unsharded is None:
            results.append(part.t() @ rows)
        else:
            _product(unsharded.gradient, part, rows, unsharded.written)
            unsharded.written = True
            results.append(None)
    return results


def _product(out: Tensor, flat: Tensor, rows: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.addmm_(flat.t(), rows)
    else:
        torch.mm(flat.t(), rows, out=out)


def _bias_gradients(
    biases: Sequence[nn.Parameter], asked: Sequence[Destination], flat: Tensor
) -> list[Tensor | None]:
    results: list[Tensor | None] = []
    total = flat.sum(0) if any(want for want, _ in asked) else None
    start = 0
    for bias, (want, unsharded) in zip(biases, asked, strict=True):
        part = total[start : start + bias.shape[0]] if want else None  # type: ignore[index]
        start += bias.shape[0]
        if part is not None and unsharded is not None:
            unsharded.store(part)
            part = None
        results.append(part)
    return results


def linear(
    inputs: Tensor,
    weights: Sequence[nn.Parameter],
    biases: Sequence[nn.Parameter | None] | None = None,
) -> Tensor:
    """``inputs (..., in) -> (..., sum of out)`` with the weights ``(out_i, in)`` of a fusion block,
    in order.

    Matches ``torch.nn.functional.linear`` on the concatenated weight. All biases are given or none.
    """
    if torch.is_autocast_enabled(inputs.device.type):
        raise RuntimeError(
            "torch.autocast is on: a forward pass in one dtype and weights in another would give"
            " gradients in neither. Leave autocast out and pass --bf16, or"
            " RuntimeConfig(compute_dtype=torch.bfloat16), with inputs of that dtype"
        )
    if biases and any(bias is None for bias in biases) and not all(bias is None for bias in biases):
        raise ValueError("a fusion block has biases on all of its members or on none")
    if biases and biases[0] is None:
        biases = None
    return _Linear.apply(inputs, len(weights), *weights, *(biases or ()))
