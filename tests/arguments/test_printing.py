"""The printed block and the JSON form."""

from __future__ import annotations

import json

import pytest

from megamuon.arguments import (
    Config,
    ConfigError,
    config_from_json,
    config_from_nested,
    config_to_json,
    config_to_nested,
    format_config,
)
from tests.support.command_lines import parse


def test_the_block_has_megatrons_layout():
    lines = format_config(parse("--iterations-to-skip 3 4").config).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[-1] == "-------------------- end of arguments ---------------------"
    assert "  adam_beta1 ...................................... 0.9" in lines
    assert any(
        line.startswith("  iterations_to_skip .") and line.endswith(" [3, 4]") for line in lines
    )
    names = [line.split()[0] for line in lines[1:-1]]
    assert names == sorted(names, key=str.lower)
    assert len(names) == len(set(names)) > 150


@pytest.mark.parametrize("words", ["", "--iterations-to-skip 3 4 --owner-byte-cap none --bf16"])
def test_json_round_trip(words):
    config = parse(words).config
    assert config_from_json(config_to_json(config)) == config


def test_missing_fields_keep_their_defaults():
    assert config_from_json("{}") == Config()


@pytest.mark.parametrize(
    ("component", "dest", "value", "named"),
    [
        ("training", "sede", 1, "training.sede"),
        ("traning", "seed", 1, "traning"),
        ("model", "seed", 1, "model.seed"),
        ("training", "seed", "1", "int"),
        ("training", "seed", True, "int"),
        ("training", "seed", None, "a value is needed"),
        ("parallel", "zero_stage", 4, "one of 1, 2, 3"),
        ("fault", "iterations_to_skip", 3, "list"),
        ("schedule", "lr", float("nan"), "finite"),
    ],
)
def test_a_foreign_field_or_value_is_an_error_that_names_it(component, dest, value, named):
    nested = config_to_nested(Config())
    nested.setdefault(component, {})[dest] = value
    with pytest.raises(ConfigError, match=named):
        config_from_nested(nested)


def test_text_that_is_no_json_is_an_error():
    for text in ("{", "[1]"):
        with pytest.raises(ConfigError, match="stored arguments"):
            config_from_json(text)
    assert json.loads(config_to_json(Config()))["training"]["seed"] == 1234
