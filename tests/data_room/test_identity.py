"""An identity follows the data, and the start-up lines say what is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megamuon.data.build import DataSpec, build_train_valid_test
from megamuon.data.identity import data_identity, describe_data
from tests.support.corpora import random_documents, write_corpus


def spec(**more: Any) -> DataSpec:
    fields: dict[str, Any] = {"sequence_length": 8, "samples": (50, 5, 0), "eod": 0}
    return DataSpec(**fields | {"vocab_size": 100, "split": "80,20,0"} | more)


def identity(data: DataSpec) -> str:
    found = data_identity(build_train_valid_test(data)[0])
    assert found is not None
    return found


def test_an_identity_is_of_the_data_alone(tmp_path: Path) -> None:
    documents = random_documents(40, seed=1)
    one = write_corpus(tmp_path / "one", documents)
    base = spec(data_path=[one])
    same = identity(base)
    moved = write_corpus(tmp_path / "elsewhere", documents)
    for other in (
        spec(data_path=[moved]),
        replace(base, seed=9),
        replace(base, samples=(500, 5, 0)),
        replace(base, sequence_length=4),
        replace(base, mmap_bin_files=False),
    ):
        assert identity(other) == same
    different = {same, identity(replace(base, split="70,30,0"))}
    changed = [list(document) for document in documents]
    changed[0][0] = 99 if changed[0][0] != 99 else 98  # one id, and the lengths are the same
    different.add(identity(spec(data_path=[write_corpus(tmp_path / "changed", changed)])))
    for words in ([one, moved], ["1", one, "2", moved], ["2", one, "1", moved]):
        different.add(identity(spec(data_path=words)))
    assert len(different) == 6
    mock = spec(mock_data=True, split=None, sequence_length=1 << 20, samples=(5, 0, 0))
    mocks = {identity(replace(mock, vocab_size=size)) for size in (100, 100, 101)}
    assert len(mocks) == 2


def test_lines_at_the_start(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "notes", [[1] * 9 + [0]] * 20)
    made = build_train_valid_test(spec(data_path=[prefix]))
    train, valid = describe_data(made)
    assert train.startswith(
        "train data: 50 samples of 8 tokens from notes, documents 0 to 16 of 20 (160 tokens): "
        "2.50 epochs, data repeats | corpus "
    )
    assert train.endswith(str(data_identity(made[0])))
    assert "documents 16 to 20 of 20 (40 tokens): 1.00 epochs" in valid
    blend = build_train_valid_test(spec(data_path=["1", prefix, "3", prefix], samples=(8, 0, 0)))
    first, *parts = describe_data(blend)
    assert "8 samples from a blend of 2, no data repeats | corpus" in first
    assert [part.split()[0] for part in parts] == ["0.2500", "0.7500"]


def test_foreign_datasets_are_no_error() -> None:
    lines = describe_data([np.zeros(1234), iter(()), None])
    assert lines == ["train data: 1,234 samples of the script's own dataset"]
    assert data_identity(object()) is None
