"""The models that ``plan_owners.py`` plans: presets, published tables, tables of users.

Owns the way from a name or a file to logical parameters as tensor-parallel ranks would hold them.
Invariant: of a model that can be trained they are those of its modules, cut by the plan of a run;
no weight is ever made. Tested by ``tests/tools/test_plan_owners.py``.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path

import torch

from megamuon.arguments import ModelFlags, RecomputeFlags
from megamuon.matrices import LogicalParameter, collect
from megamuon.models import GPT, PRESETS, gpt_config_from_flags
from megamuon.ownership.inventory import (
    ShapeTableError,
    cut_by_name,
    inventory,
    inventory_names,
    parameters_from_table,
    unknown_model,
)
from megamuon.sharding import plan_sharding


def model_names() -> tuple[str, ...]:
    """Names that ``parameters_for`` knows: presets that can be trained, then tables of shapes."""
    return (*PRESETS, *(name for name in inventory_names() if name not in PRESETS))


def parameters_for(name: str, tp: int = 1) -> tuple[LogicalParameter, ...]:
    """Parameters of a model by name, as ``tp`` tensor-parallel ranks would hold them: of the
    modules themselves where there is a preset, cut by a run's own plan; of a table of shapes else,
    cut by names.

    Raises UnknownModelError with the nearest name, and ShardingError where a run would.
    """
    if name in PRESETS:
        return preset_parameters(name, tp)
    if name not in inventory_names():
        raise unknown_model(name, model_names())
    return cut_by_name(inventory(name), tp)


@cache
def preset_parameters(name: str, tp: int) -> tuple[LogicalParameter, ...]:
    """Parameters that a run of the preset would have, from a model without storage."""
    preset = PRESETS[name]
    known = {field.name for field in fields(ModelFlags)}
    flags = ModelFlags(**{key: value for key, value in preset.items() if key in known})
    multiple = flags.make_vocab_size_divisible_by
    rows = -(-preset["vocab_size"] // multiple) * multiple
    config = gpt_config_from_flags(flags, padded_vocab_size=rows, recompute=RecomputeFlags())
    with torch.device("meta"):
        model = GPT(config)
    placements = plan_sharding(model, tp=tp).placements
    return collect(model, layers=GPT.layer_classes, placements=placements)


def parameters_of_file(path: str, tp: int = 1) -> tuple[LogicalParameter, ...]:
    """Parameters of a user's table of shapes, cut by names for ``tp`` tensor-parallel ranks.

    Raises ShapeTableError naming the file.
    """
    try:
        table = parameters_from_table(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ShapeTableError(f"{path}: {error}") from error
    return cut_by_name(table, tp)
