"""Named architectures, as values of flags.

Owns ``PRESETS``: name -> {Megatron's dest: value}, which ``register_preset`` extends. Invariant: a
preset holds flags only, so whatever it says an explicit flag can override; a name means one
published architecture (base models, sizes as on the Hub) or one of ours. Tested by
``tests/models/test_presets.py`` against the published inventories.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Preset = Mapping[str, object]


def _decoder(
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int,
    channels: int,
    vocabulary: int,
    positions: int,
    tied: bool,
    base: int = 1_000_000,
    epsilon: float = 1e-6,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    **more: object,
) -> Preset:
    """A RoPE, RMSNorm and SwiGLU decoder without dropout, the common shape of Llama and Qwen."""
    return MappingProxyType(
        {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "num_attention_heads": heads,
            "group_query_attention": True,
            "num_query_groups": groups,
            "kv_channels": channels,
            "vocab_size": vocabulary,
            "make_vocab_size_divisible_by": 1,  # published tables hold their padding already
            "max_position_embeddings": positions,
            "position_embedding_type": "rope",
            "rotary_base": base,
            "normalization": "RMSNorm",
            "layernorm_epsilon": epsilon,
            "swiglu": True,
            "add_bias_linear": False,
            "add_qkv_bias": qkv_bias,
            "qk_layernorm": qk_norm,
            "untie_embeddings_and_output_weights": not tied,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **more,
        }
    )


def _qwen25(**sizes: object) -> Preset:
    return _decoder(qkv_bias=True, **sizes)  # type: ignore[arg-type]


def _qwen3(**sizes: object) -> Preset:
    return _decoder(qk_norm=True, positions=40960, vocabulary=151936, channels=128, **sizes)  # type: ignore[arg-type]


def _experts(
    *,
    count: int,
    top_k: int,
    width: int,
    normalised: bool,
    shared: int | None = None,
    coefficient: float = 0.001,
) -> dict[str, object]:
    """The flags of a mixture of experts; a shared expert has a gate, as in Qwen2-MoE."""
    return {
        "num_experts": count,
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": shared is not None,
        "moe_router_norm_topk_prob": normalised,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": coefficient,
        "moe_aux_loss_scope": "model",
        "moe_grouped_gemm": True,
    }


_GPT2: Preset = MappingProxyType(
    {
        "num_layers": 12,
        "hidden_size": 768,
        "ffn_hidden_size": 3072,
        "num_attention_heads": 12,
        "kv_channels": 64,
        "vocab_size": 50257,
        "make_vocab_size_divisible_by": 128,
        "max_position_embeddings": 1024,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "openai_gelu": True,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    }
)

# fmt: off
PRESETS: dict[str, Preset] = {
    "qwen2.5-0.5b": _qwen25(layers=24, hidden=896, ffn=4864, heads=14, groups=2, channels=64,
                            vocabulary=151936, positions=32768, tied=True),
    "qwen2.5-1.5b": _qwen25(layers=28, hidden=1536, ffn=8960, heads=12, groups=2, channels=128,
                            vocabulary=151936, positions=131072, tied=True),
    "qwen2.5-7b": _qwen25(layers=28, hidden=3584, ffn=18944, heads=28, groups=4, channels=128,
                          vocabulary=152064, positions=131072, tied=False),
    # The Instruct model of this size uses 1e-6: pass --norm-epsilon 1e-6 to continue from it.
    "qwen2.5-32b": _qwen25(layers=64, hidden=5120, ffn=27648, heads=40, groups=8, channels=128,
                           vocabulary=152064, positions=131072, tied=False, epsilon=1e-5),
    "qwen3-0.6b": _qwen3(layers=28, hidden=1024, ffn=3072, heads=16, groups=8, tied=True),
    "qwen3-14b": _qwen3(layers=40, hidden=5120, ffn=17408, heads=40, groups=8, tied=False),
    "llama3-8b": _decoder(layers=32, hidden=4096, ffn=14336, heads=32, groups=8, channels=128,
                          vocabulary=128256, positions=8192, tied=False, base=500_000,
                          epsilon=1e-5),
    "gpt2": _GPT2,
    # The dense FFN sizes of these two are published but no layer uses them.
    "qwen1.5-moe-a2.7b": _qwen25(layers=24, hidden=2048, ffn=5632, heads=16, groups=16,
                                 channels=128, vocabulary=151936, positions=8192, tied=False,
                                 **_experts(count=60, top_k=4, width=1408, shared=5632,
                                            normalised=False)),
    "qwen3-30b-a3b": _qwen3(layers=48, hidden=2048, ffn=6144, heads=32, groups=4, tied=False,
                            **_experts(count=128, top_k=8, width=768, normalised=True)),
    # About 5M parameters over bytes: what `make pretrain` trains.  Six units per layer (gate, up,
    # down, q, o, rest).
    "tiny": _qwen25(layers=4, hidden=320, ffn=1024, heads=4, groups=2, channels=64, vocabulary=257,
                    positions=1024, tied=True, base=10_000, make_vocab_size_divisible_by=64,
                    owner_unit_threshold=80_000),
    "tiny-moe": _qwen25(layers=4, hidden=320, ffn=1024, heads=4, groups=2, channels=64,
                        vocabulary=257, positions=1024, tied=True, base=10_000,
                        make_vocab_size_divisible_by=64, owner_unit_threshold=80_000,
                        **_experts(count=8, top_k=2, width=160, shared=512, normalised=True)),
    # Under 100k parameters with odd sizes, for equivalence runs: no size divides by 4, most not by
    # 2 or 3 either,
    # so uneven slices and owners without work occur at every rank count.
    "nano": _qwen25(layers=3, hidden=50, ffn=87, heads=6, groups=3, channels=10, vocabulary=257,
                    positions=1024, tied=True, base=10_000, owner_unit_threshold=2_000),
    # The same with an odd number of experts of odd widths.
    "nano-moe": _qwen25(layers=3, hidden=50, ffn=87, heads=6, groups=3, channels=10,
                        vocabulary=257, positions=1024, tied=True, base=10_000,
                        owner_unit_threshold=2_000,
                        **_experts(count=5, top_k=2, width=29, shared=43, normalised=False,
                                   coefficient=0.01)),
}
# fmt: on


def register_preset(name: str, values: Preset) -> None:
    """Add an architecture, on all ranks alike, before flags are parsed: ``--model`` knows the name.
    ``values``: of flags, by dest.  Raises ValueError for a name that is taken.
    """
    if name in PRESETS:
        raise ValueError(f"preset {name!r}: there is one of this name")
    PRESETS[name] = MappingProxyType(dict(values))
