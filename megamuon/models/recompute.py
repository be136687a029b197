"""Which calls are computed again in the backward pass.

Owns ``run_layers`` (full recompute: uniform chunks or the first layers) and ``maybe_checkpoint``
(selective). Invariant: a recomputed layer is called as a module, so forward hooks that others put
on it run in the recomputation too; losses and gradients do not depend on the setting, dropout
included.  Tested by ``tests/models/test_recompute.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamuon.models.config import GPTConfig


def _chain(layers: Sequence[nn.Module]) -> Callable[..., Tensor]:
    def call(hidden: Tensor, *context: object) -> Tensor:
        for layer in layers:
            hidden = layer(hidden, *context)
        return hidden

    return call


def run_layers(
    layers: Sequence[nn.Module], hidden: Tensor, *context: object, config: GPTConfig, training: bool
) -> Tensor:
    """Run ``layers`` in order on ``hidden``, each called with ``context`` too, with the asked full
    recompute.

    ``uniform`` saves only the input of every chunk of ``num_layers`` layers; ``block`` recomputes
    the first ``num_layers`` layers one by one (all, if None) and saves the rest.  As Megatron's two
    methods.
    """
    recompute = config.recompute
    if recompute.granularity != "full" or not training or not torch.is_grad_enabled():
        return _chain(layers)(hidden, *context)
    count = len(layers)
    size = (recompute.num_layers or 1) if recompute.method == "uniform" else 1
    covered = count if recompute.method == "uniform" else min(recompute.num_layers or count, count)
    keep_rng = config.hidden_dropout > 0 or config.attention_dropout > 0
    for start in range(0, covered, size):
        chunk = _chain(layers[start : min(start + size, covered)])
        hidden = checkpoint(
            chunk, hidden, *context, use_reentrant=False, preserve_rng_state=keep_rng
        )
    return _chain(layers[covered:])(hidden, *context)


def maybe_checkpoint(
    module: nn.Module, name: str, inputs: Tensor, *, config: GPTConfig, training: bool
) -> Tensor:
    """``module(inputs)``, recomputed in the backward if selective recompute names it.  The module
    draws no dropout.
    """
    recompute = config.recompute
    chosen = recompute.granularity == "selective" and name in recompute.modules
    if chosen and training and torch.is_grad_enabled():
        return checkpoint(module, inputs, use_reentrant=False, preserve_rng_state=False)
    return module(inputs)
