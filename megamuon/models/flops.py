"""How many parameters and floating-point operations a model has, in closed form.

Owns the numbers behind TFLOP/s/GPU.  Invariants: model FLOPs are those of one forward and one
backward over the matrices and the causal half of the attention scores; work that recompute repeats
is not counted, so the figure is comparable between settings.  Tested by
``tests/models/test_flops.py`` against the built modules and torch's counter.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamuon.models.config import GPTConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Elements by kind; a tied head counts once, as embedding."""

    matrices: int
    vectors: int
    embeddings: int
    head: int
    routers: int = 0
    idle: int = 0  # of ``matrices``: those of the experts that a token does not go to

    @property
    def total(self) -> int:
        """All trainable elements."""
        return self.matrices + self.vectors + self.embeddings + self.head + self.routers

    @property
    def active(self) -> int:
        """Elements that one token meets."""
        return self.total - self.idle


def _layer_matrices(config: GPTConfig) -> int:
    attention = config.hidden_size * (2 * config.query_size + 2 * config.key_size)
    maps = 3 if config.activation == "swiglu" else 2
    width = config.ffn_hidden_size
    if config.num_experts is not None:
        width = config.num_experts * config.expert_size + (config.moe_shared_expert_size or 0)
    return attention + maps * config.hidden_size * width


def _layer_idle(config: GPTConfig) -> int:
    """Elements of the experts of a layer that a token does not go to."""
    if config.num_experts is None:
        return 0
    return 3 * config.hidden_size * config.expert_size * (config.num_experts - config.router_top_k)


def _layer_routers(config: GPTConfig) -> int:
    """Elements of the router and the shared expert's gate."""
    if config.num_experts is None:
        return 0
    return config.hidden_size * (config.num_experts + config.moe_shared_expert_gate)


def _layer_vectors(config: GPTConfig) -> int:
    per_norm = 1 if config.normalization == "RMSNorm" else 2
    count = 2 * per_norm * config.hidden_size
    if config.qk_layernorm:
        count += 2 * per_norm * config.kv_channels
    if config.add_bias_linear or config.add_qkv_bias:
        count += config.query_size + 2 * config.key_size
    if config.add_bias_linear:
        inner = 2 if config.activation == "swiglu" else 1
        count += inner * config.ffn_hidden_size + 2 * config.hidden_size
    return count


def count_parameters(config: GPTConfig) -> ParameterCount:
    """Elements of the model that ``config`` describes, padding rows of the vocabulary included."""
    per_norm = 1 if config.normalization == "RMSNorm" else 2
    table = config.vocab_size * config.hidden_size
    positions = 0
    if config.position_embedding == "learned_absolute":
        positions = config.max_position_embeddings * config.hidden_size
    return ParameterCount(
        matrices=config.num_layers * _layer_matrices(config),
        vectors=config.num_layers * _layer_vectors(config) + per_norm * config.hidden_size,
        embeddings=table + positions,
        head=0 if config.tied_embeddings else table,
        routers=config.num_layers * _layer_routers(config),
        idle=config.num_layers * _layer_idle(config),
    )


def flops_per_token(config: GPTConfig, seq_length: int) -> float:
    """Model FLOPs of one token in a sequence of ``seq_length``, forward and backward, recompute
    excluded.

    Two per multiply-add, three passes (forward, and the two products of the backward); attention
    counts the lower triangle only, ``(seq_length + 1) / 2`` keys per query on average, as Megatron
    does up to the diagonal.  Of experts, only those count that a token goes to.
    """
    layer = _layer_matrices(config) + _layer_routers(config) - _layer_idle(config)
    matrices = config.num_layers * layer + config.vocab_size * config.hidden_size
    keys = (seq_length + 1) / 2
    scores_and_values = 2 * config.num_layers * config.query_size * keys
    return 3 * 2 * (matrices + scores_and_values)
