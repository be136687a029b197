"""Fields of ``config.json``: used, harmless, or refused by name, in both directions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megamuon.arguments import ModelFlags, config_from_values
from megamuon.conversion import (
    FAMILIES,
    ConversionError,
    config_from_flags,
    flags_from_config,
    model_type_of,
)
from megamuon.conversion.families import OF_TRAINING
from megamuon.models import PRESETS

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_what_old_folders_leave_out() -> None:
    values = flags_from_config(LLAMA, "here")
    assert values["num_query_groups"] == 4 and values["kv_channels"] == 16
    assert values["rotary_base"] == 10000 and values["layernorm_epsilon"] == 1e-6
    assert values["untie_embeddings_and_output_weights"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map: the folder brings code"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantized weights"),
        ({"rope_scaling": YARN}, "rope_type 'yarn': our model has default and llama3 only"),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, "differ"),
        ({"rope_theta": 1234.5}, "rope_theta 1234.5: --rotary-base is a whole number"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096 is in use"),
        ({"model_type": "mixtral", "sliding_window": 4096}, "sliding_window 4096 is in use"),
        ({"layer_types": ["sliding_attention"]}, "layer_types sliding_attention"),
        ({"model_type": "gemma3"}, "model_type 'gemma3': an unknown family"),
        ({"model_type": "qwen2_5_vl"}, "'qwen2_5_vl': vision-language-action models are not in"),
        ({"attention_bias": True}, "attention_bias True: our model computes False only"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': our model computes 'silu' only"),
        ({"residual_multiplier": 0.2}, "residual_multiplier 0.2: a field that this version"),
        ({"use_mrope": True}, "use_mrope True: our model has no such thing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"model_type": "qwen2_moe", "mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8}, "differ"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message) as caught:
        flags_from_config({**LLAMA, **changes}, "config.json")
    assert "\n" not in str(caught.value)


def test_a_window_that_is_switched_off_is_harmless() -> None:
    config = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert flags_from_config(config, "here")["add_qkv_bias"] is True


def test_every_flag_of_the_architecture_is_said() -> None:
    """A new flag of the model is either a family's, or known to be of training or of the run."""
    elsewhere = {"model", "seq_length", "attention_backend", "attention_softmax_in_fp32"}
    elsewhere |= {"moe_grouped_gemm", "moe_token_drop_policy", *OF_TRAINING}
    names = {field.name for field in dataclasses.fields(ModelFlags)} - elsewhere
    for family in FAMILIES.values():
        said = {*family.flags, *(field.dest for field in family.fields.values())}
        assert names - said <= {"num_query_groups", "kv_channels", "ffn_hidden_size"}


@pytest.mark.parametrize(
    ("preset", "family"),
    [
        ("qwen2.5-0.5b", "qwen2"),
        ("qwen3-0.6b", "qwen3"),
        ("llama3-8b", "llama"),
        ("gpt2", "gpt2"),
        ("qwen1.5-moe-a2.7b", "qwen2_moe"),
        ("qwen3-30b-a3b", "qwen3_moe"),
    ],
)
def test_presets_find_their_family(preset: str, family: str) -> None:
    flags = vars(config_from_values(dict(PRESETS[preset])).model)
    config = config_from_flags({**flags, "padded_vocab_size": 512}, dtype="bfloat16")
    assert config["model_type"] == family and config["vocab_size"] == 512
    read = config_from_values(flags_from_config(config, "here")).model
    assert read.num_layers == flags["num_layers"]


def test_what_no_family_has_is_named() -> None:
    flags = {**vars(config_from_values(dict(PRESETS["llama3-8b"])).model), "padded_vocab_size": 8}
    with pytest.raises(ConversionError, match="nearest, llama, has no rotary_percent 0.5"):
        config_from_flags({**flags, "rotary_percent": 0.5}, dtype="float32")


def test_our_own_config_is_not_theirs(tmp_path: Path) -> None:
    assert model_type_of(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model": {"num_layers": 2}}')
    assert model_type_of(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_type": "gpt2"}')
    with pytest.raises(ConversionError, match="'model_type' stands there twice"):
        model_type_of(tmp_path)
