"""Megatron flags that stand for ours, and the presets of the parser itself."""

from __future__ import annotations

import json

import pytest

from megamuon.arguments import specs_by_dest
from megamuon.arguments.config_parallel import OwnershipFlags
from megamuon.arguments.mapping import LINES, apply_mapped_flags
from tests.support.command_lines import BASE, parse, problems


@pytest.mark.parametrize(
    ("words", "component", "dest", "value"),
    [
        ("--data-parallel-sharding-strategy optim_grads_params", "parallel", "zero_stage", 3),
        ("--data-parallel-sharding-strategy optim_grads", "parallel", "zero_stage", 2),
        ("--data-parallel-sharding-strategy optim", "parallel", "zero_stage", 1),
        ("--torch-fsdp2-no-reshard-after-forward", "parallel", "zero_stage", 2),
        ("--use-megatron-fsdp --sharding hsdp", "parallel", "sharding", "hsdp"),
        ("--outer-dp-sharding-strategy optim", "parallel", "sharding", "hsdp"),
        ("--outer-dp-sharding-strategy no_shard", "parallel", "sharding", "fsdp"),
        ("--expert-tensor-parallel-size 2", "parallel", "tensor_model_parallel_size", 2),
        ("--moe-router-pre-softmax", "model", "moe_router_norm_topk_prob", False),
        ("--use-torch-fsdp2", "parallel", "sharding", "fsdp"),
        ("--use-megatron-fsdp", "parallel", "sharding", "fsdp"),
        ("--use-distributed-optimizer", "parallel", "sharding", "fsdp"),
        ("--recompute-activations", "recompute", "recompute_granularity", "selective"),
        ("--accumulate-allreduce-grads-in-fp32", "precision", "grad_reduce_in_bf16", False),
        ("--no-position-embedding", "model", "position_embedding_type", "rope"),  # the preset's
        (
            "--no-position-embedding --position-embedding-type rope",
            "model",
            "position_embedding_type",
            "rope",
        ),
    ],
)
def test_a_mapped_flag_sets_its_field_and_says_so(words, component, dest, value):
    parsed = parse(words)
    assert getattr(getattr(parsed.config, component), dest) == value
    assert any(words.split()[0] in note and "mapped" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--data-parallel-sharding-strategy optim_grads --zero-stage 3", "--zero-stage 3"),
        ("--outer-dp-sharding-strategy optim --sharding fsdp", "--sharding fsdp"),
        (
            "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 2",
        ),
        (
            "--accumulate-allreduce-grads-in-fp32 --bf16 --grad-reduce-in-bf16",
            "--grad-reduce-in-bf16",
        ),
        ("--no-position-embedding --position-embedding-type learned_absolute", "learned_absolute"),
        (
            "--torch-fsdp2-no-reshard-after-forward --data-parallel-sharding-strategy "
            "optim_grads_params",
            "--torch-fsdp2-no-reshard-after-forward",
        ),
    ],
)
def test_flags_that_mean_different_things_are_a_problem(words, named):
    found = problems(words)
    assert len(found) == 1
    assert named in found[0]
    assert "drop one of the two" in found[0]


def test_a_strategy_that_does_not_exist_here_is_refused():
    assert "refused" in problems("--data-parallel-sharding-strategy no_shard")[0]


def test_words_from_files(tmp_path):
    base = BASE.replace("--mock-data", "")
    words = tmp_path / "words"
    words.write_text("0.3 a\n0.7 b\n")
    data = parse(f"--data-args-path {words} --split 9,1,0", base=base).config.data
    assert data.data_path == ("0.3", "a", "0.7", "b")
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": "1 a", "valid": ["b"], "test": None}))
    data = parse(f"--per-split-data-args-path {splits}", base=base).config.data
    assert (data.train_data_path, data.valid_data_path) == (("1", "a"), ("b",))
    assert data.test_data_path is None


def test_bad_files_of_words_are_problems_that_name_them(tmp_path):
    bad = tmp_path / "bad.json"
    for text in ("[1]", "{", '{"dev": []}', '{"train": 3}', '{"train": ["1", 2]}'):
        bad.write_text(text)
        assert f"{bad}: cannot be read" in problems(f"--per-split-data-args-path {bad}")[0], text
    assert "missing" in problems(f"--data-args-path {tmp_path / 'missing'}")[0]


def test_the_torch_preset():
    optimizer = parse("--muon-preset torch --muon-scale-mode spectral").config.optimizer
    assert (optimizer.muon_momentum_form, optimizer.ns_form, optimizer.ns_dtype) == (
        "ema",
        "standard",
        "bf16",
    )
    assert optimizer.muon_coefficient_type == "jordan"
    assert optimizer.muon_scale_mode == "spectral"
    assert optimizer.muon_extra_scale_factor == 1.0


def test_a_line_is_a_preset_of_three_flags():
    ownership = parse("--line C --collectives per_owner").config.ownership
    assert (ownership.param_layout, ownership.collectives) == ("owner", "per_owner")
    ownership = parse("--line M --owner-planner cost_aware").config.ownership
    assert (ownership.collectives, ownership.owner_planner) == ("p2p", "cost_aware")
    assert parse("--line M").config.ownership.owner_planner == "role_greedy"
    ownership = parse("--line B").config.ownership
    assert (ownership.param_layout, ownership.matrix_update) == ("even", "gather")
    assert ownership.collectives == "grouped"


def test_the_default_is_line_d():
    assert parse().config.ownership == parse("--line D").config.ownership
    ownership = parse("--line D --collectives grouped").config.ownership
    assert (ownership.line, ownership.param_layout) == ("D", "owner")
    assert (ownership.collectives, ownership.matrix_update) == ("grouped", "owner")
    # The fields' defaults are what the preset of their line says.
    default = OwnershipFlags()
    assert LINES[default.line].items() <= vars(default).items()
    assert set(LINES) == set(specs_by_dest()["line"].choices)


def test_line_a_means_adam_unless_another_optimizer_is_given():
    config = parse("--line A").config
    assert (config.optimizer.optimizer, config.ownership.collectives) == ("adam", "fsdp2")
    assert parse("--line A --optimizer sgd").config.optimizer.optimizer == "sgd"
    assert parse("--line A --optimizer adamw").config.optimizer.optimizer == "adam"


def test_a_line_that_is_not_in_this_version_is_refused_by_name():
    (problem,) = problems("--line H")
    assert problem.startswith("--line H: refused: ")
    assert "relays" in problem
    assert "must be one of A, B, C, D, M" in problems("--line X")[0]


def test_without_rotary_positions_there_are_none_at_all():
    filled = apply_mapped_flags({"add_position_embedding": False}, {}, {})
    assert filled.values == {"position_embedding_type": "none"}
