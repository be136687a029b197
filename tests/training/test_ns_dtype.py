"""What ``--ns-dtype auto`` comes to, and what a resumed run does with it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamuon.arguments import parse_config
from megamuon.mesh import Mesh
from megamuon.models import PRESETS
from megamuon.training import ns_dtype
from megamuon.training.builders import optimizer_settings
from megamuon.training.ns_dtype import choose_cpu_dtype
from megamuon.training.source import Source, stored_cpu_dtype
from tests.support.training import flags

CPU = Mesh(
    world_size=1,
    rank=0,
    local_rank=0,
    replicas=1,
    shards=1,
    device=torch.device("cpu"),
    backend="gloo",
)


def config_of(**changes: Any) -> Any:
    return parse_config(flags(**changes), presets=PRESETS, world_size=1).config


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(value: float) -> None:
        monkeypatch.setattr(ns_dtype, "bf16_gain", lambda: value)

    return use


@pytest.mark.parametrize(
    ("measured", "stored", "dtype", "words"),
    [
        (7.0, None, "bf16", "take 1/7.0 of FP32's time here"),
        (1.1, None, "fp32", "take 1/1.1"),  # not worth its rounding
        (0.004, None, "fp32", "take 250 x FP32's time here"),
        (7.0, "fp32", "fp32", "as the checkpoint's run"),
        (1.1, "bf16", "bf16", "as the checkpoint's run"),  # the same machine, measured again
        (0.004, "bf16", "fp32", "WARNING: .*not bit for bit from here on"),
    ],
)
def test_choice(gain: Any, measured: float, stored: Any, dtype: str, words: str) -> None:
    gain(measured)
    for optimizer in ("muon", "normuon"):
        found = choose_cpu_dtype(config_of(optimizer=optimizer), CPU, stored)
        assert found.dtype == dtype
        assert f"Newton-Schulz dtype auto: {dtype}" in found.line
        assert re.search(words, found.line)


@pytest.mark.parametrize(
    "changes",
    [
        {"ns_dtype": "fp32"},
        {"ns_dtype": "bf16"},
        {"fp64": True},
        {"optimizer": "adam"},
        {"optimizer": "soap"},
        {"muon_preset": "torch"},
        {"ns_form": "gram"},
        {"ns_restarts": 2},
    ],
)
def test_no_choice_where_a_flag_has_made_it(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ns_dtype, "bf16_gain", lambda: pytest.fail("measured for nothing"))
    found = choose_cpu_dtype(config_of(**changes), CPU, None)
    assert (found.dtype, found.line) == ("fp32", "")


def test_gpus_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ns_dtype, "bf16_gain", lambda: pytest.fail("measured for nothing"))
    mesh = replace(CPU, device=torch.device("cuda", 0))
    assert choose_cpu_dtype(config_of(), mesh, None).line == ""


def test_the_choice_reaches_both_optimizers_that_iterate() -> None:
    for optimizer in ("muon", "normuon"):
        config = config_of(optimizer=optimizer)
        made = optimizer_settings(config, ns_cpu_dtype="bf16").newton_schulz
        assert (made.cpu_dtype, made.dtype) == ("bf16", "auto")
        assert optimizer_settings(config).newton_schulz.cpu_dtype == "fp32"


def test_what_a_checkpoint_says(tmp_path: Any) -> None:
    def source(documents: dict[str, Any], *, weights_only: bool = False) -> Source:
        return Source(
            directory=tmp_path, iteration=3, documents=documents, weights_only=weights_only
        )

    bf16 = {"measured": {"ns_cpu_dtype": "bf16"}}
    assert stored_cpu_dtype(None) is None
    assert stored_cpu_dtype(source(bf16)) == "bf16"
    assert stored_cpu_dtype(source(bf16, weights_only=True)) is None
    assert stored_cpu_dtype(source({"measured": {}})) is None  # a run on GPUs, or in FP64
    assert stored_cpu_dtype(source({})) == "fp32"  # of a release that knew no other
