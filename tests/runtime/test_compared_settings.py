"""Which settings ranks compare before they train: all but those that are exempt by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from megamuon.optim import SoapConfig
from megamuon.runtime import OptimizerSettings, RuntimeConfig
from megamuon.runtime.config import MAY_DIFFER, config_texts

# Another legal value of each field; those that are not here are listed as exempt.
OTHERS: dict[str, Any] = {
    "zero_stage": 2,
    "collectives": "p2p",
    "fabric": "host",
    "ring_slots": 3,
    "chunk_bytes": 4096,
    "publish_tile_bytes": 4096,
    "collective_deadline": 1.0,
    "publish": "sync",
    "compute_dtype": torch.bfloat16,
    "gather_dtype": torch.bfloat16,
    "reduce_dtype": torch.bfloat16,
    "ns_cost": "closed-form",
    "check_collective_order": True,
    "seed": 1,
    "optimizer": OptimizerSettings(matrices="soap", matrix=SoapConfig(eps=0.5)),
}
WITH_OTHERS = {"matrix_update", "master_dtype", "owner_layout", "schedule"}  # change in company


def test_every_field_is_compared_or_exempt_with_a_reason() -> None:
    names = {field.name for field in fields(RuntimeConfig)}
    assert set(MAY_DIFFER) < names
    assert names == set(OTHERS) | set(MAY_DIFFER) | WITH_OTHERS
    assert set(config_texts(RuntimeConfig())) >= names - set(MAY_DIFFER) - {"optimizer"}
    assert all(len(reason) > 20 for reason in MAY_DIFFER.values())


@pytest.mark.parametrize("name", OTHERS)
def test_a_changed_field_changes_what_is_compared(name: str) -> None:
    texts = config_texts(RuntimeConfig())
    changed = config_texts(replace(RuntimeConfig(), **{name: OTHERS[name]}))
    found = {key for key in texts.keys() | changed.keys() if texts.get(key) != changed.get(key)}
    assert found
    if name != "optimizer":
        assert found == {name}
