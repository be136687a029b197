"""Which flags a resume compares: all but those with a reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megamuon.arguments import config_to_nested, specs_by_dest
from megamuon.arguments.resume import (
    DIGESTS,
    FREE,
    MAY_CHANGE,
    OF_THE_ORDER,
    OF_TRAINING,
    compared,
    differences,
    model_differences,
    overridable,
)
from megamuon.flags import FlagSpec
from tests.support.command_lines import parse, problems


def test_every_free_flag_exists_once() -> None:
    named = Counter(dest for dests in MAY_CHANGE.values() for dest in dests)
    assert set(named) <= set(specs_by_dest())
    assert set(named.values()) == {1}
    assert set(DIGESTS.values()) <= FREE
    assert compared() >= OF_THE_ORDER | OF_TRAINING


# What shapes the model, its training or the order of its data, and must never become free.
MUST_BE_COMPARED = {
    "rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling",
    "rope_scaling_factor", "layernorm_epsilon", "layernorm_zero_centered_gamma",
    "normalization", "swiglu", "squared_relu", "openai_gelu", "position_embedding_type",
    "init_method_std", "hidden_dropout", "attention_dropout", "seq_length", "seed", "shuffle",
    "dataloader_type", "global_batch_size", "muon_momentum", "muon_momentum_form",
    "muon_nesterov", "muon_scale_mode", "muon_extra_scale_factor", "muon_num_ns_steps",
    "muon_coefficient_type", "ns_dtype", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps",
    "bf16", "fp64", "grad_reduce_in_bf16", "gather_in_bf16", "moe_router_topk",
    "moe_router_norm_topk_prob", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_aux_loss_scope", "moe_expert_capacity_factor", "moe_token_drop_policy",
    "tokenizer_type", "eod_mask_loss", "reset_position_ids", "reset_attention_mask",
    "mock_data",
}  # fmt: skip


def test_what_shapes_a_run_is_compared() -> None:
    assert compared() >= MUST_BE_COMPARED


def another(spec: FlagSpec, value: Any) -> Any:
    """A stored value that is not ``value``."""
    if spec.value_type is bool:
        return not value
    if spec.choices:
        return next(choice for choice in spec.choices if choice != value)
    return [99] if spec.many else "another" if spec.value_type is str else (value or 0) + 1


@pytest.mark.parametrize("dest", sorted(specs_by_dest()))
def test_a_changed_flag_is_named_unless_it_is_free(dest: str) -> None:
    config = parse().config
    spec, stored = specs_by_dest()[dest], config_to_nested(config)
    assert differences(stored, config) == []
    value = stored[spec.component][dest]
    stored[spec.component][dest] = another(spec, value)
    found = differences(stored, config)
    foreign = dest.startswith(("sgd_", "normuon_", "shampoo_", "soap_"))  # --optimizer is muon
    if dest in FREE or foreign:
        assert found == []
        return
    (difference,) = found
    assert (difference.dest, difference.present) == (dest, value)
    for part in (f"{dest} is ", "in the checkpoint and ", f"({spec.flag})"):
        assert part in str(difference)


def test_flags_of_an_optimizer_count_where_both_use_it() -> None:
    config = parse("--optimizer normuon --normuon-beta2 0.9 --muon-momentum 0.9").config
    stored = config_to_nested(parse("--optimizer muon").config)
    assert [found.dest for found in differences(stored, config)] == ["muon_momentum"]
    stored["optimizer"]["optimizer"] = "adam"
    assert differences(stored, config) == []


def test_what_a_checkpoint_lacks_and_left_out_components_do_not_count() -> None:
    config = parse("--clip-grad 2 --rotary-base 500000").config
    stored = config_to_nested(parse().config)
    assert [found.dest for found in differences(stored, config)] == ["rotary_base", "clip_grad"]
    assert [d.dest for d in differences(stored, config, without=("optimizer",))] == ["rotary_base"]
    del stored["model"]["rotary_base"], stored["optimizer"]
    assert differences(stored, config) == []


def test_what_the_weights_compute_is_told_from_how_they_are_trained() -> None:
    stored = config_to_nested(parse().config)
    changed = parse("--norm-epsilon 1e-6 --hidden-dropout 0.1 --seed 5 --bf16").config
    assert [found.dest for found in model_differences(stored, changed)] == ["layernorm_epsilon"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--load x --override-checkpoint-args seed clip_grad data_path", ()),
        ("--override-checkpoint-args seed", ("needs --load", "has no effect without --load")),
        ("--load x --override-checkpoint-args sed", ("sed: is no flag; did you mean seed?",)),
        ("--load x --override-checkpoint-args lr", ("lr: may change without it",)),
        ("--load x --finetune --override-checkpoint-args seed", ("--finetune takes weights",)),
        ("--max-failed-saves 3", ("--max-failed-saves 3: needs --save-failure warn",)),
        ("--max-skipped-iterations 0", ("must be at least 1",)),
        ("--reuse-save-directory", ("has no effect without --save",)),
    ],
)
def test_overrides_are_checked(words: str, expected: tuple[str, ...]) -> None:
    found = problems(words)
    assert bool(found) == bool(expected), found
    if expected:
        assert any(expected[-1] in problem for problem in found), found


def test_what_may_be_overridden() -> None:
    assert overridable() == compared() | set(DIGESTS.values())
