"""Random states go through JSON and come back bit for bit."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from megamuon.checkpoint import CheckpointError, capture_rng, restore_rng


def _draw(generator: torch.Generator) -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        float(np.random.rand()),
        *torch.randn(5).tolist(),
        *torch.rand(3, generator=generator).tolist(),
    ]


def test_every_generator_continues_where_it_was() -> None:
    own = torch.Generator().manual_seed(3)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(4)
    _draw(own)  # one normal deviate of each kind stays cached in its generator
    state = json.loads(json.dumps(capture_rng({"dropout": own})))
    expected = [_draw(own) for _ in range(3)]
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    own.manual_seed(9)
    assert _draw(own) != expected[0]
    restore_rng(state, {"dropout": own})
    assert [_draw(own) for _ in range(3)] == expected


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
def test_a_part_that_does_not_fit_is_named(part: str) -> None:
    state = capture_rng()
    state[part] = "AAAA"
    with pytest.raises(CheckpointError, match=f"random state '{part}'"):
        restore_rng(state)


def test_a_missing_generator_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'generators.dropout'"):
        restore_rng(capture_rng(), {"dropout": torch.Generator()})
