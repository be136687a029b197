"""Logits, gradients and the load-balancing loss against ``transformers``, from the same weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamuon.models import GPT, GPTConfig
from tests.support.models import gradients, small_config, tokens

EXPERTS, TOP_K, WIDTH, SHARED, COEFFICIENT = 6, 2, 20, 28, 0.3
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
    "experts_implementation": "eager",  # theirs refuses odd widths in BF16
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": WIDTH,
    "router_aux_loss_coef": COEFFICIENT,
    "output_router_logits": True,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def theirs(family: str, norm_topk_prob: bool) -> torch.nn.Module:
    import transformers

    sizes = {**SIZES, "norm_topk_prob": norm_topk_prob}
    if family == "qwen2":
        config = transformers.Qwen2MoeConfig(shared_expert_intermediate_size=SHARED, **sizes)
        model: torch.nn.Module = transformers.Qwen2MoeForCausalLM(config)
    else:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(head_dim=16, **sizes))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 0.5 if name.endswith("mlp.gate.weight") else 0.05  # an uneven router shows more
        parameter.data.mul_(2).add_(scale * noise)
    return model.eval()


def ours(family: str, norm_topk_prob: bool) -> GPTConfig:
    more: dict[str, object] = {"add_qkv_bias": False, "qk_layernorm": True}
    if family == "qwen2":
        more = {"kv_channels": 12, "moe_shared_expert_size": SHARED, "moe_shared_expert_gate": True}
    return small_config(
        num_layers=3,
        tied_embeddings=False,
        num_experts=EXPERTS,
        router_top_k=TOP_K,
        moe_ffn_hidden_size=WIDTH,
        norm_topk_prob=norm_topk_prob,
        aux_loss_coefficient=COEFFICIENT,
        **more,
    )


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their fused tensors (gate above up) under one name per expert, as on the Hub."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if found is None:
            result[name] = tensor
            continue
        for index, part in enumerate(tensor):
            prefix = f"{found[1]}.{index}"
            if found[2] == "down_proj":
                result[f"{prefix}.down_proj.weight"] = part
            else:
                result[f"{prefix}.gate_proj.weight"] = part[:WIDTH]
                result[f"{prefix}.up_proj.weight"] = part[WIDTH:]
    return result


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logits_gradients_and_auxiliary_loss(
    family: str, norm_topk_prob: bool, masked: bool
) -> None:
    other = theirs(family, norm_topk_prob)
    model = GPT(ours(family, norm_topk_prob))
    model.load_state_dict(by_expert(other.state_dict()), strict=True)
    ids = tokens(2, 20)
    labels, kept = ids.roll(-1, 1), torch.ones(2, 20, dtype=torch.int64)
    if masked:
        kept[1, 13:] = 0  # padding to the right
    expected = other(ids, attention_mask=kept)
    mine = model(ids)  # causal: what pads on the right is seen by nothing before it
    real = kept.bool()
    torch.testing.assert_close(mine[real], expected.logits[real], rtol=1e-5, atol=2e-5)
    flat = functional.cross_entropy(expected.logits[real], labels[real])
    (flat + COEFFICIENT * expected.aux_loss).backward()
    losses = model(ids, labels=labels, loss_mask=kept if masked else None)
    loss = losses.sum() / kept.sum()
    torch.testing.assert_close(loss, flat, rtol=1e-6, atol=1e-6)
    assert model.auxiliary_loss is not None
    torch.testing.assert_close(model.auxiliary_loss, expected.aux_loss, rtol=1e-6, atol=0)
    loss.backward()
    reference = by_expert({n: p.grad for n, p in other.named_parameters() if p.grad is not None})
    found = gradients(model)
    assert reference.keys() == found.keys()
    for name, gradient in found.items():
        scale = reference[name].abs().max().item()
        torch.testing.assert_close(
            gradient,
            reference[name],
            rtol=1e-4,
            atol=2e-5 * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_padding_by_attention_mask_is_not_counted() -> None:
    """Left padding, which only the attention mask tells of."""
    other = theirs("qwen2", False)
    model = GPT(ours("qwen2", False))
    model.load_state_dict(by_expert(other.state_dict()), strict=True)
    ids, kept = tokens(2, 16), torch.ones(2, 16, dtype=torch.int64)
    kept[0, :5] = 0
    positions = (kept.cumsum(1) - 1).clamp_min(0)
    expected = other(ids, attention_mask=kept, position_ids=positions)
    hidden_from = torch.ones(16, 16, dtype=torch.bool).triu(1) | (kept == 0)[:, None, None, :]
    logits = model(ids, position_ids=positions, attention_mask=hidden_from)
    real = kept.bool()
    torch.testing.assert_close(logits[real], expected.logits[real], rtol=1e-5, atol=2e-5)
    assert model.auxiliary_loss is not None
    # Tokens that see nothing differ in both models, and neither counts them.
    torch.testing.assert_close(model.auxiliary_loss, expected.aux_loss, rtol=1e-6, atol=0)


def test_bf16_errs_no_more_than_transformers() -> None:
    other = theirs("qwen2", False).bfloat16()
    model = GPT(ours("qwen2", False)).bfloat16()
    model.load_state_dict(by_expert(other.state_dict()), strict=True)
    ids = tokens(2, 12)
    narrow, expected = model(ids), other(ids).logits
    exact = model.double()(ids)
    mine, reference = (exact - narrow).abs(), (exact - expected).abs()
    assert narrow.dtype == torch.bfloat16
    assert mine.median() <= 1.2 * reference.median()
