"""Model and tokenizer flags from a checkpoint."""

from __future__ import annotations

from megamuon.arguments import config_to_nested
from tests.support.command_lines import parse, problems

ASK = (
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --load there --use-checkpoint-args"
)


def _saved(words: str = "--num-layers 6 --seed 99"):
    return config_to_nested(parse(words).config)


def test_architecture_comes_from_the_checkpoint_and_the_rest_does_not():
    asked = []

    def reader(place, step):
        asked.append((place, step))
        return _saved()

    config = parse(base=ASK, words="--ckpt-step 7", read_checkpoint_args=reader).config
    assert asked == [("there", 7)]
    assert config.model.num_layers == 6
    assert config.model == parse("--num-layers 6").config.model
    assert config.tokenizer.tokenizer_type == "byte"
    assert config.training.seed == 1234


def test_an_explicit_flag_wins_and_says_so():
    parsed = parse("--num-layers 3", base=ASK, read_checkpoint_args=lambda *_: _saved())
    assert parsed.config.model.num_layers == 3
    assert "--num-layers 3: wins over the checkpoint's value 6" in parsed.notes


def test_the_pretrained_checkpoint_is_read_when_load_has_none():
    places = {"there": None, "base": _saved()}
    parsed = parse(
        "--pretrained-checkpoint base",
        base=ASK,
        read_checkpoint_args=lambda place, _step: places[place],
    )
    assert parsed.config.model.num_layers == 6


def test_what_can_go_wrong_is_a_problem():
    assert "no checkpoint in there" in problems(base=ASK, read_checkpoint_args=lambda *_: None)[0]
    saved = {"model": {"num_layer": 3}}
    assert "model.num_layer" in problems(base=ASK, read_checkpoint_args=lambda *_: saved)[0]

    def broken(*_):
        raise ValueError("arguments.json is truncated")

    assert "truncated" in problems(base=ASK, read_checkpoint_args=broken)[0]
