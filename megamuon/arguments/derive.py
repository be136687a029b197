"""Defaults that follow from other flags: batch sizes, shard ranks, data splits.

Owns the defaults that depend on other flags. Invariant: derivation never raises on bad input
(checks come after, in ``validate``) and never changes a value that somebody gave. Formulas:
Megatron's argument normalisation. Tested by ``tests/arguments/test_derive.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamuon.arguments.config import specs_by_dest
from megamuon.arguments.run_context import RunContext
from megamuon.optim.registry import RECIPES, flags_of, flags_of_all
from megamuon.sizes import head_channels, mlp_width

DEFAULT_SPLIT = "969, 30, 1"


def _model(values: dict[str, Any]) -> None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if values["ffn_hidden_size"] is None and hidden is not None:
        values["ffn_hidden_size"] = mlp_width(hidden, gated=values["swiglu"])
    if values["num_experts"] is not None and values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    if values["kv_channels"] is None and hidden and heads:
        values["kv_channels"] = head_channels(hidden, heads)
    if not values["group_query_attention"] and values["num_query_groups"] == 1 and heads:
        values["num_query_groups"] = heads  # readers need one field, whatever the attention


def places(tensor_parallel_size: int, world_size: int) -> int | None:
    """Ranks less their tensor-parallel partners, which replicas and shards are made of; None where
    the ranks do not divide.
    """
    whole = tensor_parallel_size > 0 and world_size % tensor_parallel_size == 0
    return world_size // tensor_parallel_size if whole else None


def sample_ranks(tensor_parallel_size: int, world_size: int) -> int | None:
    """Ranks with samples of their own, which batches are made of (Megatron's data-parallel size);
    None where the ranks do not divide. Every place is one without context parallelism.
    """
    return places(tensor_parallel_size, world_size)


def _shards(values: dict[str, Any], context: RunContext) -> None:
    """A replica is a node: the ranks that the launcher started here, less their tp partners."""
    if values["sharding"] != "hsdp" or values["shard_size"] is not None:
        return
    if "shard_size" not in context.unusable:
        local = context.local_world_size or context.world_size
        values["shard_size"] = places(values["tensor_model_parallel_size"], local)


def _even_slices(values: dict[str, Any], context: RunContext) -> list[str]:
    """The default operators move owners' segments; even slices move by ``grouped`` calls."""
    chosen = {"line", "collectives"} & context.explicit
    if chosen or (values["param_layout"], values["collectives"]) != ("even", "ready"):
        return []
    values["collectives"] = "grouped"
    return ["--param-layout even: --collectives grouped is used, since ready is for owners"]


def _batches(values: dict[str, Any], world_size: int) -> None:
    micro = values["micro_batch_size"]
    ranks = sample_ranks(values["tensor_model_parallel_size"], world_size)
    if values["global_batch_size"] is None and micro is not None and micro > 0:
        values["global_batch_size"] = micro * (ranks or world_size)
    if values["eval_micro_batch_size"] is None:
        values["eval_micro_batch_size"] = micro
    if values["eval_global_batch_size"] is None:
        values["eval_global_batch_size"] = values["global_batch_size"]


def _schedules(values: dict[str, Any]) -> None:
    if values["lr_decay_iters"] is None:
        values["lr_decay_iters"] = values["train_iters"]
    if values["lr_decay_samples"] is None:
        values["lr_decay_samples"] = values["train_samples"]
    if values["weight_decay_incr_style"] == "constant":
        for dest in ("start_weight_decay", "end_weight_decay"):
            if values[dest] is None:
                values[dest] = values["weight_decay"]


def _outputs(values: dict[str, Any]) -> None:
    if values["recompute_granularity"] == "selective" and values["recompute_modules"] is None:
        values["recompute_modules"] = ("core_attn",)
    if values["dataloader_type"] is None:
        values["dataloader_type"] = "single"


def derive(values: Mapping[str, Any], context: RunContext) -> tuple[dict[str, Any], list[str]]:
    """Fill what follows from other values.  Returns all values and the notes to print."""
    filled, notes = dict(values), []
    _model(filled)
    _shards(filled, context)
    _batches(filled, context.world_size)
    _schedules(filled)
    _outputs(filled)
    if filled["data_path"] and filled["split"] is None and "split" not in context.unusable:
        filled["split"] = DEFAULT_SPLIT
        notes.append(f"--split was not given: {DEFAULT_SPLIT} is used")
    notes += _even_slices(filled, context)
    notes += _idle_flags(filled, context)
    return filled, notes


_COST_FLAGS = ("ns_cost", "ns_cost_file", "ns_cost_cache")  # of updates of whole matrices
_READY_FLAGS = ("fabric", "ring_slots", "chunk_kib", "publish_tile_kib", "collective_deadline")
_OWNER_FLAGS = (
    "owner_unit_threshold",
    "merge_experts",
    "owner_byte_cap",
    "owner_layer_spreading",
    "owner_column_balance",
)


def _idle_flags(values: Mapping[str, Any], context: RunContext) -> list[str]:
    """A note for each kind of flags that were given and that nothing will read."""
    notes = []
    recipe = RECIPES.get(values["optimizer"])
    others = flags_of_all() - flags_of(recipe.name) if recipe else frozenset()
    unread = (*others, *(() if recipe is None or recipe.whole else _COST_FLAGS))
    if idle := sorted(context.explicit.intersection(unread)):
        notes.append(f"--optimizer {values['optimizer']}: no effect of {_spelled(idle)}")
    if values["sequence_parallel"] and values["tensor_model_parallel_size"] == 1:
        # Megatron's rule; its scripts give the flag whatever the size.
        notes.append("--sequence-parallel: off without tensor parallelism, as in Megatron")
    ready = values["collectives"] == "ready"
    idle = [dest for dest in _READY_FLAGS if dest in context.explicit]
    if idle and not ready:
        notes.append(f"--collectives {values['collectives']}: no effect of {_spelled(idle)}")
    idle = [dest for dest in (*_OWNER_FLAGS, "publish") if dest in context.explicit]
    if idle and values["param_layout"] == "even":
        notes.append(f"--param-layout even: no effect of {_spelled(idle)}, since nobody owns")
    replicas = ("publish", "publish_tile_kib") if ready else ("publish",)
    idle = [dest for dest in replicas if dest in context.explicit]
    if idle and values["sharding"] != "hsdp":
        notes.append(f"--sharding fsdp: no effect of {_spelled(idle)}, since there is one replica")
    if values["num_experts"] is None:
        idle = sorted(d for d in context.explicit if d.startswith("moe_") or d == "merge_experts")
        if idle:
            notes.append(f"no --num-experts: no effect of {_spelled(idle)}")
    return notes


def _spelled(dests: list[str]) -> str:
    return ", ".join(specs_by_dest()[dest].flag for dest in dests)
