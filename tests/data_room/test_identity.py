"""What data is, by content: moved corpora are the same, changed ones are not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megamuon.data.build import DataSpec
from megamuon.data.identity import data_identity, identity_difference, identity_digest
from megamuon.data.indexed import IndexedDatasetBuilder


def corpus(prefix: Path, seed: int = 0, documents: int = 40) -> str:
    """Random documents; their lengths do not depend on the seed."""
    draw = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(str(prefix), dtype=np.uint16)
    for number in range(documents):
        tokens = draw.integers(0, 200, 20 + number).astype(np.uint16)
        builder.add_document(tokens, [tokens.size])
    builder.finalize()
    return str(prefix)


def spec(*paths: str, **changes: object) -> DataSpec:
    made = DataSpec(
        sequence_length=8,
        samples=(10, 10, 0),
        eod=255,
        vocab_size=256,
        data_path=paths,
        split="90,10,0",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_moved_corpus_is_the_same_and_a_changed_one_is_not(tmp_path: Path) -> None:
    one = data_identity(spec(corpus(tmp_path / "one")))
    assert json.loads(json.dumps(one)) == one
    for end in ("bin", "idx"):
        shutil.copy(tmp_path / f"one.{end}", tmp_path / f"moved.{end}")
    moved = data_identity(spec(str(tmp_path / "moved")))
    assert moved == one and identity_digest(moved) == identity_digest(one)
    other = data_identity(spec(corpus(tmp_path / "other", seed=1)))  # the same lengths
    text = identity_difference(one["training data"], other["training data"])
    assert text is not None and "tokens_sha256" in text
    longer = data_identity(spec(corpus(tmp_path / "longer", documents=41)))
    text = identity_difference(one["training data"], longer["training data"])
    assert text is not None and "idx_bytes" in text and "and " in text
    assert identity_digest(longer) != identity_digest(one)


def test_splits_weights_and_parts_belong_to_it(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a"), corpus(tmp_path / "b", seed=1)

    def difference(first: DataSpec, second: DataSpec) -> str | None:
        found = [data_identity(one)["training data"] for one in (first, second)]
        return identity_difference(*found)

    split = difference(spec(a), spec(a, split="50,50,0"))
    assert split == "corpora[0].sequences [0, 36] in the checkpoint, [0, 20] here"
    assert difference(spec(a), spec(a, split="9,1,0")) is None
    assert difference(spec("3", a, "7", b), spec("30", a, "70", b)) is None
    assert "weight 0.3 in" in str(difference(spec("3", a, "7", b), spec("4", a, "6", b)))
    assert "2 corpora in the checkpoint, 1 here" in str(difference(spec(a, b), spec(a)))
    assert difference(spec("1", a, "1", b), spec("1", b, "1", a)) is not None


def test_what_is_not_there_is_not_compared(tmp_path: Path) -> None:
    made = data_identity(spec(corpus(tmp_path / "a"), samples=(10, 0, 0)))
    assert made["validation data"] is None
    assert identity_difference(made["validation data"], made["training data"]) is None
    mock = data_identity(spec(data_path=None, split=None, mock_data=True))
    assert identity_difference(mock["training data"], made["training data"]) is not None
    with pytest.raises(FileNotFoundError, match="nowhere"):
        data_identity(spec(str(tmp_path / "nowhere")))
