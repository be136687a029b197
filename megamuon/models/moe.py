"""Mixtures of experts: router, experts, shared expert and the load-balancing loss.

Owns ``MoEBlock``, the MLP of a layer with experts.  Invariants: names are those of Qwen2-MoE and
Qwen3-MoE on the Hub, one 2-D parameter per expert and projection; the experts' weights form two
fusion blocks, so that a runtime which places them back to back gives one 3-D compute tensor each;
sizes are read from the weights, and nothing here knows of ranks.  What the router did flows through
the layers as a tensor (``statistics``), so recomputation needs no special case.  Tested by
``tests/models/test_moe.py`` and ``test_moe_parity.py``.

Where data-parallel ranks hold different tokens, each computes the loss over its own micro-batch and
the gradients are averaged, as in ``transformers`` and Megatron; the product of averages over all
ranks' tokens would be another loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megamuon.kernels.activations import swiglu
from megamuon.kernels.grouped import grouped_linear
from megamuon.matrices import Kind
from megamuon.models.config import GPTConfig
from megamuon.models.layers import GatedMLP, Linear, output_std


class RouterMap(Linear):
    """A linear map onto experts or onto a gate: rows of logits, not a matrix to orthogonalise."""

    logical_kinds: ClassVar[dict[str, Kind]] = {"weight": Kind.ROUTER}


class ExpertLinear(Linear):
    """One projection of one expert; computed by ``Experts``."""

    is_expert: ClassVar[bool] = True  # a unit of its own, however small


class Router(RouterMap):
    """Softmax over all experts, then the ``router_top_k`` most probable."""

    def __init__(self, config: GPTConfig) -> None:
        experts = config.num_experts or 0
        super().__init__(config.hidden_size, experts, bias=False, std=config.init_method_std)
        self.config = config

    def forward(  # type: ignore[override]
        self, hidden: Tensor, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``hidden (batch, positions, size)`` to weights and indices, both ``(batch, positions,
        k)``, and statistics ``(2, experts)``: chosen tokens and sum of probabilities per expert.

        Probabilities are FP32 (FP64 for FP64 models), weights have the activations' dtype.
        ``counted (batch, positions)``: bool, tokens that the statistics count; None: all.  With a
        capacity, a choice that an expert has no room for gets weight 0 and the index ``experts``;
        the statistics count it, as in Megatron.
        """
        logits = super().forward(hidden)
        wide = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits.softmax(-1, dtype=wide)
        weights, indices = probabilities.topk(self.config.router_top_k, dim=-1)
        statistics = self._statistics(probabilities, indices, counted)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.config.capacity_factor is not None:
            dropped = beyond_capacity(weights, indices, probabilities.shape[-1], self.config)
            weights = weights.masked_fill(dropped, 0)
            indices = indices.masked_fill(dropped, probabilities.shape[-1])
        return weights.to(hidden.dtype), indices, statistics

    @staticmethod
    def _statistics(probabilities: Tensor, indices: Tensor, counted: Tensor | None) -> Tensor:
        experts = probabilities.shape[-1]
        ones = probabilities.new_ones(indices.shape)
        if counted is not None:
            included = counted.to(probabilities.dtype)[..., None]
            ones, probabilities = ones * included, probabilities * included
        chosen = probabilities.new_zeros(experts)
        chosen.scatter_add_(0, indices.reshape(-1), ones.reshape(-1))
        return torch.stack((chosen, probabilities.reshape(-1, experts).sum(0)))


@torch.no_grad()
def beyond_capacity(weights: Tensor, indices: Tensor, experts: int, config: GPTConfig) -> Tensor:
    """Which of the choices ``(batch, positions, k)`` find their expert full, as bool.

    An expert takes ``ceil(tokens * k / experts * capacity_factor)`` tokens of the micro-batch: the
    most probable ones, or, with ``drop_policy`` position, the first ones (Megatron's
    ``--moe-expert-capacity-factor`` and ``--moe-token-drop-policy``; the weights of a token's other
    experts stay as they are).
    """
    flat = indices.reshape(-1)
    capacity = math.ceil(flat.numel() / experts * (config.capacity_factor or 0.0))
    if config.drop_policy == "position":
        order = flat.argsort(stable=True)
    else:
        order = weights.reshape(-1).argsort(descending=True, stable=True)
        order = order[flat[order].argsort(stable=True)]
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    start = counts.cumsum(0) - counts
    rank = torch.empty_like(flat)
    rank[order] = torch.arange(flat.numel(), device=flat.device) - start[flat[order]]
    return (rank >= capacity).view(indices.shape)


class _Dispatch(torch.autograd.Function):
    """Rows of the tokens in the order of their experts; every gradient is a gather, so results do
    not depend on the order in which a device adds."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = (tokens.shape[0], choices, tokens.shape[1])
        return tokens[order // choices]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].view(ctx.shape).sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """Back from the order of experts to the order of tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[inverse]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradient[order], None, None


class Expert(nn.Module):
    """The three projections of one expert, in the names of a gated MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        size, width, std = config.hidden_size, config.expert_size, config.init_method_std
        self.gate_proj = ExpertLinear(size, width, bias=False, std=std)
        self.up_proj = ExpertLinear(size, width, bias=False, std=std)
        self.down_proj = ExpertLinear(width, size, bias=False, std=output_std(config))


class Experts(nn.Module):
    """``down_e(silu(gate_e(x)) * up_e(x))``, each token by its chosen experts."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.backend = config.grouped_backend
        self.drops = config.capacity_factor is not None
        count = config.num_experts or 0
        for index in range(count):
            self.add_module(str(index), Expert(config))
        inner = ("gate_proj", "up_proj")
        self.fusion_blocks = (
            tuple(f"{index}.{name}" for index in range(count) for name in inner),
            tuple(f"{index}.down_proj" for index in range(count)),
        )

    def _weights(self, *names: str) -> list[nn.Parameter]:
        return [
            expert._modules[name]._parameters["weight"]  # type: ignore[union-attr, misc]
            for expert in self._modules.values()
            for name in names
        ]

    def forward(self, hidden: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """``hidden (batch, positions, size)`` with ``weights`` and ``indices (batch, positions,
        k)`` of its experts, to the weighted sum of their outputs, ``(batch, positions, size)``.
        """
        tokens, chosen = hidden.reshape(-1, hidden.shape[-1]), indices.reshape(-1)
        order = chosen.argsort(stable=True)
        places = torch.arange(order.shape[0], device=order.device)
        inverse = torch.empty_like(order).scatter_(0, order, places)
        # One place more than there are experts: that of dropped choices, which sort behind all.
        counts = torch.zeros(len(self._modules) + 1, dtype=torch.int64, device=order.device)
        counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:-1]
        how: dict[str, Any] = {"backend": self.backend, "rest": self.drops}
        rows = _Dispatch.apply(tokens, order, inverse, indices.shape[-1])
        inner = grouped_linear(rows, self._weights("gate_proj", "up_proj"), counts, **how)
        outer = grouped_linear(swiglu(inner), self._weights("down_proj"), counts, **how)
        each = _Collect.apply(outer, order, inverse).view(*indices.shape, outer.shape[-1])
        return (each * weights.unsqueeze(-1)).sum(-2)


class MoEBlock(nn.Module):
    """Routed experts, and one that every token goes to where ``moe_shared_expert_size`` is set."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(config)
        self.experts = Experts(config)
        size = config.moe_shared_expert_size
        if size is not None:
            self.shared_expert = GatedMLP(replace(config, num_experts=None, ffn_hidden_size=size))
            if config.moe_shared_expert_gate:
                self.shared_expert_gate = RouterMap(
                    config.hidden_size, 1, bias=False, std=config.init_method_std
                )

    def forward(self, hidden: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``hidden (batch, positions, size)`` to its shape and this layer's share of the running
        statistics; ``counted`` as in ``Router``.
        """
        weights, indices, statistics = self.gate(hidden, counted)
        update = self.experts(hidden, weights, indices)
        if self.config.moe_shared_expert_size is not None:
            shared = self.shared_expert(hidden)
            if self.config.moe_shared_expert_gate:
                shared = self.shared_expert_gate(hidden).sigmoid() * shared
            update = update + shared
        if self.config.aux_loss_scope == "layer":  # the sum over layers is what flows on
            statistics = balancing_loss(statistics, self.config.router_top_k)
            statistics = statistics / self.config.router_top_k
        return update, statistics


def balancing_loss(statistics: Tensor, top_k: int) -> Tensor:
    """``experts * sum(f * P)`` with ``f`` the tokens per expert and ``P`` the mean probabilities.

    ``statistics (2, experts)`` as ``Router`` gives them, summed over whatever is pooled; ``f`` sums
    to ``top_k``, which is also the value at perfect balance (``transformers``'
    ``load_balancing_loss_func``).  Without a counted token the loss is 0.
    """
    chosen, probabilities = statistics
    tokens = (chosen.sum() / top_k).clamp_min(1)
    return (chosen / tokens * (probabilities / tokens)).sum() * statistics.shape[1]


def auxiliary_loss(statistics: Tensor, config: GPTConfig) -> Tensor:
    """The load-balancing loss of a pass, without its coefficient, from the running statistics.

    ``aux_loss_scope`` model pools the tokens of all layers before the product (``transformers``);
    layer sums the layers' own losses, each divided by ``router_top_k`` (Megatron).
    """
    if config.aux_loss_scope == "layer":
        return statistics
    return balancing_loss(statistics, config.router_top_k)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, auxiliary: Tensor, coefficient: float) -> Tensor:
        ctx.coefficient, ctx.dtype = coefficient, auxiliary.dtype
        return losses.view_as(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, gradient.sum().to(ctx.dtype) * ctx.coefficient, None


def with_auxiliary_gradient(losses: Tensor, auxiliary: Tensor, coefficient: float) -> Tensor:
    """``losses`` with their values as they are and the gradients of ``losses + coefficient *
    auxiliary`` (``auxiliary ()`` added to each), so that a mean over tokens adds the auxiliary loss
    once.
    """
    return _Attached.apply(losses, auxiliary, coefficient)
