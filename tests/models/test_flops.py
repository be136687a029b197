"""Closed-form counts against the built modules and torch's own FLOP counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megamuon.matrices import Kind, collect
from megamuon.models import GPT, RecomputeConfig, count_parameters, flops_per_token
from tests.support.models import GPT2, filled, small_config, tokens

CHANGES = [
    {},
    {"tied_embeddings": False},
    {"qk_layernorm": True, "add_qkv_bias": False},
    GPT2,
    {**GPT2, "qk_layernorm": True, "activation": "swiglu"},
    {"num_experts": 5, "router_top_k": 2, "moe_ffn_hidden_size": 20},
    {
        "num_experts": 4,
        "router_top_k": 3,
        "moe_shared_expert_size": 28,
        "moe_shared_expert_gate": True,
    },
]


@pytest.mark.parametrize("changes", CHANGES)
def test_parameters_by_kind(changes: dict[str, object]) -> None:
    config = small_config(**changes)
    with torch.device("meta"):
        parameters = collect(GPT(config), layers=GPT.layer_classes)
    counted = count_parameters(config)
    for kind, mine in {
        Kind.MATRIX: counted.matrices,
        Kind.VECTOR: counted.vectors,
        Kind.EMBEDDING: counted.embeddings,
        Kind.HEAD: counted.head,
        Kind.ROUTER: counted.routers,
    }.items():
        assert sum(p.numel for p in parameters if p.kind is kind) == mine, kind
    assert counted.total == sum(p.numel for p in parameters)


@pytest.mark.parametrize("changes", CHANGES)
def test_flops_against_the_counter(changes: dict[str, object]) -> None:
    """torch counts every score; ours the lower triangle, so the difference is known exactly."""
    config, length = small_config(attention_backend="unfused", **changes), 16
    ids = tokens(2, length)
    with FlopCounterMode(display=False) as counter:
        filled(config)(ids, labels=ids).mean().backward()
    per_token = counter.get_total_flops() / ids.numel()
    upper = 3 * 2 * 2 * config.num_layers * config.query_size * (length - (length + 1) / 2)
    assert flops_per_token(config, length) == pytest.approx(per_token - upper, rel=1e-12)


def test_active_parameters() -> None:
    """A token that goes to every expert meets all elements; else those of the others are left."""
    sizes: dict[str, object] = {"num_experts": 5, "moe_ffn_hidden_size": 20}
    every = count_parameters(small_config(router_top_k=5, **sizes))
    assert every.active == every.total
    two = count_parameters(small_config(router_top_k=2, **sizes))
    assert two.total - two.active == 2 * 3 * (3 * 48 * 20)


def test_recompute_is_not_counted() -> None:
    plain = small_config()
    again = small_config(recompute=RecomputeConfig(granularity="full", method="uniform"))
    assert flops_per_token(plain, 32) == flops_per_token(again, 32)
