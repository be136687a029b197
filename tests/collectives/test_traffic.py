"""The byte counter: sums by operation and axis, and refusals."""

from __future__ import annotations

import json

import pytest

from megamuon.collectives.traffic import Traffic


def filled() -> Traffic:
    traffic = Traffic()
    traffic.sent("gather", "shard", 100)
    traffic.sent("gather", "shard", 20)
    traffic.sent("reduce", "shard", 7)
    traffic.sent("reduce", "replicate", 3)
    traffic.sent("norm", "world", 0)
    return traffic


def test_sums_by_operation_and_axis() -> None:
    traffic = filled()
    assert traffic.bytes() == 130
    assert traffic.bytes("gather") == traffic.bytes("gather", "shard") == 120
    assert traffic.bytes("reduce") == 10
    assert traffic.bytes(axis="shard") == 127
    assert traffic.bytes("publish") == traffic.bytes("gather", "replicate") == 0
    assert (traffic.calls(), traffic.calls("gather"), traffic.calls(axis="shard")) == (5, 2, 3)
    assert traffic.calls("norm", "world") == 1  # a call of zero bytes is a call


def test_the_table_is_ordered_and_json() -> None:
    table = filled().as_dict()
    assert list(table) == ["gather", "reduce", "norm"]
    assert table["reduce"] == {
        "shard": {"bytes": 7, "calls": 1},
        "replicate": {"bytes": 3, "calls": 1},
    }
    assert json.loads(json.dumps(table)) == table


def test_reset_starts_at_zero() -> None:
    traffic = filled()
    traffic.reset()
    assert (traffic.bytes(), traffic.calls(), traffic.as_dict()) == (0, 0, {})


@pytest.mark.parametrize(
    ("operation", "axis", "nbytes", "words"),
    [
        ("gather", "row", 1, "traffic axis 'row'"),
        ("send", "shard", 1, "traffic operation 'send'"),
        ("gather", "shard", -1, "-1 bytes is negative"),
    ],
)
def test_wrong_counts_are_refused(operation: str, axis: str, nbytes: int, words: str) -> None:
    traffic = Traffic()
    with pytest.raises(ValueError, match=words):
        traffic.sent(operation, axis, nbytes)
    assert traffic.calls() == 0


def test_a_question_about_an_unknown_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="traffic axis 'columns'"):
        Traffic().bytes(axis="columns")
