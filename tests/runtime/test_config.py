"""Settings that cannot work are refused when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megamuon.matrices import Kind, LogicalParameter, Route, placements_for
from megamuon.placements import Placed
from megamuon.runtime import OptimizerSettings, RuntimeConfig


def parameter(kind: Kind, *shape: int) -> LogicalParameter:
    return LogicalParameter(
        name="p",
        shape=shape,
        kind=kind,
        route=Route.ADAMW_OWNER,
        **placements_for(Route.ADAMW_OWNER, Placed(shape=shape), owned=True),
        reason="test",
    )


def test_an_unknown_optimizer_is_refused_not_trained_with_adamw() -> None:
    for name in ("muon", "normuon", "shampoo", "soap", "adam", "sgd"):
        OptimizerSettings(matrices=name)
    with pytest.raises(ValueError, match="'Muon'.*muon, adam, sgd, normuon, shampoo, soap"):
        OptimizerSettings(matrices="Muon")


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="zero_stage=4"):
        RuntimeConfig(zero_stage=4)
    with pytest.raises(ValueError, match="float64 replaces every dtype"):
        RuntimeConfig(master_dtype=torch.float64)
    with pytest.raises(ValueError, match="muon needs whole matrices"):
        RuntimeConfig(collectives="grouped", owner_layout=False)
    RuntimeConfig(
        collectives="grouped", owner_layout=False, optimizer=OptimizerSettings(matrices="adam")
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fabric": "shm"}, "fabric='shm': choose one of auto, host, nccl"),
        ({"ring_slots": 0}, "ring_slots=0: choose 1 to 64"),
        ({"ring_slots": 65}, "ring_slots=65"),
        ({"chunk_bytes": 0}, "chunk_bytes=0: choose a multiple of 256"),
        ({"chunk_bytes": 1000}, "chunk_bytes=1000: choose a multiple of 256"),
        ({"chunk_bytes": 2 << 20}, "chunk_bytes=2097152: choose at most 1048576"),
        ({"publish_tile_bytes": 100}, "publish_tile_bytes=100"),
        ({"collective_deadline": 0.0}, "collective_deadline=0.0"),
        ({"collective_deadline": math.nan}, "collective_deadline=nan"),
        ({"collective_deadline": math.inf}, "collective_deadline=inf"),
        (
            {"collectives": "ready", "owner_layout": False, "matrix_update": "gather"},
            "collectives='ready'.*owner_layout=True",
        ),
    ],
)
def test_settings_of_the_operators_are_checked(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RuntimeConfig(**settings)


def test_operators_take_what_they_can_be_built_with() -> None:
    RuntimeConfig(
        collectives="ready",
        fabric="host",
        ring_slots=64,
        chunk_bytes=1 << 20,
        publish_tile_bytes=256,
        collective_deadline=0.5,
    )


def test_weight_decay_follows_megatrons_rule() -> None:
    settings = OptimizerSettings()
    assert settings.decays(parameter(Kind.MATRIX, 2, 3))
    assert settings.decays(parameter(Kind.EMBEDDING, 2, 3))
    assert not settings.decays(parameter(Kind.VECTOR, 3))
    assert not settings.decays(parameter(Kind.QK_NORM, 3))
    assert OptimizerSettings(decay_qk_norm=True).decays(parameter(Kind.QK_NORM, 3))
