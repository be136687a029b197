"""Logits and gradients against ``transformers``, from the same state dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.models import GPT
from tests.support.models import GPT2, filled, gradients, small_config, tokens

QWEN: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}


def theirs(family: str, tied: bool) -> torch.nn.Module:
    import transformers

    sizes = {**QWEN, "tie_word_embeddings": tied}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if family == "qwen2":
        # No head_dim field of its own: 48 / 4.
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    elif family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=16, **sizes))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(head_dim=16, **sizes))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # spread gains and biases too, so that a lost one shows
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.mul_(2).add_(0.05 * noise)
    return model.eval()


OURS: dict[str, dict[str, object]] = {
    "qwen2": {"kv_channels": 12},
    "qwen3": {"add_qkv_bias": False, "qk_layernorm": True},
    "llama": {"add_qkv_bias": False},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_logits_and_gradients(family: str, tied: bool) -> None:
    other = theirs(family, tied)
    model = GPT(small_config(tied_embeddings=tied, **OURS[family]))
    model.load_state_dict(other.state_dict(), strict=True)
    ids = tokens(2, 20)
    expected = other(ids).logits
    mine = model(ids)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    labels = ids.roll(-1, 1)
    flat = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    loss = model(ids, labels=labels).mean()
    torch.testing.assert_close(loss, flat, rtol=1e-6, atol=1e-6)
    flat.backward()
    loss.backward()
    reference = {name: p.grad for name, p in other.named_parameters()}
    mine_by_name = gradients(model)
    assert reference.keys() == mine_by_name.keys()
    for name, gradient in mine_by_name.items():
        scale = reference[name].abs().max().item()
        torch.testing.assert_close(
            gradient,
            reference[name],
            rtol=1e-4,
            atol=2e-5 * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_bf16_errs_no_more_than_transformers() -> None:
    other = theirs("qwen2", True).bfloat16()
    model = GPT(small_config(kv_channels=12, attention_backend="unfused")).bfloat16()
    model.load_state_dict(other.state_dict(), strict=True)
    ids = tokens(2, 16)
    narrow, expected = model(ids), other(ids).logits
    exact = model.double()(ids)
    mine, reference = (exact - narrow).abs(), (exact - expected).abs()
    assert narrow.dtype == torch.bfloat16
    assert mine.mean() <= 1.2 * reference.mean()
    assert mine.max() <= 0.05 * exact.abs().max()


def gpt2_names(other: torch.nn.Module) -> dict[str, Tensor]:
    """GPT-2's state dict in ``transformers`` (transposed, q|k|v fused) under our names."""
    state = {key.removeprefix("transformer."): value for key, value in other.state_dict().items()}
    result = {
        "model.embed_tokens.weight": state["wte.weight"],
        "lm_head.weight": state["wte.weight"],
        "model.position_embeddings.weight": state["wpe.weight"],
        "model.norm.weight": state["ln_f.weight"],
        "model.norm.bias": state["ln_f.bias"],
    }
    names = {
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    }
    for index in range(2):
        mine, old = f"model.layers.{index}.", f"h.{index}."
        for name, source in names.items():
            weight = state[f"{old}{source}.weight"]
            result[f"{mine}{name}.weight"] = weight.T if weight.ndim == 2 else weight
            result[f"{mine}{name}.bias"] = state[f"{old}{source}.bias"]
        parts = zip(
            "qkv",
            state[f"{old}attn.c_attn.weight"].T.chunk(3),
            state[f"{old}attn.c_attn.bias"].chunk(3),
            strict=True,
        )
        for part, weight, bias in parts:
            result[f"{mine}self_attn.{part}_proj.weight"] = weight
            result[f"{mine}self_attn.{part}_proj.bias"] = bias
    return result


def test_gpt2_logits() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=48, n_layer=2, n_head=4, n_inner=80, vocab_size=67, n_positions=64)
    other = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in other.parameters():
        parameter.data.mul_(3).add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model = GPT(small_config(**{**GPT2, "norm_epsilon": 1e-5}))
    model.load_state_dict(gpt2_names(other), strict=True)
    ids = tokens(2, 20)
    torch.testing.assert_close(model(ids), other(ids).logits, rtol=1e-5, atol=1e-5)


def test_our_state_dict_loads_there() -> None:
    other = theirs("qwen2", True)
    model = filled(small_config(kv_channels=12))
    other.load_state_dict(model.state_dict(), strict=True)
    ids = tokens(1, 9)
    torch.testing.assert_close(model(ids), other(ids).logits, rtol=1e-5, atol=1e-5)
