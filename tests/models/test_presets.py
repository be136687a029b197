"""Presets against the published inventories: names, shapes, kinds, totals, on the meta device."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamuon.kernels.rope import RopeScaling
from megamuon.matrices import Kind, LogicalParameter, Route, collect
from megamuon.models import (
    GPT,
    PRESETS,
    GPTConfig,
    ModelConfigError,
    RecomputeConfig,
    count_parameters,
    gpt_config_from_flags,
)

INVENTORIES = json.loads(
    (Path(__file__).parents[1] / "data" / "model_shapes.json").read_text(encoding="utf-8")
)["models"]
DENSE = {
    "qwen2.5-0.5b": "Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen2.5-32b": "Qwen2.5-32B",
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-14b": "Qwen3-14B",
}
MOE = {"qwen1.5-moe-a2.7b": "Qwen1.5-MoE-A2.7B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
PUBLISHED = {**DENSE, **MOE}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Megatron's defaults of the flags that the model room must be given."""

    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    group_query_attention: bool = False
    num_query_groups: int = 1
    kv_channels: int | None = None
    max_position_embeddings: int | None = None
    position_embedding_type: str = "learned_absolute"
    rotary_base: int = 10000
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02


NO_RECOMPUTE = SimpleNamespace(
    recompute_granularity=None,
    recompute_method=None,
    recompute_num_layers=None,
    recompute_modules=None,
)


def from_flags(rows: int, recompute: Any = NO_RECOMPUTE, **flags: object) -> GPTConfig:
    base = {name: getattr(Defaults(), name) for name in Defaults.__dataclass_fields__}
    namespace: Any = SimpleNamespace(**{**base, **flags})
    return gpt_config_from_flags(namespace, padded_vocab_size=rows, recompute=recompute)


def preset_config(name: str) -> GPTConfig:
    preset = dict(PRESETS[name])
    multiple, vocabulary = preset["make_vocab_size_divisible_by"], preset["vocab_size"]
    return from_flags(-(-vocabulary // multiple) * multiple, **preset)  # type: ignore[operator]


@cache
def parameters_of(name: str) -> tuple[LogicalParameter, ...]:
    with torch.device("meta"):
        model = GPT(preset_config(name))
    return collect(model, layers=GPT.layer_classes)


def published(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, route class) of an inventory, layers and experts written out.

    The tables count routers and gates as matrices, as the paper does, and recommend AdamW for them.
    """
    found = {}
    for pattern, shape, experts, layers, optimizer, _, *note in INVENTORIES[PUBLISHED[name]][
        "params"
    ]:
        chosen = "adamw" if note and "recommended AdamW" in note[0] else optimizer
        for layer in range(layers):
            for expert in range(experts):
                key = pattern.replace("{L}", str(layer)).replace("{E}", str(expert))
                found[key] = (tuple(shape), chosen)
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_inventory(name: str) -> None:
    mine = parameters_of(name)
    expected = published(name)
    shapes = {p.name: p.shape for p in mine}
    assert shapes == {key: shape for key, (shape, _) in expected.items()}
    for parameter in mine:
        is_matrix = parameter.route is Route.MATRIX
        assert is_matrix == (expected[parameter.name][1] == "muon"), parameter.name
    totals = INVENTORIES[PUBLISHED[name]]["totals"]
    # As the tables count: routers and gates among the matrices.
    matrices = [p for p in mine if p.route is Route.MATRIX or p.kind is Kind.ROUTER]
    assert len(mine) == totals["tensors"]
    assert sum(p.numel for p in mine) == totals["numel"]
    assert len(matrices) == totals["muon_matrices"]
    assert sum(p.numel for p in matrices) == totals["muon_numel"]
    tied = INVENTORIES[PUBLISHED[name]]["tied"]
    assert [p.aliases for p in mine if p.aliases] == ([("lm_head.weight",)] if tied else [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings(name: str) -> None:
    config, facts = preset_config(name), INVENTORIES[PUBLISHED[name]]["config"]
    assert config.norm_epsilon == facts["rms_norm_eps"]
    assert config.rotary_base == facts["rope_theta"]
    assert config.max_position_embeddings == facts["max_position_embeddings"]
    assert config.num_attention_heads == facts["num_attention_heads"]
    assert config.num_query_groups == facts["num_key_value_heads"]
    assert (config.hidden_dropout, config.attention_dropout) == (0, 0)
    assert config.activation == "swiglu"
    assert config.num_experts == facts.get("num_experts")


@pytest.mark.parametrize(
    ("name", "active"), [("qwen1.5-moe-a2.7b", 2.69e9), ("qwen3-30b-a3b", 3.35e9)]
)
def test_settings_of_experts(name: str, active: float) -> None:
    config, facts = preset_config(name), INVENTORIES[MOE[name]]["config"]
    assert config.router_top_k == facts["num_experts_per_tok"]
    assert config.expert_size == facts["moe_intermediate_size"]
    assert config.moe_shared_expert_size == facts.get("shared_expert_intermediate_size")
    assert config.norm_topk_prob == facts["norm_topk_prob"]
    assert config.aux_loss_coefficient == facts["router_aux_loss_coef"]
    assert config.aux_loss_scope == "model"
    assert config.capacity_factor is None
    assert config.grouped_backend == "auto"
    # Published as 2.7 and 3.3 billion activated parameters.
    assert count_parameters(config).active == pytest.approx(active, rel=2e-3)


def test_the_paper_counts_all_2d_parameters() -> None:
    """4538 matrices, 4320 of them experts' (DMuon-2, C.5), of 4659 tensors."""
    mine = parameters_of("qwen1.5-moe-a2.7b")
    assert len(mine) == 4659
    assert sum(len(p.shape) == 2 for p in mine) == 4538
    assert sum(p.expert for p in mine) == 4320
    assert sum(p.route is Route.MATRIX for p in mine) == 4488


def test_a_model_of_many_experts_is_described_quickly() -> None:
    start = time.process_time()  # of this process alone: others may keep the cores busy
    assert len(parameters_of.__wrapped__("qwen3-30b-a3b")) == 18867
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("gpt2", 124_475_904),
        ("llama3-8b", 8_030_261_248),
        ("tiny", 5_022_528),
        ("nano", 79_710),
        ("tiny-moe", 7_983_168),
        ("nano-moe", 126_060),
    ],
)
def test_totals(name: str, total: int) -> None:
    mine = parameters_of(name)
    assert sum(p.numel for p in mine) == total
    assert count_parameters(preset_config(name)).total == total


@pytest.mark.parametrize("name", ["tiny", "nano", "tiny-moe", "nano-moe"])
def test_small_presets_have_enough_units(name: str) -> None:
    threshold = PRESETS[name]["owner_unit_threshold"]
    layer = [p for p in parameters_of(name) if p.layer == "model.layers.0"]
    large = [p for p in layer if p.numel >= threshold]  # type: ignore[operator]
    assert len(large) + (len(large) < len(layer)) >= 4


def test_nano_is_odd() -> None:
    config = preset_config("nano")
    assert count_parameters(config).total <= 100_000
    assert all(config.vocab_size % divisor for divisor in (2, 3, 4))
    assert config.kv_channels % 2 == 0
    assert 1 < config.num_query_groups < config.num_attention_heads
    assert config.query_size != config.hidden_size
    assert config.tied_embeddings
    assert config.add_qkv_bias


def test_nano_moe_is_odd() -> None:
    config = preset_config("nano-moe")
    assert count_parameters(config).total < 150_000
    sizes = (config.num_experts, config.expert_size, config.moe_shared_expert_size)
    assert all(size % 2 == 1 for size in sizes if size is not None)
    assert config.router_top_k == 2
    assert config.moe_shared_expert_gate
    assert config.aux_loss_coefficient > 0


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_tiny_fits_kernels_and_bytes(name: str) -> None:
    config = preset_config(name)
    assert config.expert_size % 16 == 0
    assert config.kv_channels % 16 == 0
    assert config.max_position_embeddings >= 1024
    assert config.vocab_size >= 257


def test_megatron_defaults_make_gpt2() -> None:
    config = from_flags(
        50304, num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=32
    )
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (256, 16, 4)
    assert config.activation == "gelu"
    assert config.tied_embeddings
    assert config.add_bias_linear


def test_rules_and_optional_flags() -> None:
    base = {
        "num_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    config = from_flags(
        64,
        swiglu=True,
        num_query_groups=2,  # ignored without --group-query-attention, as in Megatron
        position_embedding_type="rope",
        rotary_percent=0.5,
        use_rope_scaling=True,
        rope_scaling_factor=4.0,
        rotary_seq_len_interpolation_factor=2,
        layernorm_zero_centered_gamma=True,
        attention_backend="unfused",
        **base,
    )
    assert config.ffn_hidden_size == 256
    assert config.num_query_groups == 4
    assert config.rotary_size == 12
    assert config.rope_scaling == RopeScaling(factor=4.0)
    assert config.rotary_interpolation == 2
    assert config.layernorm_1p
    assert config.attention_backend == "unfused"
    assert from_flags(64, openai_gelu=True, **base).activation == "gelu_tanh"
    assert from_flags(64, squared_relu=True, **base).activation == "squared_relu"
    recompute = SimpleNamespace(
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=1,
        recompute_modules=None,
    )
    assert from_flags(64, recompute, **base).recompute == RecomputeConfig(
        granularity="full", method="block", num_layers=1
    )


def test_expert_flags() -> None:
    base: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "swiglu": True,
        "add_bias_linear": False,
    }
    assert from_flags(64, **base).num_experts is None
    experts: dict[str, Any] = {**base, "num_experts": 6, "moe_aux_loss_coeff": 0.5}
    config = from_flags(64, **experts)
    assert (config.num_experts, config.router_top_k) == (6, 2)
    assert config.expert_size == config.ffn_hidden_size
    assert config.moe_shared_expert_size is None
    assert (config.aux_loss_coefficient, config.aux_loss_scope) == (0.5, "model")
    config = from_flags(
        64,
        moe_router_topk=3,
        moe_ffn_hidden_size=40,
        moe_shared_expert_intermediate_size=56,
        moe_shared_expert_gate=True,
        moe_router_norm_topk_prob=True,
        moe_router_load_balancing_type="none",
        moe_aux_loss_scope="layer",
        moe_expert_capacity_factor=1.25,
        moe_token_drop_policy="position",
        moe_grouped_gemm=False,
        **experts,
    )
    assert (config.router_top_k, config.expert_size, config.moe_shared_expert_size) == (3, 40, 56)
    assert config.moe_shared_expert_gate
    assert config.norm_topk_prob
    assert (config.aux_loss_coefficient, config.aux_loss_scope) == (0.0, "layer")
    assert (config.capacity_factor, config.drop_policy) == (1.25, "position")
    assert config.grouped_backend == "loop"
    with pytest.raises(ModelConfigError, match="'sinkhorn': choose aux_loss or none"):
        from_flags(64, moe_router_load_balancing_type="sinkhorn", **experts)


def test_missing_and_contradictory_flags() -> None:
    with pytest.raises(ModelConfigError, match="--num-layers, --num-attention-heads"):
        from_flags(64, hidden_size=8, max_position_embeddings=4)
    base = {"num_layers": 1, "hidden_size": 10, "max_position_embeddings": 4}
    with pytest.raises(ModelConfigError, match="set --kv-channels"):
        from_flags(64, num_attention_heads=3, **base)
    with pytest.raises(ModelConfigError, match="swiglu and squared_relu"):
        from_flags(64, num_attention_heads=5, swiglu=True, squared_relu=True, **base)
