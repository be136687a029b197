"""Continuing a sequence of tokens with a decoder.

Owns the choice of the next token.  Invariants: the same seed and weights give the same tokens;
rows that only pad the vocabulary are never chosen; the context is cut to what the model has
positions for. Tested by ``tests/models/test_generation.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def next_token(
    logits: Tensor, *, temperature: float, top_k: int, generator: torch.Generator
) -> int:
    """Draw from ``logits (vocabulary,)``; temperature 0 takes the largest, ``top_k`` 0 means
    all.
    """
    values = logits.detach().to("cpu", torch.float32)
    if temperature == 0 or top_k == 1:
        return int(values.argmax())
    values = values / temperature
    if 0 < top_k < values.numel():
        smallest = values.topk(top_k).values[-1]
        values = values.masked_fill(values < smallest, float("-inf"))
    return int(torch.multinomial(values.softmax(-1), 1, generator=generator))


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    *,
    limit: int,
    vocabulary: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 1234,
    stop: int | None = None,
    device: torch.device | None = None,
) -> list[int]:
    """Up to ``count`` ids that follow ``prompt``; ends before the id ``stop``.

    ``model(tokens (1, positions))`` gives logits ``(1, positions, rows)``; ``limit`` is the
    longest sequence that it takes and ``vocabulary`` the number of real ids.  The whole sequence
    is computed anew for every token, which suits short samples.  Raises ValueError for an empty
    prompt, a negative temperature or ``top_k``.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens: give at least one")
    if temperature < 0 or top_k < 0:
        raise ValueError(f"temperature {temperature} and top_k {top_k} must be at least 0")
    ids, generator = list(prompt), torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    try:
        for _ in range(count):
            tokens = torch.tensor([ids[-limit:]], dtype=torch.int64, device=device)
            logits = model(tokens)[0, -1, :vocabulary]
            chosen = next_token(logits, temperature=temperature, top_k=top_k, generator=generator)
            if chosen == stop:
                break
            ids.append(chosen)
    finally:
        model.train(training)
    return ids[len(prompt) :]
