"""Pieces in place of whole parameters: values, ties, attributes, devices; what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamuon.models import GPT
from megamuon.sharding import ShardingError, apply_sharding, plan_sharding
from tests.support.models import filled, named_generator, small_config, tokens


def group(size: int) -> Any:
    return SimpleNamespace(size=lambda: size)


@pytest.mark.parametrize("tp_rank", [0, 1, 2])
def test_pieces_are_slices_of_the_whole(tp_rank: int) -> None:
    config = small_config(num_attention_heads=6, num_query_groups=3)
    whole, model = filled(config), filled(config)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.model.embed_tokens.weight.mark = "kept"  # type: ignore[attr-defined]
    plan = plan_sharding(model, tp=3)
    apply_sharding(model, plan, tp_rank=tp_rank, group=group(3))
    wanted = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        piece = wanted[name].detach()[plan.placements[name].piece(tp_rank).slices]
        assert torch.equal(parameter, piece), name
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == 4 * piece.numel(), "the whole is kept alive"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.mark == "kept"
    assert not model.model.layers[0].mlp.up_proj.weight.requires_grad
    assert model.model.layers[1].mlp.up_proj.weight.requires_grad


def test_meta_parameters_stay_there_and_can_be_filled_later() -> None:
    with torch.device("meta"):
        model = GPT(small_config())
    apply_sharding(model, plan_sharding(model, tp=2), tp_rank=1, group=group(2))
    assert model.model.embed_tokens.weight.shape == (33, 48)
    assert all(parameter.is_meta for parameter in model.parameters())
    wanted, whole = filled(small_config()), torch.empty(67, 48)
    name = "model.embed_tokens.weight"
    model.initialise_(name, whole, named_generator(name))
    assert torch.equal(whole, wanted.model.embed_tokens.weight)
    with pytest.raises(ValueError, match=r"for the whole \(67, 48\), not for \(33, 48\)"):
        model.initialise_(name, torch.empty(33, 48), named_generator(name))
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_one_rank_changes_nothing() -> None:
    model = filled(small_config())
    before, inputs = model(tokens(1, 8)), dict(model.named_parameters())
    apply_sharding(model, plan_sharding(model, tp=1), tp_rank=0, group=None)
    assert torch.equal(model(tokens(1, 8)), before)
    assert all(inputs[name] is parameter for name, parameter in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_does_not_fit_is_refused() -> None:
    model = filled(small_config())
    plan = plan_sharding(model, tp=2)
    for tp_rank, ranks in ((0, group(3)), (2, group(2)), (0, None)):
        with pytest.raises(ShardingError, match="cannot run a plan for 2 tp ranks"):
            apply_sharding(model, plan, tp_rank=tp_rank, group=ranks)
    other = plan_sharding(filled(small_config(ffn_hidden_size=96)), tp=2)
    with pytest.raises(ShardingError, match=r"up_proj|gate_proj"):
        apply_sharding(model, other, tp_rank=0, group=group(2))
    apply_sharding(model, plan, tp_rank=0, group=group(2))
    with pytest.raises(ShardingError, match="cut it once"):
        apply_sharding(model, plan, tp_rank=0, group=group(2))
