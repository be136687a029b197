"""Values that follow from other values."""

from __future__ import annotations

import pytest

from tests.support.command_lines import BASE, parse, problems


@pytest.mark.parametrize(
    ("hidden", "swiglu", "expected"),
    [(64, False, 256), (768, True, 2048), (4096, True, 10880), (5120, True, 13632)],
)
def test_width_of_the_mlp(hidden, swiglu, expected):
    words = f"--hidden-size {hidden} {'--swiglu' if swiglu else ''}"
    assert parse(words).config.model.ffn_hidden_size == expected
    assert parse(words + " --ffn-hidden-size 100").config.model.ffn_hidden_size == 100


def test_heads():
    model = parse().config.model
    assert (model.kv_channels, model.num_query_groups) == (16, 4)
    model = parse("--group-query-attention --num-query-groups 2 --kv-channels 10").config.model
    assert (model.kv_channels, model.num_query_groups) == (10, 2)


def test_batches():
    parsed = parse(world_size=3).config
    assert parsed.training.global_batch_size == 6
    assert parsed.validation.eval_global_batch_size == 6
    assert parsed.validation.eval_micro_batch_size == 2


def test_schedule_lengths():
    assert parse().config.schedule.lr_decay_iters == 10
    samples = BASE.replace("--train-iters 10", "--train-samples 70")
    schedule = parse(base=samples).config.schedule
    assert (schedule.lr_decay_iters, schedule.lr_decay_samples) == (None, 70)


@pytest.mark.parametrize("words", ["--matrix-update gather", "--optimizer adam"])
def test_even_slices_move_by_grouped_calls_unless_told_otherwise(words):
    parsed = parse(f"--param-layout even {words}")
    assert parsed.config.ownership.collectives == "grouped"
    assert [note for note in parsed.notes if note.startswith("--param-layout even: --collectives")]
    for line, moves in (("A", "fsdp2"), ("B", "grouped"), ("C", "grouped")):
        parsed = parse(f"--line {line} --param-layout even --optimizer adam --matrix-update none")
        assert parsed.config.ownership.collectives == moves
        assert not [note for note in parsed.notes if "--collectives" in note]
    padded = parse(f"--collectives padded --param-layout even {words}").config
    assert padded.ownership.collectives == "padded"


def test_owners_keep_the_default_collectives():
    assert parse("--param-layout owner").config.ownership.collectives == "ready"
    assert parse("--optimizer adam").config.ownership.collectives == "ready"


def test_constant_weight_decay_starts_and_ends_alike():
    optimizer = parse("--weight-decay 0.3").config.optimizer
    assert (optimizer.start_weight_decay, optimizer.end_weight_decay) == (0.3, 0.3)


def test_the_default_split_is_said():
    base = BASE.replace("--mock-data", "--data-path a")
    parsed = parse(base=base)
    assert parsed.config.data.split == "969, 30, 1"
    assert any("--split" in note for note in parsed.notes)


def test_selective_recompute_means_attention():
    recompute = parse("--recompute-granularity selective").config.recompute
    assert recompute.recompute_modules == ("core_attn",)


def test_idle_muon_flags_are_noted():
    notes = parse("--optimizer adam --muon-momentum 0.9 --ns-form gram").notes
    assert any("--muon-momentum" in note and "--ns-form" in note for note in notes)


@pytest.mark.parametrize(
    "words",
    ["--hidden-size 0", "--num-attention-heads 0", "--micro-batch-size -2", "--seq-length 0"],
)
def test_nonsense_is_a_problem_and_never_a_crash(words):
    found = problems(words)
    assert any(problem.startswith(words) and "at least 1" in problem for problem in found)
