"""A continuation at the end of a run.

Owns ``--sample-prompt``.  Invariant: all ranks compute it together, since a sharded model
computes only together. Tested by ``tests/training/test_loop.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamuon.arguments import Config
from megamuon.data.tokenizer import Tokenizer
from megamuon.models.generation import generate


def sample_text(config: Config, tokenizer: Tokenizer, model: nn.Module) -> str | None:
    """The prompt and its continuation in two marked lines; None without ``--sample-prompt``."""
    prompt = config.training.sample_prompt
    if prompt is None:
        return None
    limit, parallel = config.model.max_position_embeddings or 1, config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1:
        model = _Padded(model, parallel.tensor_model_parallel_size)
        limit -= limit % model.multiple
    ids = generate(
        model,
        tokenizer.encode(prompt) or [tokenizer.eod],
        config.training.sample_tokens,
        limit=limit,
        vocabulary=tokenizer.vocab_size,
        stop=tokenizer.eod,
        seed=config.training.seed,
        device=_device(model),
    )
    return f"sample of {prompt!r}:\n{prompt}{tokenizer.decode(ids)}"


class _Padded(nn.Module):
    """A model that takes sequences of a multiple of some length only; what is appended comes after
    all real tokens, which do not see it.
    """

    def __init__(self, model: nn.Module, multiple: int) -> None:
        super().__init__()
        self.inner = model
        self.multiple = multiple
        self.training = model.training

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens (1, positions)`` to logits ``(1, positions, rows)``."""
        length = tokens.shape[1]
        padded = functional.pad(tokens, (0, -length % self.multiple))
        return self.inner(padded)[:, :length]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
