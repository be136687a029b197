"""Recompute changes what is kept, never what comes out: gradients are equal bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamuon.models import GPT, DecoderLayer, RecomputeConfig
from tests.support.models import filled, gradients, small_config, tokens

SETTINGS = [
    RecomputeConfig(granularity="full", method="uniform", num_layers=1),
    RecomputeConfig(granularity="full", method="uniform", num_layers=2),
    RecomputeConfig(granularity="full", method="uniform"),
    RecomputeConfig(granularity="full", method="block", num_layers=2),
    RecomputeConfig(granularity="full", method="block"),
    RecomputeConfig(granularity="selective"),
    RecomputeConfig(granularity="selective", modules=("core_attn", "mlp")),
]


def run(recompute: RecomputeConfig, dropout: float) -> tuple[GPT, Tensor, dict[str, Tensor]]:
    config = small_config(
        num_layers=3, recompute=recompute, hidden_dropout=dropout, attention_dropout=dropout
    )
    model, ids = filled(config), tokens(2, 16)
    torch.manual_seed(11)
    losses = model(ids, labels=ids)
    losses.mean().backward()
    return model, losses, gradients(model)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recompute", SETTINGS)
def test_losses_and_gradients_are_equal(recompute: RecomputeConfig, dropout: float) -> None:
    _, expected, wanted = run(RecomputeConfig(), dropout)
    _, losses, got = run(recompute, dropout)
    assert torch.equal(losses, expected)
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize(
    ("recompute", "calls"),
    [(RecomputeConfig(), [1, 1, 1])]
    + [(SETTINGS[i], c) for i, c in [(0, [2] * 3), (1, [2] * 3), (3, [2, 2, 1]), (5, [1] * 3)]],
)
def test_layers_run_again_as_modules(recompute: RecomputeConfig, calls: list[int]) -> None:
    """Hooks on a layer must fire in its recomputation: a runtime gathers weights there."""
    model, ids = filled(small_config(num_layers=3, recompute=recompute)), tokens(2, 16)
    seen = [0, 0, 0]

    def count(index: int) -> None:
        seen[index] += 1

    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        layer.register_forward_pre_hook(lambda *_, i=index: count(i))
    model(ids, labels=ids).mean().backward()
    assert seen == calls


def test_less_is_kept() -> None:
    """Bytes that autograd saves fall with every module that is recomputed."""

    def saved(recompute: RecomputeConfig) -> int:
        config = small_config(num_layers=3, recompute=recompute, attention_backend="unfused")
        model, ids = filled(config), tokens(2, 32)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            losses = model(ids, labels=ids)  # kept alive, so that no storage address is used twice
        assert losses.requires_grad
        return sum(storages.values())

    order = [SETTINGS[0], SETTINGS[6], SETTINGS[5], RecomputeConfig()]
    kept = [saved(recompute) for recompute in order]
    assert kept == sorted(set(kept))


def test_evaluation_recomputes_nothing() -> None:
    model, ids = filled(small_config(recompute=SETTINGS[0])).eval(), tokens(1, 8)
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model(ids, labels=ids).mean().backward()
    assert len(calls) == 1
