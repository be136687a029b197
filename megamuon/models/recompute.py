"""Which calls are computed again in the backward pass.

Owns ``run_layers`` (full recompute: uniform chunks or the first layers) and ``maybe_checkpoint``
(selective). Invariant: a recomputed layer is called as a module, so forward hooks that others put
on it run in the recomputation too; losses and gradients do not depend on the setting, dropout
included.  Tested by ``tests/models/test_recompute.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamuon.models.config import GPTConfig

Running = tuple[Tensor, Tensor | None]  # hidden states, and the routers' running statistics


def _chain(layers: Sequence[nn.Module], routed: bool) -> Callable[..., Running]:
    def call(hidden: Tensor, statistics: Tensor | None, *context: object) -> Running:
        for layer in layers:
            if routed:
                hidden, statistics = layer(hidden, *context, statistics)
            else:
                hidden = layer(hidden, *context)
        return hidden, statistics

    return call


def run_layers(
    layers: Sequence[nn.Module], hidden: Tensor, *context: object, config: GPTConfig, training: bool
) -> Running:
    """Run ``layers`` in order on ``hidden``, each called with ``context`` too, with the asked full
    recompute; gives the last hidden states, and the routers' statistics where there are experts.

    ``uniform`` saves only the input of every chunk of ``num_layers`` layers; ``block`` recomputes
    the first ``num_layers`` layers one by one (all, if None) and saves the rest.  As Megatron's two
    methods.
    """
    recompute = config.recompute
    routed = config.num_experts is not None
    if recompute.granularity != "full" or not training or not torch.is_grad_enabled():
        return _chain(layers, routed)(hidden, None, *context)
    count = len(layers)
    size = (recompute.num_layers or 1) if recompute.method == "uniform" else 1
    covered = count if recompute.method == "uniform" else min(recompute.num_layers or count, count)
    keep_rng = config.hidden_dropout > 0 or config.attention_dropout > 0
    statistics: Tensor | None = None
    for start in range(0, covered, size):
        chunk = _chain(layers[start : min(start + size, covered)], routed)
        hidden, statistics = checkpoint(
            chunk, hidden, statistics, *context, use_reentrant=False, preserve_rng_state=keep_rng
        )
    return _chain(layers[covered:], routed)(hidden, statistics, *context)


def maybe_checkpoint(
    module: nn.Module, name: str, *inputs: Tensor | None, config: GPTConfig, training: bool
) -> Any:
    """``module(*inputs)``, recomputed in the backward if selective recompute names it.  The module
    draws no dropout.
    """
    recompute = config.recompute
    chosen = recompute.granularity == "selective" and name in recompute.modules
    if chosen and training and torch.is_grad_enabled():
        return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False)
    return module(*inputs)
