"""What a decoder looks like: one frozen description, checked when it is made.

Owns ``GPTConfig`` and ``RecomputeConfig``.  Invariant: a config that exists can be built and run;
every problem of a bad one is reported at once, each naming its field, value and remedy.  Tested by
``tests/models/test_config.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megamuon.kernels.grouped import BACKENDS
from megamuon.kernels.rope import RopeScaling

POSITION_EMBEDDINGS = ("rope", "learned_absolute", "none")
NORMALIZATIONS = ("RMSNorm", "LayerNorm")
ACTIVATIONS = ("swiglu", "gelu", "gelu_tanh", "squared_relu")
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
RECOMPUTE_MODULES = ("core_attn", "mlp")
AUX_LOSS_SCOPES = ("model", "layer")
DROP_POLICIES = ("probs", "position")


class ModelConfigError(ValueError):
    """A model description that cannot be built; the message lists every problem."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Which activations are computed again in the backward pass (Megatron's ``--recompute-*``)."""

    granularity: str | None = None  # full | selective
    method: str | None = None  # uniform | block, for full
    num_layers: int | None = None  # uniform: layers per chunk; block: the first layers to recompute
    modules: tuple[str, ...] = ("core_attn",)  # for selective

    def problems(self) -> Iterator[str]:
        """One line per thing that is wrong."""
        if self.granularity not in (None, "full", "selective"):
            yield f"recompute granularity {self.granularity!r}: choose full or selective"
        if self.method not in (None, "uniform", "block"):
            yield f"recompute method {self.method!r}: choose uniform or block"
        if self.granularity == "full" and self.method is None:
            yield "recompute method is missing: full recompute needs uniform or block"
        if self.granularity == "selective" and self.method is not None:
            yield f"recompute method {self.method!r}: selective recompute takes modules instead"
        if self.num_layers is not None and self.num_layers < 1:
            yield f"recompute num_layers {self.num_layers}: must be 1 or more"
        for module in self.modules:
            if module not in RECOMPUTE_MODULES:
                yield f"recompute module {module!r}: choose from {', '.join(RECOMPUTE_MODULES)}"


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A decoder: GPT-2, Llama, Qwen2, Qwen2.5 and Qwen3 shapes are settings of it, and with
    ``num_experts`` the mixtures of experts of Qwen2 and Qwen3.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads
    kv_channels: int  # channels of one head
    vocab_size: int  # rows of the embedding, padding included
    max_position_embeddings: int
    position_embedding: str = "rope"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rotary_interpolation: float = 1.0  # positions are divided by it
    rope_scaling: RopeScaling | None = None
    normalization: str = "RMSNorm"
    norm_epsilon: float = 1e-5
    layernorm_1p: bool = False  # gains are stored as their distance from 1
    activation: str = "swiglu"
    add_bias_linear: bool = False  # biases on all linear maps but the output head
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    tied_embeddings: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_method_std: float = 0.02
    embedding_init_method_std: float | None = None  # None: as init_method_std
    attention_softmax_in_fp32: bool = True  # unfused attention only; kernels always do so
    attention_backend: str = "auto"
    num_experts: int | None = None  # None: one dense MLP per layer
    router_top_k: int = 2  # experts of a token
    moe_ffn_hidden_size: int | None = None  # width of an expert; None: ffn_hidden_size
    moe_shared_expert_size: int | None = None  # width of an expert that sees every token
    moe_shared_expert_gate: bool = False  # weigh the shared expert by a sigmoid of each token
    norm_topk_prob: bool = False  # the weights of a token's experts sum to 1
    aux_loss_coefficient: float = 0.0
    aux_loss_scope: str = "model"  # tokens pooled before the product: of all layers | of a layer
    capacity_factor: float | None = None  # None: no token is dropped
    drop_policy: str = "probs"  # which tokens a full expert keeps: the likeliest | the first
    grouped_backend: str = "auto"
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)

    @property
    def query_size(self) -> int:
        """Rows of the query projection."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_query_groups * self.kv_channels

    @property
    def expert_size(self) -> int:
        """Width of a routed expert."""
        return (
            self.ffn_hidden_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size
        )

    @property
    def rotary_size(self) -> int:
        """Channels of a head that rotate."""
        return int(self.kv_channels * self.rotary_percent)

    def __post_init__(self) -> None:
        problems = [*self._sizes(), *self._choices(), *self._rates(), *self.recompute.problems()]
        problems += self._experts()
        if problems:
            raise ModelConfigError("the model cannot be built:\n  " + "\n  ".join(problems))

    def _sizes(self) -> Iterator[str]:
        names = (
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups"
            " kv_channels vocab_size max_position_embeddings"
        )
        positive = True
        for name in names.split():
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                positive = False
                yield f"{name} is {value!r}: give a whole number of 1 or more"
        if positive and self.num_attention_heads % self.num_query_groups:
            yield (
                f"num_query_groups {self.num_query_groups} does not divide num_attention_heads"
                f" {self.num_attention_heads}: choose a divisor"
            )
        if positive and self.position_embedding == "rope":
            if not 0 < self.rotary_percent <= 1:
                yield f"rotary_percent {self.rotary_percent}: choose a value in (0, 1]"
            elif self.rotary_size % 2 or self.rotary_size == 0:
                yield (
                    f"kv_channels {self.kv_channels} with rotary_percent {self.rotary_percent}"
                    f" rotates {self.rotary_size} channels: make that an even number"
                )
            if self.rotary_base <= 0:
                yield f"rotary_base {self.rotary_base}: must be positive"
            if self.rotary_interpolation <= 0:
                yield f"rotary_interpolation {self.rotary_interpolation}: must be positive"

    def _choices(self) -> Iterator[str]:
        for name, choices in (
            ("position_embedding", POSITION_EMBEDDINGS),
            ("normalization", NORMALIZATIONS),
            ("activation", ACTIVATIONS),
            ("attention_backend", ATTENTION_BACKENDS),
            ("aux_loss_scope", AUX_LOSS_SCOPES),
            ("drop_policy", DROP_POLICIES),
            ("grouped_backend", BACKENDS),
        ):
            value = getattr(self, name)
            if value not in choices:
                yield f"{name} {value!r}: choose from {', '.join(choices)}"

    def _experts(self) -> Iterator[str]:
        if self.num_experts is None:
            return
        sizes = ("num_experts", "router_top_k", "moe_ffn_hidden_size", "moe_shared_expert_size")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                yield f"{name} is {value!r}: give a whole number of 1 or more"
        if isinstance(self.num_experts, int) and self.router_top_k > self.num_experts:
            yield f"router_top_k {self.router_top_k}: there are {self.num_experts} experts"
        if self.moe_shared_expert_gate and self.moe_shared_expert_size is None:
            yield "moe_shared_expert_gate: there is no shared expert; set moe_shared_expert_size"
        if self.activation != "swiglu":
            yield f"activation {self.activation!r}: experts compute swiglu only"
        if self.add_bias_linear:
            yield "add_bias_linear: experts have no biases; turn it off"
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            yield f"capacity_factor {self.capacity_factor}: must be positive"
        if self.aux_loss_coefficient < 0:
            yield f"aux_loss_coefficient {self.aux_loss_coefficient}: must not be negative"

    def _rates(self) -> Iterator[str]:
        for name in ("hidden_dropout", "attention_dropout"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                yield f"{name} {value}: choose a probability in [0, 1)"
        if self.norm_epsilon <= 0:
            yield f"norm_epsilon {self.norm_epsilon}: must be positive"
        for name in ("init_method_std", "embedding_init_method_std"):
            value = getattr(self, name)
            if value is not None and value < 0:
                yield f"{name} {value}: must not be negative"
