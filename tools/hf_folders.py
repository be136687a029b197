"""Small Hugging Face folders of every family, as either generation of ``transformers`` writes.

Owns the sizes of the random models that conversion is tried with. Invariant: ``transformers``
itself makes model and folder, so what is compared is theirs; it is imported on first use. Used by
``convert_trials.py`` and ``tests/conversion``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}
OF_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "head_dim": 16}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 28}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **EXPERTS, "head_dim": 16}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "sliding_window": None}),
    "gpt2": (
        "GPT2",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 260}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def their_model(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> torch.nn.Module:
    """A random model of the family, gains and biases spread, in evaluation."""
    import transformers

    prefix, sizes = OF_FAMILY[family]
    kind = "GPT2LMHeadModel" if family == "gpt2" else f"{prefix}ForCausalLM"
    config = getattr(transformers, f"{prefix}Config")(**{**sizes, **more})
    config._attn_implementation = "eager"
    model = getattr(transformers, kind)(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.mul_(2).add_(0.05 * noise)
    return model.to(dtype).eval()


def write_folder(
    folder: Path,
    family: str,
    *,
    old: bool = False,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> torch.nn.Module:
    """Save a random model; ``old``: names and config keys of releases 4, else those of 5 as they
    are in memory (fused experts). Returns the model.
    """
    model = their_model(family, dtype, **more)
    size = "100KB" if sharded else "5GB"
    model.save_pretrained(folder, max_shard_size=size, save_original_format=old)
    if old:
        _change_config(folder, _as_release_4)
    return model


def _as_release_4(config: dict[str, Any]) -> None:
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")


def _change_config(folder: Path, change: Any) -> None:
    """Apply ``change(config)`` to the folder's ``config.json``."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
