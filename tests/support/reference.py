"""The single-process oracle of the tests: the equivalence tool's, with the sizes of the tests.

Owns ``Case``, its default sizes, and ``nano`` as literal values. Everything else is
``tools/reference_training.py``: autograd on whole parameters, Newton-Schulz written out,
``torch.optim.AdamW`` for the rest. Nothing of the owner runtime, of its optimizers or of its linear
function is used, so an error there cannot hide here.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamuon.models.config import GPTConfig, RecomputeConfig
from tools.reference_training import (
    Training,
    batch_of,
    build_reference,
    is_matrix,
    reference_run,
    textbook_newton_schulz,
)

SEED = Training.seed


@dataclass(frozen=True, kw_only=True)
class Case(Training):
    """One training run of ``nano``."""

    steps: int = 50
    batch: int = 24  # divides by 1..4 ranks times 1 or 2 micro-batches


def nano_config(recompute: bool = False) -> GPTConfig:
    """The ``nano`` preset: GQA, query/key/value biases, a tied head and odd sizes."""
    return GPTConfig(
        num_layers=3,
        hidden_size=50,
        ffn_hidden_size=87,
        num_attention_heads=6,
        num_query_groups=3,
        kv_channels=10,
        vocab_size=257,
        max_position_embeddings=64,
        norm_epsilon=1e-6,
        add_qkv_bias=True,
        tied_embeddings=True,
        recompute=RecomputeConfig(granularity="full", method="uniform", num_layers=1)
        if recompute
        else RecomputeConfig(),
    )


__all__ = [
    "SEED",
    "Case",
    "Training",
    "batch_of",
    "build_reference",
    "is_matrix",
    "nano_config",
    "reference_run",
    "textbook_newton_schulz",
]
