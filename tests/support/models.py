"""Small models for tests: configs by keyword and one seed per parameter name."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megamuon.models import GPT, GPTConfig

SMALL: dict[str, object] = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "add_qkv_bias": True,
    "norm_epsilon": 1e-6,
}
GPT2: dict[str, object] = {
    "position_embedding": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu_tanh",
    "add_bias_linear": True,
    "num_query_groups": 4,
    "kv_channels": 12,
}


def small_config(**changes: object) -> GPTConfig:
    """A two-layer Qwen2-like config with ``changes``."""
    return GPTConfig(**{**SMALL, **changes})  # type: ignore[arg-type]


def named_generator(name: str, seed: int = 0) -> torch.Generator:
    """A generator that depends on the name alone, not on the order of calls."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def filled(config: GPTConfig, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> GPT:
    """A model with initial values; ``scale`` other than 1 spreads gains and biases too."""
    model = GPT(config).to(dtype)
    for name, parameter in model.named_parameters():
        model.initialise_(name, parameter.data, named_generator(name))
        if scale != 1.0:
            noise = torch.randn(parameter.shape, generator=named_generator(name, 1)).to(dtype)
            parameter.data.mul_(scale).add_(0.05 * noise)
    return model


def tokens(batch: int, length: int, vocabulary: int = 67) -> Tensor:
    """Fixed random token ids ``(batch, length)``."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, vocabulary, (batch, length), generator=generator)


def gradients(model: GPT) -> dict[str, Tensor]:
    """All gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
