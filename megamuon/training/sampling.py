"""A continuation at the end of a run.

Owns ``--sample-prompt``.  Invariant: all ranks compute it together, since a sharded model
computes only together. Tested by ``tests/training/test_loop.py``.
"""

from __future__ import annotations

import torch
from torch import nn

from megamuon.arguments import Config
from megamuon.data.tokenizer import Tokenizer
from megamuon.models.generation import generate


def sample_text(config: Config, tokenizer: Tokenizer, model: nn.Module) -> str | None:
    """The prompt and its continuation in two marked lines; None without ``--sample-prompt``."""
    prompt = config.training.sample_prompt
    if prompt is None:
        return None
    ids = generate(
        model,
        tokenizer.encode(prompt) or [tokenizer.eod],
        config.training.sample_tokens,
        limit=config.model.max_position_embeddings or 1,
        vocabulary=tokenizer.vocab_size,
        stop=tokenizer.eod,
        seed=config.training.seed,
        device=_device(model),
    )
    return f"sample of {prompt!r}:\n{prompt}{tokenizer.decode(ids)}"


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
