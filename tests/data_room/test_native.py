"""The host library's indices are NumPy's to the bit, and a missing library changes no result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megamuon.data import native
from megamuon.data.blend import blend_indices, exhaustive_indices, greedy_in_python
from megamuon.data.build import DataSpec, build_train_valid_test
from megamuon.data.gpt_indices import (
    IndexPlan,
    build_indices,
    plan_indices,
    sample_index_in_numpy,
)
from megamuon.data.indexed import IndexedDataset
from megamuon.data.splits import normalize
from tests.support.corpora import random_documents, write_corpus


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)


def test_the_library_is_there() -> None:
    assert native.library() is not None, native.REMEDY


@pytest.mark.parametrize("parts", [2, 3, 7, 8, 9, 40, 300])
def test_blends(parts: int) -> None:
    generator = np.random.default_rng(parts)
    for weights in (generator.random(parts), np.ones(parts), generator.random(parts) ** 20):
        shares = normalize(weights.tolist(), "test")
        for mine, other in zip(
            blend_indices(shares, 1000), greedy_in_python(shares, 1000, None), strict=True
        ):
            assert mine.dtype == other.dtype
            assert np.array_equal(mine, other)
    sizes = generator.integers(0, 30, size=parts).tolist()
    sizes[-1] += 1
    total = sum(sizes)
    shares = [size / total for size in sizes]
    for mine, other in zip(
        exhaustive_indices(sizes), greedy_in_python(shares, total, sizes), strict=True
    ):
        assert np.array_equal(mine, other)


def test_a_blend_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a blend of 5 samples from 2 parts"):
        native.blend_indices([0.5, 0.5], 5, [2, 2])


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 34, 1000, 5000])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_shuffles_and_the_generator_after_them(count: int, dtype: str) -> None:
    ours, numpys = np.random.RandomState(7), np.random.RandomState(7)
    for _ in range(3):
        mine, other = np.arange(count, dtype=dtype), np.arange(count, dtype=dtype)
        native.shuffle(mine, ours)
        numpys.shuffle(other)
        assert np.array_equal(mine, other)
        assert ours.randint(1 << 30) == numpys.randint(1 << 30)
        assert ours.normal() == numpys.normal()  # which keeps a second number for later


def random_plan(generator: np.random.Generator, tokens: int) -> IndexPlan | None:
    try:
        return plan_indices(
            tokens_per_epoch=tokens,
            sequence_length=int(generator.integers(1, 20)),
            requested=int(generator.integers(1, 200)),
            extra=bool(generator.integers(2)),
            drop_partial=bool(generator.integers(2)),
        )
    except ValueError:
        return None


def test_sample_indices() -> None:
    generator = np.random.default_rng(0)
    seen = 0
    for _ in range(200):
        lengths = generator.integers(0, generator.integers(1, 60), size=generator.integers(1, 50))
        lengths = lengths.astype(np.int32)
        lengths[0] += 3
        plan = random_plan(generator, int(lengths.sum()))
        if plan is None:
            continue
        seen += 1
        documents = np.tile(np.arange(lengths.size, dtype=np.int32), plan.epochs)
        generator.shuffle(documents)
        shape = (plan.samples + 1, 2)
        want = sample_index_in_numpy(lengths, documents, np.empty(shape, dtype=np.int64), plan)
        # As they lie in an index file: at no multiple of four.
        odd = np.frombuffer(b"x" + lengths.tobytes(), dtype=np.int32, offset=1)
        for document_type in (np.int32, np.int64):
            for row_type in (np.int32, np.int64):
                rows = np.empty(shape, dtype=row_type)
                assert native.sample_index(
                    odd,
                    documents.astype(document_type),
                    rows,
                    length=plan.sequence_length,
                    extra=plan.extra,
                    clamp=plan.partial,
                )
                assert np.array_equal(rows, want)
    assert seen > 100


def test_too_few_items_are_refused() -> None:
    lengths, documents = np.ones(3, dtype=np.int32), np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="3 documents hold fewer than 4 samples of 1 items"):
        native.sample_index(
            lengths, documents, np.empty((5, 2), np.int32), length=1, extra=0, clamp=False
        )


def test_documents_beyond_31_bits() -> None:
    plan = IndexPlan(
        sequence_length=4,
        extra=1,
        tokens_per_epoch=9,
        epochs=2,
        samples=4,
        separate_last=False,
        samples_before_last=0,
        partial=False,
    )
    low = 2**31 - 2

    class Lengths:
        """Three of each document, without a list of two thousand million."""

        def __getitem__(self, places: np.ndarray) -> np.ndarray:
            assert places.min() >= low
            return np.full(places.size, 3, dtype=np.int32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "sample_index", lambda *_, **__: False)
        documents, _, _ = build_indices(Lengths(), low, low + 3, plan, 1, "epoch")  # type: ignore[arg-type]
    assert documents.dtype == np.int64
    assert sorted(documents.tolist()) == sorted([low, low + 1, low + 2] * 2)


def test_without_a_library_all_is_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    words = ["0.3", write_corpus(tmp_path / "a", random_documents(40, seed=1))]
    words += ["0.7", write_corpus(tmp_path / "b", random_documents(60, seed=2))]
    spec = DataSpec(
        sequence_length=8, samples=(300, 20, 0), eod=0, vocab_size=100, data_path=words,
        split="80,20,0", data_cache_path=str(tmp_path / "with"),
    )  # fmt: skip
    first = build_train_valid_test(spec)
    request.getfixturevalue("no_library")
    assert IndexedDataset(words[1]).lengths.size == 40
    from dataclasses import replace

    second = build_train_valid_test(replace(spec, data_cache_path=str(tmp_path / "without")))
    for one, other in zip(first[:2], second[:2], strict=True):
        assert one is not None and other is not None
        assert one.digest == other.digest


def test_a_slow_blend_is_announced(no_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SLOW_DRAWS", 10)
    with pytest.warns(UserWarning, match="11 draws of a blend are made in Python.*pip install"):
        assert blend_indices([0.5, 0.5], 11)[0].size == 11


def test_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    assert native.library.__wrapped__() is None
    monkeypatch.setattr(native, "PATH", Path("/nowhere.so"))
    assert native.library.__wrapped__() is None
