"""Values that follow from other values.

Owns the defaults that depend on other flags. Invariant: derivation never raises on bad input
(checks come after, in ``validate``) and never changes a value that somebody gave. Formulas:
Megatron's argument normalisation. Tested by ``tests/arguments/test_derive.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamuon.arguments.facts import Facts

DEFAULT_SPLIT = "969, 30, 1"


def _model(values: dict[str, Any]) -> None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if values["ffn_hidden_size"] is None and hidden is not None:
        # A gated MLP has three matrices instead of two: 2/3 of the width, in multiples of 64.
        values["ffn_hidden_size"] = 8 * hidden // 192 * 64 if values["swiglu"] else 4 * hidden
    if values["kv_channels"] is None and hidden and heads and hidden % heads == 0:
        values["kv_channels"] = hidden // heads
    if not values["group_query_attention"] and values["num_query_groups"] == 1 and heads:
        values["num_query_groups"] = heads  # readers need one field, whatever the attention


def _batches(values: dict[str, Any], world_size: int) -> None:
    micro = values["micro_batch_size"]
    if values["global_batch_size"] is None and micro is not None and micro > 0:
        values["global_batch_size"] = micro * world_size
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


def derive(values: Mapping[str, Any], facts: Facts) -> tuple[dict[str, Any], list[str]]:
    """Fill what follows from other values.  Returns all values and the notes to print."""
    filled, notes = dict(values), []
    _model(filled)
    _batches(filled, facts.world_size)
    _schedules(filled)
    _outputs(filled)
    if filled["data_path"] and filled["split"] is None and "split" not in facts.unusable:
        filled["split"] = DEFAULT_SPLIT
        notes.append(f"--split was not given: {DEFAULT_SPLIT} is used")
    if filled["optimizer"] != "muon":
        idle = sorted(d for d in facts.explicit if d.startswith(("muon_", "ns_")))
        if idle:
            flags = ", ".join("--" + dest.replace("_", "-") for dest in idle)
            notes.append(f"--optimizer {filled['optimizer']}: no effect of {flags}")
    return filled, notes
