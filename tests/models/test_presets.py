"""Presets against the published inventories: names, shapes, kinds, totals, on the meta device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamuon.kernels.rope import RopeScaling
from megamuon.matrices import LogicalParameter, Route, collect
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


def parameters_of(name: str) -> tuple[LogicalParameter, ...]:
    with torch.device("meta"):
        model = GPT(preset_config(name))
    return collect(model, layers=GPT.layer_classes)


def published(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, route class) of an inventory, layers written out."""
    found = {}
    for pattern, shape, _, layers, optimizer, *_ in INVENTORIES[DENSE[name]]["params"]:
        for layer in range(layers):
            found[pattern.replace("{L}", str(layer))] = (tuple(shape), optimizer)
    return found


@pytest.mark.parametrize("name", DENSE)
def test_inventory(name: str) -> None:
    mine = parameters_of(name)
    expected = published(name)
    shapes = {p.name: p.shape for p in mine}
    assert shapes == {key: shape for key, (shape, _) in expected.items()}
    for parameter in mine:
        is_matrix = parameter.route is Route.MUON
        assert is_matrix == (expected[parameter.name][1] == "muon"), parameter.name
    totals = INVENTORIES[DENSE[name]]["totals"]
    matrices = [p for p in mine if p.route is Route.MUON]
    assert len(mine) == totals["tensors"]
    assert sum(p.numel for p in mine) == totals["numel"]
    assert len(matrices) == totals["muon_matrices"]
    assert sum(p.numel for p in matrices) == totals["muon_numel"]
    tied = INVENTORIES[DENSE[name]]["tied"]
    assert [p.aliases for p in mine if p.aliases] == ([("lm_head.weight",)] if tied else [])


@pytest.mark.parametrize("name", DENSE)
def test_settings(name: str) -> None:
    config, facts = preset_config(name), INVENTORIES[DENSE[name]]["config"]
    assert config.norm_epsilon == facts["rms_norm_eps"]
    assert config.rotary_base == facts["rope_theta"]
    assert config.max_position_embeddings == facts["max_position_embeddings"]
    assert config.num_attention_heads == facts["num_attention_heads"]
    assert config.num_query_groups == facts["num_key_value_heads"]
    assert (config.hidden_dropout, config.attention_dropout) == (0, 0)
    assert config.activation == "swiglu"


@pytest.mark.parametrize(
    ("name", "total"),
    [("gpt2", 124_475_904), ("llama3-8b", 8_030_261_248), ("tiny", 5_022_528), ("nano", 79_710)],
)
def test_totals(name: str, total: int) -> None:
    mine = parameters_of(name)
    assert sum(p.numel for p in mine) == total
    assert count_parameters(preset_config(name)).total == total


@pytest.mark.parametrize("name", ["tiny", "nano"])
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


def test_tiny_fits_kernels_and_bytes() -> None:
    config = preset_config("tiny")
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


def test_missing_and_contradictory_flags() -> None:
    with pytest.raises(ModelConfigError, match="--num-layers, --num-attention-heads"):
        from_flags(64, hidden_size=8, max_position_embeddings=4)
    base = {"num_layers": 1, "hidden_size": 10, "max_position_embeddings": 4}
    with pytest.raises(ModelConfigError, match="set --kv-channels"):
        from_flags(64, num_attention_heads=3, **base)
    with pytest.raises(ModelConfigError, match="swiglu and squared_relu"):
        from_flags(64, num_attention_heads=5, swiglu=True, squared_relu=True, **base)
