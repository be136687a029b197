"""What a run says about itself at its start."""

from __future__ import annotations

import pytest
import torch

from megamuon.arguments import parse_config
from megamuon.mesh import Mesh
from megamuon.models import PRESETS
from megamuon.training.builders import grid, optimizer_settings
from megamuon.training.descriptions import describe_grid
from tests.support.training import flags


def described(world: int, **changes: object) -> str:
    config = parse_config(flags(**changes), presets=PRESETS, world_size=world).config
    layout = grid(config, world)
    mesh = Mesh(
        world_size=world,
        rank=0,
        local_rank=0,
        replicas=layout.replicas,
        shards=layout.shards,
        tp=layout.tp,
        device=torch.device("cpu"),
        backend="gloo",
    )
    return describe_grid(config, mesh)


def test_grids() -> None:
    assert described(8, sharding="hsdp", shard_size=2, tensor_model_parallel_size=2) == (
        "line D | hsdp on 2 replicas of 2 ranks x 2 tensor-parallel | ZeRO-3 | layout owner,"
        " collectives ready, matrix update owner | publish async"
    )
    assert described(4, line="B", zero_stage=2) == (
        "line B | fsdp on 4 ranks | ZeRO-2 | layout even, collectives grouped, matrix update gather"
    )


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("muon", "scale spectral x 0.2"),
        ("normuon", "second moment 0.95 per rows"),
        ("shampoo", "inverted every 1 steps"),
        ("soap", "variant nikhilvyas"),
    ],
)
def test_recipes(optimizer: str, words: str) -> None:
    config = parse_config(flags(optimizer=optimizer), presets=PRESETS, world_size=1).config
    settings = optimizer_settings(config)
    assert words in settings.recipe.describe(settings.matrix, config.optimizer)
