"""Choosing tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megamuon.models.generation import generate, next_token


class Counting(nn.Module):
    """Prefers the id after the last one, and then a row that is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.longest = max(self.longest, tokens.shape[1])
        logits = torch.zeros(1, tokens.shape[1], 8)
        logits[0, -1, (int(tokens[0, -1]) + 1) % 8] = 50.0
        logits[0, -1, 7] = 99.0  # padding row: must never be chosen
        return logits


def test_continues_stops_and_cuts_the_context() -> None:
    model = Counting()
    assert generate(model, [0], 3, limit=2, vocabulary=7) == [1, 2, 3]
    assert model.longest == 2
    assert generate(model, [0], 9, limit=4, vocabulary=7, stop=4) == [1, 2, 3]
    assert model.training  # the mode that it found


def test_sampling_is_seeded_and_top_k_limits_it() -> None:
    logits = torch.tensor([0.0, 0.5, 1.0, -9.0])

    def draws(seed: int, **changes: float) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        settings = {"temperature": 1.0, "top_k": 0, **changes}
        return [next_token(logits, generator=generator, **settings) for _ in range(200)]  # type: ignore[arg-type]

    assert draws(1) == draws(1)
    assert set(draws(1, top_k=2)) == {1, 2}
    assert set(draws(1, temperature=0.0)) == {2}
    assert set(draws(1)) >= {0, 1, 2}


def test_bad_values() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        generate(Counting(), [], 1, limit=2, vocabulary=7)
    with pytest.raises(ValueError, match="temperature -1"):
        generate(Counting(), [0], 1, limit=2, vocabulary=7, temperature=-1)
