"""Models built for a run: on the meta device where they fill themselves, else for real."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megamuon.arguments import parse_config
from megamuon.mesh import mesh_from_environment
from megamuon.models import PRESETS
from megamuon.training.failures import TrainingError
from megamuon.training.sampling import _Padded
from megamuon.training.sharded import _copier, _filler, build_model, build_runtime
from tests.support.training import flags


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 2)


class Filling(Plain):
    def initialise_(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        with torch.no_grad():
            tensor.fill_(len(name))


def test_a_model_that_fills_itself_stays_on_the_meta_device() -> None:
    model = build_model(lambda pre_process, post_process: Filling(), 5)
    assert model.map.weight.is_meta
    fill, whole = _filler(model), torch.zeros(2, 3)
    assert fill is not None
    fill("map.weight", whole, torch.Generator())
    assert whole.eq(10).all()


def test_another_model_is_made_from_the_seed_and_copied() -> None:
    random = torch.get_rng_state()
    first, second = (build_model(lambda pre_process, post_process: Plain(), 5) for _ in range(2))
    assert torch.equal(first.map.weight, second.map.weight)
    assert torch.equal(random, torch.get_rng_state())
    assert _filler(first) is None
    whole = torch.zeros(2, 3)
    _copier(first)("map.weight", whole, torch.Generator())
    assert torch.equal(whole, first.map.weight)


def test_a_model_without_layer_classes_is_explained() -> None:
    config = parse_config(flags(), presets=PRESETS, world_size=1).config
    mesh = mesh_from_environment(environment={}, gpus=0)
    with pytest.raises(TrainingError, match="Plain has no layer_classes: pass layers="):
        build_runtime(lambda pre_process, post_process: Plain(), config, mesh)


def test_sequences_are_padded_behind_their_end() -> None:
    class Lengths(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            assert tokens.shape[1] % 4 == 0
            return tokens.cumsum(1).unsqueeze(-1)

    padded = _Padded(Lengths().eval(), 4)
    assert not padded.training
    for length in (1, 4, 6):
        tokens = torch.arange(1, length + 1).unsqueeze(0)
        assert torch.equal(padded(tokens), tokens.cumsum(1).unsqueeze(-1))
