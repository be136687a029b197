"""Bad descriptions are refused with the field's name, all problems at once."""

from __future__ import annotations

import pytest

from megamuon.models import ModelConfigError, RecomputeConfig
from tests.support.models import small_config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"hidden_size": 4.5}, "hidden_size is 4.5"),
        ({"num_query_groups": 3}, "num_query_groups 3 does not divide num_attention_heads 4"),
        ({"kv_channels": 15}, "kv_channels 15"),
        ({"rotary_percent": 0.45}, "rotates 7 channels"),
        ({"rotary_percent": 1.5}, "rotary_percent 1.5"),
        ({"position_embedding": "alibi"}, "position_embedding 'alibi'"),
        ({"normalization": "BatchNorm"}, "normalization 'BatchNorm'"),
        ({"activation": "tanh"}, "activation 'tanh'"),
        ({"attention_backend": "xformers"}, "attention_backend 'xformers'"),
        ({"hidden_dropout": 1.0}, "hidden_dropout 1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout -0.1"),
        ({"norm_epsilon": 0.0}, "norm_epsilon 0.0"),
        ({"init_method_std": -1.0}, "init_method_std -1.0"),
        ({"recompute": RecomputeConfig(granularity="full")}, "needs uniform or block"),
        ({"recompute": RecomputeConfig(granularity="some")}, "granularity 'some'"),
        (
            {"recompute": RecomputeConfig(granularity="selective", method="block")},
            "takes modules",
        ),
        ({"recompute": RecomputeConfig(modules=("moe",))}, "recompute module 'moe'"),
        (
            {"recompute": RecomputeConfig(granularity="full", method="block", num_layers=0)},
            "num_layers 0",
        ),
    ],
)
def test_each_problem_names_its_field(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelConfigError, match=words):
        small_config(**changes)


def test_all_problems_at_once() -> None:
    with pytest.raises(ModelConfigError) as raised:
        small_config(num_layers=-1, activation="x", hidden_dropout=2.0)
    text = str(raised.value)
    assert all(name in text for name in ("num_layers", "activation", "hidden_dropout"))


def test_odd_heads_are_fine_without_rotation() -> None:
    assert small_config(kv_channels=15, position_embedding="none").query_size == 60
