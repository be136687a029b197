"""Indices against a plain loop, at sizes where 32-bit numbers fail, and shuffled by epoch."""

from __future__ import annotations

import numpy as np
import pytest

from megamuon.data.gpt_indices import IndexPlan, build_indices, plan_indices


def plan(lengths: np.ndarray, requested: int | None, **more: object) -> IndexPlan:
    settings: dict[str, object] = {"sequence_length": 7, "extra": True} | more
    return plan_indices(tokens_per_epoch=int(lengths.sum()), requested=requested, **settings)  # type: ignore[arg-type]


def walk(lengths: np.ndarray, documents: np.ndarray, made: IndexPlan) -> list[list[int]]:
    """Sample rows by walking over single items, as the definition says."""
    items = [(row, offset) for row, d in enumerate(documents) for offset in range(lengths[d])]
    rows = [[0, 0]]
    for sample in range(made.samples):
        stop = min(sample * made.sequence_length + made.sequence_length + made.extra, len(items))
        row, offset = items[stop - 1]
        rows.append([row, offset + 1 - made.extra])
    return rows


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("shuffle", ["global", "epoch"])
def test_rows_follow_the_definition(extra: bool, drop: bool, shuffle: str) -> None:
    generator = np.random.default_rng(3)
    for length in (1, 5, 7, 50):
        lengths = generator.integers(0, 12, size=30).astype(np.int32)  # empty sequences too
        made = plan(lengths, 40, sequence_length=length, extra=extra, drop_partial=drop)
        documents, rows, order = build_indices(lengths, 0, 30, made, 5, shuffle)  # type: ignore[arg-type]
        assert rows.tolist() == walk(lengths, documents, made)
        assert sorted(order.tolist()) == list(range(made.samples))
        assert np.bincount(documents, minlength=30).tolist() == [made.epochs] * 30
        assert made.samples >= 40


def test_only_the_split_is_drawn() -> None:
    lengths = np.full(20, 9, dtype=np.int32)
    made = plan_indices(tokens_per_epoch=45, sequence_length=4, requested=30, extra=True)
    documents, _, _ = build_indices(lengths, 10, 15, made, 1, "global")
    assert set(documents.tolist()) == set(range(10, 15))


def test_shuffle_by_epoch_finishes_one_before_the_next() -> None:
    lengths = np.full(50, 8, dtype=np.int32)
    made = plan_indices(tokens_per_epoch=400, sequence_length=8, requested=120, extra=True)
    assert made.epochs == 3
    documents, _, order = build_indices(lengths, 0, 50, made, 1, "epoch")
    for epoch in range(3):
        assert sorted(documents[epoch * 50 : epoch * 50 + 50].tolist()) == list(range(50))
    assert sorted(order[:49].tolist()) == list(range(49))
    assert sorted(order[49:99].tolist()) == list(range(49, 99))
    mixed, _, _ = build_indices(lengths, 0, 50, made, 1, "global")
    assert sorted(mixed[:50].tolist()) != list(range(50))


def test_counting_is_exact_beyond_32_bit_floats() -> None:
    # A 32-bit float gives 73,400,192 here.
    made = plan_indices(
        tokens_per_epoch=300_647_198_766,
        sequence_length=4096,
        requested=None,
        extra=True,
        drop_partial=False,
    )
    assert made.samples == 73_400_196


def test_offsets_beyond_32_bits() -> None:
    lengths = np.full(3, 2**31 - 1, dtype=np.int32)
    made = plan_indices(
        tokens_per_epoch=3 * (2**31 - 1), sequence_length=2**30, requested=None, extra=True
    )
    _, rows, _ = build_indices(lengths, 0, 3, made, 1, "global")
    places = rows[:, 0].astype(np.int64) * (2**31 - 1) + rows[:, 1]
    assert places.tolist() == [j * 2**30 for j in range(made.samples + 1)]


def test_the_last_epoch_is_apart_only_below_four_fifths() -> None:
    def separate(requested: int) -> bool:
        made = plan_indices(
            tokens_per_epoch=1001, sequence_length=10, requested=requested, extra=True
        )
        assert made.epochs == 2
        return made.separate_last

    assert [separate(n) for n in (101, 179, 180, 199)] == [True, True, False, False]


def test_errors() -> None:
    with pytest.raises(ValueError, match="corpus: empty corpus"):
        plan_indices(tokens_per_epoch=0, sequence_length=4, requested=1, extra=True, name="corpus")
    with pytest.raises(ValueError, match=r"5 tokens give no sample of --seq-length 8"):
        plan_indices(tokens_per_epoch=5, sequence_length=8, requested=None, extra=True)
    with pytest.raises(ValueError, match="--seq-length 0"):
        plan_indices(tokens_per_epoch=5, sequence_length=0, requested=None, extra=True)
    made = plan_indices(tokens_per_epoch=45, sequence_length=4, requested=3, extra=True)
    with pytest.raises(ValueError, match="--shuffle 'none'"):
        build_indices(np.full(5, 9, dtype=np.int32), 0, 5, made, 1, "none")  # type: ignore[arg-type]
