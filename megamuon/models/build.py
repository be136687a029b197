"""From flags to a model description.

Owns ``gpt_config_from_flags``.  Invariant: attribute names are Megatron's dests, so the flag table
is the only vocabulary; what the flags leave open is filled by Megatron's own rules (FFN of 4 x
hidden, head size hidden / heads). Tested by ``tests/models/test_presets.py``.
"""

from __future__ import annotations

from typing import Protocol

from megamuon.kernels.rope import RopeScaling
from megamuon.models.config import GPTConfig, ModelConfigError, RecomputeConfig
from megamuon.sizes import head_channels, mlp_width


class ModelFlags(Protocol):
    """What this room reads of the model flags."""

    num_layers: int | None
    hidden_size: int | None
    ffn_hidden_size: int | None
    num_attention_heads: int | None
    group_query_attention: bool
    num_query_groups: int | None
    kv_channels: int | None
    max_position_embeddings: int | None
    position_embedding_type: str
    rotary_base: float
    normalization: str
    layernorm_epsilon: float
    swiglu: bool
    add_bias_linear: bool
    add_qkv_bias: bool
    qk_layernorm: bool
    untie_embeddings_and_output_weights: bool
    hidden_dropout: float
    attention_dropout: float
    init_method_std: float


# Config field -> dest of the settings that a flag table may leave out; the config's default holds
# where it does.
_OPTIONAL = {
    "rotary_percent": "rotary_percent",
    "rotary_interleaved": "rotary_interleaved",
    "layernorm_1p": "layernorm_zero_centered_gamma",
    "embedding_init_method_std": "embedding_init_method_std",
    "attention_softmax_in_fp32": "attention_softmax_in_fp32",
    "attention_backend": "attention_backend",
    "num_experts": "num_experts",
    "router_top_k": "moe_router_topk",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_shared_expert_size": "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate": "moe_shared_expert_gate",
    "norm_topk_prob": "moe_router_norm_topk_prob",
    "aux_loss_scope": "moe_aux_loss_scope",
    "capacity_factor": "moe_expert_capacity_factor",
    "drop_policy": "moe_token_drop_policy",
}


class RecomputeFlags(Protocol):
    """What this room reads of the recompute flags."""

    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None
    recompute_modules: tuple[str, ...] | list[str] | None


def recompute_from_flags(flags: RecomputeFlags) -> RecomputeConfig:
    """The recompute setting; no module named means ``core_attn``."""
    return RecomputeConfig(
        granularity=flags.recompute_granularity,
        method=flags.recompute_method,
        num_layers=flags.recompute_num_layers,
        modules=tuple(flags.recompute_modules or ("core_attn",)),
    )


def _activation(flags: ModelFlags) -> str:
    names = ("swiglu", "squared_relu", "openai_gelu")
    chosen = [name for name in names if getattr(flags, name, False)]
    if len(chosen) > 1:
        raise ModelConfigError(f"activation: {' and '.join(chosen)} exclude each other; keep one")
    if not chosen:
        return "gelu"
    return "gelu_tanh" if chosen[0] == "openai_gelu" else chosen[0]


def _rope_scaling(flags: ModelFlags) -> RopeScaling | None:
    if not getattr(flags, "use_rope_scaling", False):
        return None
    return RopeScaling(factor=getattr(flags, "rope_scaling_factor", RopeScaling.factor))


def _aux_loss_coefficient(flags: ModelFlags) -> float:
    kind = getattr(flags, "moe_router_load_balancing_type", "aux_loss")
    if kind not in ("aux_loss", "none"):
        raise ModelConfigError(f"moe_router_load_balancing_type {kind!r}: choose aux_loss or none")
    return float(getattr(flags, "moe_aux_loss_coeff", 0.0)) if kind == "aux_loss" else 0.0


def gpt_config_from_flags(
    model: ModelFlags, *, padded_vocab_size: int, recompute: RecomputeFlags
) -> GPTConfig:
    """The description of the model that the flags ask for.

    ``padded_vocab_size``: rows of the embedding.  Raises ModelConfigError that names every field at
    fault.
    """
    required = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    missing = [name for name in required if getattr(model, name) is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ModelConfigError(
            f"the model lacks {flags}: set them, or choose a preset with --model"
        )
    hidden, heads = model.hidden_size, model.num_attention_heads
    assert hidden is not None and heads is not None  # narrowed by the check above
    channels = model.kv_channels
    if channels is None:
        channels = head_channels(hidden, heads)
    if channels is None:
        raise ModelConfigError(
            f"num_attention_heads {heads} does not divide hidden_size {hidden}: set --kv-channels"
        )
    ffn = model.ffn_hidden_size
    if ffn is None:
        ffn = mlp_width(hidden, gated=model.swiglu)
    optional = {
        name: getattr(model, dest) for name, dest in _OPTIONAL.items() if hasattr(model, dest)
    }
    groups = model.num_query_groups if model.group_query_attention else heads
    return GPTConfig(
        num_layers=model.num_layers,  # type: ignore[arg-type]
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups or heads,
        kv_channels=channels,
        vocab_size=padded_vocab_size,
        max_position_embeddings=model.max_position_embeddings,  # type: ignore[arg-type]
        position_embedding=model.position_embedding_type,
        rotary_base=float(model.rotary_base),
        rotary_interpolation=float(
            getattr(model, "rotary_seq_len_interpolation_factor", None) or 1
        ),
        rope_scaling=_rope_scaling(model),
        normalization=model.normalization,
        norm_epsilon=model.layernorm_epsilon,
        activation=_activation(model),
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        tied_embeddings=not model.untie_embeddings_and_output_weights,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        aux_loss_coefficient=_aux_loss_coefficient(model),
        grouped_backend="auto" if getattr(model, "moe_grouped_gemm", True) else "loop",
        recompute=recompute_from_flags(recompute),
        **optional,
    )
