"""The start-up lines say what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megamuon.data.build import DataSpec, build_train_valid_test
from megamuon.data.identity import data_identity, identity_digest
from megamuon.data.summary import describe_data
from tests.support.corpora import write_corpus


def spec(**more: Any) -> DataSpec:
    fields: dict[str, Any] = {"sequence_length": 8, "samples": (50, 5, 0), "eod": 0}
    return DataSpec(**fields | {"vocab_size": 100, "split": "80,20,0"} | more)


def test_lines_at_the_start(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "notes", [[1] * 9 + [0]] * 20)
    data = spec(data_path=[prefix])
    identity = data_identity(data)
    train, valid = describe_data(build_train_valid_test(data), identity)
    assert train.startswith(
        "train data: 50 samples of 8 tokens from notes, documents 0 to 16 of 20 (160 tokens): "
        "2.50 epochs, data repeats | corpus "
    )
    assert train.endswith(identity_digest(identity["training data"]))
    assert "documents 16 to 20 of 20 (40 tokens): 1.00 epochs" in valid
    blend = build_train_valid_test(spec(data_path=["1", prefix, "3", prefix], samples=(8, 0, 0)))
    first, *parts = describe_data(blend, {})
    assert first == "train data: 8 samples from a blend of 2, no data repeats"
    assert [part.split()[0] for part in parts] == ["0.2500", "0.7500"]


def test_foreign_datasets_are_no_error() -> None:
    lines = describe_data([np.zeros(1234), iter(()), None], {})
    assert lines == ["train data: 1,234 samples of the script's own dataset"]
