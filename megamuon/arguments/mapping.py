"""Megatron flags that mean one of ours, and presets.

Owns the translation of `mapped` table flags and of ``--model``, ``--line`` and ``--muon-preset``
into field values. Invariant: a mapped flag never overrides an explicit flag; if the two disagree,
or two mapped flags do, that is a problem. Tested by ``tests/arguments/test_mapping.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamuon.arguments.config import specs_by_dest
from megamuon.arguments.megatron_table import table_by_dest


@dataclass(frozen=True, kw_only=True)
class Filled:
    """Values that one step of the resolution contributes."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _no_positions(_value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    # Megatron scripts write this beside `--position-embedding-type rope` (or a preset means it),
    # where it only says that there is no learned table.
    if given.get("position_embedding_type") == "rope":
        return {}
    return {"position_embedding_type": "none"}


def _strategy(value: Any, _given: Mapping[str, Any]) -> dict[str, Any]:
    return {"zero_stage": {"optim_grads_params": 3, "optim_grads": 2, "optim": 1}[value]}


def _sharded(_value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    # Shards are asked for, which both shardings have; only the plain one where nobody chose.
    return {"sharding": given.get("sharding", "fsdp")}


def _outer(value: Any, _given: Mapping[str, Any]) -> dict[str, Any]:
    # Replicas whose optimizer state is sharded too: what owners in the whole grid amount to.
    return {"sharding": "hsdp"} if value == "optim" else {}


def _data_words(path: Any, _given: Mapping[str, Any]) -> dict[str, Any]:
    words = tuple(Path(path).read_text("utf-8").split())
    if not words:
        raise ValueError("the file holds no words")
    return {"data_path": words}


def _split_words(path: Any, _given: Mapping[str, Any]) -> dict[str, Any]:
    stored = json.loads(Path(path).read_text("utf-8"))
    if not isinstance(stored, dict) or set(stored) - {"train", "valid", "test"}:
        raise ValueError("the file must be a JSON object with the keys train, valid, test")
    found = {}
    for name, words in stored.items():
        if words is not None:
            listed = words.split() if isinstance(words, str) else words
            if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
                raise ValueError(f"{name} must be a list of words, got {words!r}")
            found[f"{name}_data_path"] = tuple(listed)
    return found


Mapper = Callable[[Any, Mapping[str, Any]], dict[str, Any]]

MAPPERS: Mapping[str, Mapper] = {
    "add_position_embedding": _no_positions,
    "recompute_activations": lambda _value, _given: {"recompute_granularity": "selective"},
    "accumulate_allreduce_grads_in_fp32": lambda _value, _given: {"grad_reduce_in_bf16": False},
    "use_distributed_optimizer": _sharded,
    "use_torch_fsdp2": _sharded,
    "use_megatron_fsdp": _sharded,
    "outer_dp_sharding_strategy": _outer,
    "expert_tensor_parallel_size": lambda size, _given: {"tensor_model_parallel_size": size},
    "moe_router_pre_softmax": lambda _value, _given: {"moe_router_norm_topk_prob": False},
    "torch_fsdp2_reshard_after_forward": lambda _value, _given: {"zero_stage": 2},
    "data_parallel_sharding_strategy": _strategy,
    "data_args_path": _data_words,
    "per_split_data_args_path": _split_words,
}


def _show(dest: str, value: Any) -> str:
    spec = specs_by_dest()[dest]
    if isinstance(value, bool):
        return spec.flag if value == bool(spec.names) else f"no {spec.flag}"
    words = " ".join(str(item) for item in value) if isinstance(value, tuple) else value
    return f"{spec.flag} {words}"


def apply_mapped_flags(
    table_given: Mapping[str, Any], given: Mapping[str, Any], preset: Mapping[str, Any]
) -> Filled:
    """Values that the given `mapped` flags stand for.  ``given``: the explicit field values;
    ``preset``: those of the model preset, which a mapping may look at.
    """
    filled = Filled()
    sources: dict[str, str] = {}
    for dest, value in table_given.items():
        entry = table_by_dest()[dest]
        said = entry.flag if isinstance(value, bool) else f"{entry.flag} {value}"
        try:
            targets = MAPPERS[dest](value, {**preset, **given})
        except (OSError, ValueError) as error:
            filled.problems.append(f"{said}: cannot be read: {error}")
            continue
        for target, wanted in targets.items():
            if target in given and given[target] != wanted:
                filled.problems.append(
                    f"{said}: means {_show(target, wanted)}, but {_show(target, given[target])} "
                    "was given; "
                    "drop one of the two"
                )
            elif filled.values.get(target, wanted) != wanted:
                filled.problems.append(
                    f"{said}: means {_show(target, wanted)}, but {sources[target]} means "
                    f"{_show(target, filled.values[target])}; drop one of the two"
                )
            else:
                filled.values[target] = wanted
                sources[target] = said
        filled.notes.append(f"{said}: mapped: {entry.note}")
    return filled


# What torch.optim.Muon computes, as values of our flags.  Source: torch 2.13, torch/optim/_muon.py.
TORCH_MUON: Mapping[str, Any] = {
    "muon_momentum_form": "ema",
    "muon_coefficient_type": "jordan",
    "muon_scale_mode": "shape_scaling",
    "muon_extra_scale_factor": 1.0,
    "ns_form": "standard",
    "ns_dtype": "bf16",
}

LINES: Mapping[str, Mapping[str, Any]] = {
    "A": {
        "param_layout": "even",
        "collectives": "fsdp2",
        "matrix_update": "none",
        "optimizer": "adam",
    },
    "B": {"param_layout": "even", "collectives": "grouped", "matrix_update": "gather"},
    "C": {"param_layout": "owner", "collectives": "grouped", "matrix_update": "owner"},
    "D": {"param_layout": "owner", "collectives": "ready", "matrix_update": "owner"},
    "M": {
        "param_layout": "owner",
        "collectives": "p2p",
        "matrix_update": "owner",
        "owner_planner": "role_greedy",
    },
}


def apply_presets(given: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> Filled:
    """Values of ``--line``, ``--muon-preset`` and ``--model``; ``given`` wins over them.

    Raises ValueError if a preset names a dest that is no flag: a fault of the program, not of the
    user.
    """
    filled = Filled()
    if given.get("line") in LINES:
        filled.values.update(LINES[given["line"]])
    if given.get("muon_preset") == "torch":
        filled.values.update(TORCH_MUON)
    name = given.get("model")
    if name is None:
        return filled
    if name not in presets:
        known = ", ".join(sorted(presets)) or "none"
        filled.problems.append(f"--model {name}: no such preset; there are: {known}")
        return filled
    unknown = sorted(set(presets[name]) - set(specs_by_dest()))
    if unknown:
        raise ValueError(f"preset {name!r} names no flag: {unknown}")
    filled.values.update(presets[name])
    changed = sorted(
        dest for dest, value in presets[name].items() if dest in given and given[dest] != value
    )
    if changed:
        flags = ", ".join(specs_by_dest()[dest].flag for dest in changed)
        filled.notes.append(f"--model {name}: changed by explicit flags: {flags}")
    return filled
