"""The dataclasses themselves."""

from __future__ import annotations

import dataclasses

import pytest

from megamuon.arguments import Config, ConfigError, config_from_values, values_from_config
from megamuon.arguments.config import components
from megamuon.flags import flag, flag_specs


def test_configs_are_frozen_and_keyword_only():
    for config_class in (*components().values(), Config):
        assert config_class.__dataclass_params__.frozen
        assert all(field.kw_only for field in dataclasses.fields(config_class))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().training.seed = 3  # type: ignore[misc]


def test_flat_and_nested_forms_are_equivalent():
    values = values_from_config(Config())
    assert config_from_values(values) == Config()
    assert config_from_values({"seed": 5}).training.seed == 5
    with pytest.raises(ConfigError, match="sede"):
        config_from_values({"sede": 5})


def test_megatrons_rules_for_bools():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Sample:
        off_one: bool = flag(False, "off")
        on_one: bool = flag(True, "on")

    off, on = flag_specs("sample", Sample)
    assert (off.names, off.off_names) == (("--off-one",), ())
    assert (on.names, on.off_names) == ((), ("--no-on-one", "--disable-on-one"))


def test_a_type_without_a_flag_form_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Sample:
        table: dict[str, int] | None = flag(None, "no words make a dict")

    with pytest.raises(TypeError, match="dict"):
        flag_specs("sample", Sample)
