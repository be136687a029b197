"""Measured Newton-Schulz times: one per shape, kept per device, configuration and dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megamuon.matrices import Kind, LogicalParameter, Route, placements_for
from megamuon.placements import Placed
from megamuon.runtime.measure import CACHE, cost_function
from tests.support.runtime_config import plain_config

MATRIX = LogicalParameter(
    name="w",
    shape=(8, 16),
    kind=Kind.MATRIX,
    route=Route.MATRIX,
    **placements_for(Route.MATRIX, Placed(shape=(8, 16)), owned=True),
    reason="test",
)
F64 = {"compute_dtype": torch.float64, "reduce_dtype": torch.float64, "master_dtype": torch.float64}


def test_times_of_another_dtype_are_not_taken_from_the_cache(tmp_path: Path) -> None:
    for dtypes in ({}, F64, {}):
        config = plain_config(ns_cost="measured", ns_cost_cache=str(tmp_path), **dtypes)  # type: ignore[arg-type]
        assert cost_function((MATRIX,), config, torch.device("cpu"), None)(8, 16) > 0
    entries = json.loads((tmp_path / CACHE).read_text())["entries"]
    assert len(entries) == 2
    assert len({entry["newton_schulz"] for entry in entries}) == 2


def test_a_cost_source_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="'guess'.*measured, file or closed-form"):
        cost_function((MATRIX,), plain_config(ns_cost="guess"), torch.device("cpu"), None)
