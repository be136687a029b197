"""The model families of ``transformers`` that this project trains: names and fields, as data.

Owns ``FAMILIES``: for each ``model_type`` what its architecture always is (in values of our flags),
which field of ``config.json`` is which flag, which fields have one value that our model computes,
which mean nothing to weights and function, and under which names its tensors are stored by either
generation of the library.  Invariant: a field that is in none of these lists is unknown, and
refused. Tested by ``tests/conversion``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megamuon.checkpoint import CheckpointError


class ConversionError(CheckpointError):
    """A foreign folder that cannot be read, or a checkpoint that no foreign form can hold."""


Config = Mapping[str, Any]
Default = Callable[[Config], Any]


def _required(_config: Config) -> Any:
    raise KeyError


def _plain(value: Any) -> Default:
    return lambda _config: value


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of ``config.json`` that is the value of a flag."""

    dest: str
    default: Default = _required  # where it is absent or null, from the other fields
    values: Mapping[Any, Any] | None = None  # theirs -> ours; None: the same
    spare: bool = False  # written only where the folder came with it, or it is not the default


@dataclass(frozen=True, kw_only=True)
class Name:
    """Where a parameter of ours lies: ``{L}`` is a layer, ``{E}`` an expert of either name.

    ``part`` (i, n): rows i of n even parts, after ``transpose``; ``fused``: index ``{E}`` of dim 0.
    """

    ours: str
    theirs: str
    part: tuple[int, int] = (0, 1)
    transpose: bool = False
    fused: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``."""

    model_type: str
    architecture: str  # the class that ``architectures`` names
    flags: Mapping[str, Any]  # by dest; PLAIN holds for the rest
    fields: Mapping[str, Field]
    must: Mapping[str, tuple[Any, ...]]  # values that our model computes; the first is written
    harmless: frozenset[str]
    rope_base: float | None  # of a config that names none; None: no rotary positions
    names: tuple[tuple[Name, ...], ...]  # spellings on disk; an export uses the first


# Our model without any of its options; every family says what it has of them.
PLAIN: Mapping[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "swiglu": True,
    "squared_relu": False,
    "openai_gelu": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "group_query_attention": True,
    "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_norm_topk_prob": True,
    "moe_expert_capacity_factor": None,
}

# Values that say how a model is trained and not what its weights compute.
OF_TRAINING = frozenset(
    ("hidden_dropout", "attention_dropout", "init_method_std", "moe_aux_loss_coeff")
    + ("moe_router_load_balancing_type", "moe_aux_loss_scope", "make_vocab_size_divisible_by")
)

# Fields of any config: who wrote it, how text is generated, how a forward is run.
HARMLESS = frozenset(
    ("architectures", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
    + ("bos_token_id", "eos_token_id", "pad_token_id", "_attn_implementation", "return_dict")
    + ("output_attentions", "output_hidden_states", "output_router_logits", "max_window_layers")
    + ("_attn_implementation_autoset", "task_specific_params", "id2label", "label2id", "model_type")
    + ("chunk_size_feed_forward", "problem_type", "_num_labels", "is_llama_config")
    + ("transformers.js_config", "max_length", "min_length", "max_new_tokens", "do_sample")
    + ("temperature", "top_p", "top_k", "num_beams", "repetition_penalty")
)
# Switches of what our model does not have: harmless while they are off.
OFF = frozenset(
    ("use_mrope", "rope_interleaved", "is_encoder_decoder", "tie_encoder_decoder", "pruned_heads")
)
# Read by functions of their own (``hf_config``).
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "layer_types"})

_SAME = Name(ours="{N}", theirs="{N}")  # the name as it is
_EXPERT = "model.layers.{L}.mlp.experts.{E}."
_FUSED = (
    Name(
        ours=_EXPERT + "gate_proj.weight",
        theirs="model.layers.{L}.mlp.experts.gate_up_proj",
        part=(0, 2),
        fused=True,
    ),
    Name(
        ours=_EXPERT + "up_proj.weight",
        theirs="model.layers.{L}.mlp.experts.gate_up_proj",
        part=(1, 2),
        fused=True,
    ),
    Name(
        ours=_EXPERT + "down_proj.weight",
        theirs="model.layers.{L}.mlp.experts.down_proj",
        fused=True,
    ),
    _SAME,
)
_MIXTRAL_BLOCK = "model.layers.{L}.block_sparse_moe."
_MIXTRAL_NAMES = (
    *(
        Name(
            ours=f"{_EXPERT}{mine}.weight",
            theirs=f"{_MIXTRAL_BLOCK}experts.{{E}}.{old}.weight",
        )
        for mine, old in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
    ),
    Name(ours="model.layers.{L}.mlp.gate.weight", theirs=_MIXTRAL_BLOCK + "gate.weight"),
    _SAME,
)


def _gpt2_names(prefix: str) -> tuple[Name, ...]:
    """GPT-2 stores maps as (inputs, outputs), and query, key and value as one."""
    mine, old = "model.layers.{L}.", prefix + "h.{L}."
    maps = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc"}
    maps["mlp.down_proj"] = "mlp.c_proj"
    norms = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    found = [
        Name(ours="model.embed_tokens.weight", theirs=prefix + "wte.weight"),
        Name(ours="model.position_embeddings.weight", theirs=prefix + "wpe.weight"),
        Name(ours="model.norm.{B}", theirs=prefix + "ln_f.{B}"),
        Name(ours="lm_head.weight", theirs="lm_head.weight"),
    ]
    for ours, theirs in {**maps, **norms}.items():
        weight = Name(
            ours=f"{mine}{ours}.weight", theirs=f"{old}{theirs}.weight", transpose=ours in maps
        )
        found += [weight, Name(ours=f"{mine}{ours}.bias", theirs=f"{old}{theirs}.bias")]
    for place, part in enumerate("qkv"):
        ours, theirs = f"{mine}self_attn.{part}_proj.", old + "attn.c_attn."
        found += [
            Name(ours=f"{ours}weight", theirs=f"{theirs}weight", part=(place, 3), transpose=True),
            Name(ours=f"{ours}bias", theirs=f"{theirs}bias", part=(place, 3)),
        ]
    return tuple(found)


def _head_width(config: Config) -> Any:
    return config["hidden_size"] // config["num_attention_heads"]


_TIED = {True: False, False: True}  # tie_word_embeddings -> untie_embeddings_and_output_weights
_FIELDS: Mapping[str, Field] = {
    "num_hidden_layers": Field(dest="num_layers"),
    "hidden_size": Field(dest="hidden_size"),
    "intermediate_size": Field(dest="ffn_hidden_size"),
    "num_attention_heads": Field(dest="num_attention_heads"),
    "num_key_value_heads": Field(
        dest="num_query_groups", default=lambda config: config["num_attention_heads"]
    ),
    "head_dim": Field(dest="kv_channels", default=_head_width),
    "vocab_size": Field(dest="padded_vocab_size"),
    "max_position_embeddings": Field(dest="max_position_embeddings"),
    "rms_norm_eps": Field(dest="layernorm_epsilon", default=_plain(1e-6)),
    "tie_word_embeddings": Field(
        dest="untie_embeddings_and_output_weights", default=_plain(False), values=_TIED
    ),
    "attention_dropout": Field(dest="attention_dropout", default=_plain(0.0)),
    "initializer_range": Field(dest="init_method_std", default=_plain(0.02)),
}
_SPARE_WIDTH = {"head_dim": Field(dest="kv_channels", default=_head_width, spare=True)}
_ROUTING: Mapping[str, Field] = {
    "num_experts_per_tok": Field(dest="moe_router_topk"),
    "router_aux_loss_coef": Field(dest="moe_aux_loss_coeff", default=_plain(0.001)),
}
_QWEN_EXPERTS: Mapping[str, Field] = {
    **_ROUTING,
    "num_experts": Field(dest="num_experts"),
    "moe_intermediate_size": Field(dest="moe_ffn_hidden_size"),
    "norm_topk_prob": Field(dest="moe_router_norm_topk_prob", default=_plain(False)),
}
_MOE_FLAGS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_scope": "model"}
_EVERY_LAYER: Mapping[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}


def _decoder(
    model_type: str,
    architecture: str,
    *,
    flags: Mapping[str, Any] | None = None,
    fields: Mapping[str, Field] | None = None,
    must: Mapping[str, tuple[Any, ...]] | None = None,
    harmless: tuple[str, ...] = (),
    rope_base: float = 10000.0,
    names: tuple[tuple[Name, ...], ...] = ((_SAME,),),
) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        flags={**PLAIN, **(flags or {})},
        fields={**_FIELDS, **(fields or {})},
        must={"hidden_act": ("silu",), **(must or {})},
        harmless=HARMLESS.union(harmless),
        rope_base=rope_base,
        names=names,
    )


_GPT2_FIELDS: Mapping[str, Field] = {
    "n_layer": Field(dest="num_layers"),
    "n_embd": Field(dest="hidden_size"),
    "n_head": Field(dest="num_attention_heads"),
    "n_inner": Field(dest="ffn_hidden_size", default=lambda config: 4 * config["n_embd"]),
    "n_positions": Field(dest="max_position_embeddings"),
    "n_ctx": Field(dest="max_position_embeddings", spare=True),
    "vocab_size": Field(dest="padded_vocab_size"),
    "layer_norm_epsilon": Field(dest="layernorm_epsilon", default=_plain(1e-5)),
    "activation_function": Field(
        dest="openai_gelu",
        default=_plain("gelu_new"),
        values={"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False},
    ),
    "attn_pdrop": Field(dest="attention_dropout", default=_plain(0.1)),
    "resid_pdrop": Field(dest="hidden_dropout", default=_plain(0.1)),
    "embd_pdrop": Field(dest="hidden_dropout", default=_plain(0.1)),
    "initializer_range": Field(dest="init_method_std", default=_plain(0.02)),
    "tie_word_embeddings": Field(
        dest="untie_embeddings_and_output_weights", default=_plain(True), values=_TIED
    ),
}
_GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    flags={
        **PLAIN,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "group_query_attention": False,
        "kv_channels": None,
    },
    fields=_GPT2_FIELDS,
    must={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    harmless=HARMLESS.union(
        f"summary_{name}"
        for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
    ),
    rope_base=None,
    names=(_gpt2_names("transformer."), _gpt2_names("")),
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        _decoder(
            "llama",
            "LlamaForCausalLM",
            must={"attention_bias": (False,), "mlp_bias": (False,)},
            harmless=("pretraining_tp",),
        ),
        _decoder("qwen2", "Qwen2ForCausalLM", flags={"add_qkv_bias": True}, fields=_SPARE_WIDTH),
        _decoder(
            "qwen3",
            "Qwen3ForCausalLM",
            flags={"qk_layernorm": True},
            must={"attention_bias": (False,)},
        ),
        _decoder(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            flags={"moe_shared_expert_gate": True, **_MOE_FLAGS},
            fields={
                **_QWEN_EXPERTS,
                **_SPARE_WIDTH,
                "qkv_bias": Field(dest="add_qkv_bias", default=_plain(True)),
                "shared_expert_intermediate_size": Field(
                    dest="moe_shared_expert_intermediate_size"
                ),
            },
            must=_EVERY_LAYER,
            names=((_SAME,), _FUSED),
        ),
        _decoder(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            flags={"qk_layernorm": True, **_MOE_FLAGS},
            fields={**_QWEN_EXPERTS, "num_local_experts": Field(dest="num_experts")},
            must={"attention_bias": (False,), **_EVERY_LAYER},
            names=((_SAME,), _FUSED),
        ),
        _decoder(
            "mixtral",
            "MixtralForCausalLM",
            flags=_MOE_FLAGS,
            fields={
                **_ROUTING,
                "num_local_experts": Field(dest="num_experts"),
                "rms_norm_eps": Field(dest="layernorm_epsilon", default=_plain(1e-5)),
            },
            must={"router_jitter_noise": (0.0,)},
            rope_base=1e6,
            names=(_MIXTRAL_NAMES, _FUSED),
        ),
        _GPT2,
    )
}

# Known by name, and not in this version.
REFUSED: Mapping[str, str] = dict.fromkeys(
    ("qwen2_5_vl", "paligemma", "pi0", "pi05", "wall_oss"),
    "vision-language-action models are not in this version",
)

# Buffers that old releases stored beside the weights.
STORED_BUFFERS: tuple[str, ...] = (
    r".*\.rotary_emb\.inv_freq",
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
)

# Where ids of special tokens may stand alone: kept beside a tokenizer, written anew by an export.
ID_FILES: tuple[str, ...] = ("generation_config.json", "config.json")
TOKENIZER_FILES: tuple[str, ...] = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
