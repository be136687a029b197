"""An identity follows the data, wherever it lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megamuon.data.build import DataSpec
from megamuon.data.identity import data_identity, identity_digest
from tests.support.corpora import random_documents, write_corpus


def spec(**more: Any) -> DataSpec:
    fields: dict[str, Any] = {"sequence_length": 8, "samples": (50, 5, 0), "eod": 0}
    return DataSpec(**fields | {"vocab_size": 100, "split": "80,20,0"} | more)


def identity(data: DataSpec) -> str:
    found = data_identity(data)["training data"]
    assert found is not None
    return identity_digest(found)


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
