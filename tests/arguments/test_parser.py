"""Reading command lines: everything at once, presets, spellings, extra arguments."""

from __future__ import annotations

import argparse

import pytest

from megamuon.arguments import ConfigError, build_parser, parse_config, specs_by_dest
from megamuon.arguments.config import components
from tests.support.command_lines import BASE, PRESETS, parse, problems


def _words(spec) -> list[str]:
    """Every way of giving a flag, one per choice."""
    if spec.value_type is bool:
        return list(spec.spellings)
    values = spec.choices or ((1,) if spec.value_type is int else (0.5,))
    if spec.value_type is str and not spec.choices:
        values = ("word",)
    return [f"{name} {value}" for name in spec.spellings for value in values]


def test_every_flag_has_help_and_a_component():
    for dest, spec in specs_by_dest().items():
        assert len(spec.help) > 10, dest
        assert not spec.help.endswith("."), dest
        assert spec.component in components()


def test_every_spelling_and_every_choice_reaches_its_field():
    parser = build_parser()
    for dest, spec in specs_by_dest().items():
        for words in _words(spec):
            found = vars(parser.parse_args(words.split()))
            assert list(found) == [dest], words
            value = found[dest][0] if spec.many else found[dest]
            if spec.value_type is bool:
                assert value is (words in spec.names)
            else:
                assert isinstance(value, spec.value_type)
                assert str(value) == words.split()[1] or spec.value_type is float


def test_abbreviations_are_unknown_flags():
    assert problems("--num-lay 3") == ("--num-lay: unknown flag; did you mean --num-layers?",)


def test_all_problems_are_reported_at_once():
    found = problems(
        "--train-iters abc --micro-batchsize 3 --fp16 --optimizer lion --lr-decay-style none "
        "--zero-stage 7 --save there --hidden-dropout 1.5 --position-embedding-type yarn stray"
    )
    expected = (
        "--train-iters abc: invalid integer value: 'abc'",
        "--micro-batchsize: unknown flag; did you mean --micro-batch-size?",
        "--fp16: refused: FP16 training is not in this version; use --bf16",
        "--optimizer lion: refused: Lion is not in this version; use adam",
        "--lr-decay-style none: must be one of",
        "--zero-stage 7: must be one of 1, 2, 3",
        "--save there: needs --save-interval",
        "--hidden-dropout 1.5: must be below 1.0",
        "--position-embedding-type yarn: refused: YaRN",
        "'stray' after --position-embedding-type: a word that belongs to no flag",
    )
    assert len(found) == len(expected), found
    for start in expected:
        assert any(problem.startswith(start) for problem in found), start


def test_the_error_is_one_line_per_problem():
    with pytest.raises(ConfigError) as caught:
        parse("--fp16 --moe-layer-freq 2")
    assert str(caught.value).count("\n") == 1


def test_an_unreadable_value_is_not_also_called_missing():
    base = BASE.replace("--train-iters 10", "--train-iters ten")
    assert problems(base=base) == ("--train-iters ten: invalid integer value: 'ten'",)


def test_a_flag_without_its_value_hides_no_other_problem():
    found = problems("--save --fp16")
    assert [problem.split(":")[0] for problem in found] == ["--save", "--fp16"]


def test_underscores_are_answered_with_the_dashed_spelling():
    assert "did you mean --global-batch-size?" in problems("--global_batch_size 4")[0]


def test_words_before_the_first_flag_are_a_problem():
    assert problems(base="train " + BASE) == ("'train': a word that belongs to no flag",)


def test_a_preset_fills_and_an_explicit_flag_wins():
    parsed = parse("--num-layers 5")
    assert parsed.config.model.num_layers == 5
    assert parsed.config.model.hidden_size == 64
    assert parsed.config.model.hidden_dropout == 0.0
    assert parsed.config.ownership.owner_unit_threshold == 100
    assert "num_layers" in parsed.explicit
    assert "hidden_size" not in parsed.explicit
    assert any("--num-layers" in note for note in parsed.notes)


def test_an_unknown_preset_names_the_known_ones():
    base = BASE.replace("small", "smal")
    assert problems(base=base)[0] == "--model smal: no such preset; there are: small"


def test_a_preset_with_a_foreign_name_is_a_fault_of_the_program():
    with pytest.raises(ValueError, match="layers"):
        parse_config(BASE.split(), presets={"small": {"layers": 3}}, world_size=1)


def test_defaults_of_the_script_lose_to_presets_and_flags():
    defaults = {"num_layers": 9, "seed": 7, "lr": 5.0}
    config = parse(defaults=defaults).config
    assert (config.model.num_layers, config.training.seed, config.schedule.lr) == (2, 7, 1e-3)
    with pytest.raises(ValueError, match="sede"):
        parse(defaults={"sede": 1})


@pytest.mark.parametrize("dash", ["_", "-"])
def test_both_spellings_of_the_scheduler_flags(dash):
    assert parse(
        f"--override-opt{dash}param-scheduler"
    ).config.schedule.override_opt_param_scheduler
    name = f"--use-checkpoint-opt{dash}param-scheduler"
    assert parse(name).config.schedule.use_checkpoint_opt_param_scheduler


def test_other_spellings():
    assert parse("--save x --persistent-save-interval 5").config.checkpoint.save_interval == 5
    assert parse("--disable-bias-linear").config.model.add_bias_linear is False
    for name in ("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"):
        assert parse(name).config.logging.log_loss_scale_to_tensorboard is False
    assert parse("--no-muon-nesterov").config.optimizer.muon_nesterov is False
    assert parse("--norm-epsilon=1e-6").config.model.layernorm_epsilon == 1e-6
    assert parse("--owner-byte-cap none").config.ownership.owner_byte_cap is None


def test_optimizer_spellings():
    assert parse("--optimizer adamw").config.optimizer.optimizer == "adam"
    parsed = parse("--optimizer dist_muon")
    assert parsed.config.optimizer.optimizer == "muon"
    assert any("dist_muon" in note for note in parsed.notes)


def test_a_repeated_flag_is_noted():
    parsed = parse("--seed 1 --seed 2")
    assert parsed.config.training.seed == 2
    assert "--seed was given more than once; the last value counts" in parsed.notes


def test_extra_arguments():
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        group = parser.add_argument_group("mine")
        group.add_argument("--horizon", type=int, required=True)
        group.add_argument("--camera", default="top")
        return parser

    parsed = parse("--horizon 4", extra_args_provider=provider)
    assert vars(parsed.extra) == {"horizon": 4, "camera": "top"}
    found = problems("--fp16", extra_args_provider=provider)
    assert {p.split(":")[0] for p in found} == {"--fp16", "--horizon"}
    assert problems("--horizon x", extra_args_provider=provider)[0].startswith(
        "--horizon x: invalid"
    )


def test_help_lists_our_flags_and_hides_refused_ones(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_config(["--help"], presets=PRESETS, world_size=1)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "--owner-planner" in shown
    assert "--num-experts" in shown
    assert "--moe-layer-freq" not in shown
