"""Settings that cannot work are refused when they are made."""

from __future__ import annotations

import pytest
import torch

from megamuon.matrices import Kind, Layout, LogicalParameter, Route
from megamuon.runtime import OptimizerSettings, RuntimeConfig


def parameter(kind: Kind, *shape: int) -> LogicalParameter:
    return LogicalParameter(
        name="p",
        shape=shape,
        kind=kind,
        route=Route.ADAMW_OWNER,
        layout=Layout.OWNER,
        reason="test",
    )


def test_an_unknown_optimizer_is_refused_not_trained_with_adamw() -> None:
    for name in ("muon", "normuon", "shampoo", "soap", "adam", "sgd"):
        OptimizerSettings(matrices=name)
    with pytest.raises(ValueError, match="'Muon'.*muon, normuon, shampoo, soap, adam, sgd"):
        OptimizerSettings(matrices="Muon")


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="zero_stage=4"):
        RuntimeConfig(zero_stage=4)
    with pytest.raises(ValueError, match="float64 replaces every dtype"):
        RuntimeConfig(master_dtype=torch.float64)
    with pytest.raises(ValueError, match="muon needs whole matrices"):
        RuntimeConfig(owner_layout=False)
    RuntimeConfig(owner_layout=False, optimizer=OptimizerSettings(matrices="adam"))


def test_weight_decay_follows_megatrons_rule() -> None:
    settings = OptimizerSettings()
    assert settings.decays(parameter(Kind.MATRIX, 2, 3))
    assert settings.decays(parameter(Kind.EMBEDDING, 2, 3))
    assert not settings.decays(parameter(Kind.VECTOR, 3))
    assert not settings.decays(parameter(Kind.QK_NORM, 3))
    assert OptimizerSettings(decay_qk_norm=True).decays(parameter(Kind.QK_NORM, 3))
