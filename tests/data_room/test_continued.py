"""Datasets that grow: what was drawn keeps its place, and epochs end before others begin."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megamuon.data.build import AnyDataset, DataSpec, build_train_valid_test
from megamuon.data.continued import ContinuedDataset, SampleCount, all_counts
from megamuon.data.indexed import IndexedDatasetBuilder

LENGTH = 8


def corpus(prefix: Path, first: int, samples: int) -> str:
    """One-sample documents; every document's tokens name it."""
    builder = IndexedDatasetBuilder(str(prefix), dtype=np.uint16)
    for number in range(first, first + samples):
        builder.add_document(np.full(LENGTH, number, dtype=np.uint16), [LENGTH])
    builder.finalize()
    return str(prefix)


def build(paths: list[str], samples: int, shuffle: str = "global") -> AnyDataset:
    spec = DataSpec(
        sequence_length=LENGTH,
        samples=(samples, 0, 0),
        eod=999,
        vocab_size=1000,
        data_path=paths,
        split="1,0,0",
        shuffle=shuffle,  # type: ignore[arg-type]
    )
    made = build_train_valid_test(spec)[0]
    assert made is not None
    return made


def drawn(dataset: AnyDataset, start: int = 0, stop: int | None = None) -> list[tuple[int, ...]]:
    places = range(start, len(dataset) if stop is None else stop)
    return [tuple(dataset[place]["tokens"].tolist()) for place in places]


@pytest.mark.parametrize("shuffle", ["global", "epoch"])
@pytest.mark.parametrize("requests", [(30, 90), (75, 120), (90, 120, 400), (100, 250)])
def test_a_longer_run_keeps_what_was_drawn(
    shuffle: str, requests: tuple[int, ...], tmp_path: Path
) -> None:
    path = [corpus(tmp_path / "c", 0, 100)]
    before = build(path, requests[0], shuffle)
    asked = SampleCount(requests[-1], requests[:-1])
    after = build(path, asked, shuffle)
    assert len(after) >= requests[-1]
    assert drawn(after, 0, len(before)) == drawn(before)
    for place in range(1, len(requests) - 1):  # and every launch between
        middle = build(path, SampleCount(requests[place], requests[:place]), shuffle)
        assert drawn(after, 0, len(middle)) == drawn(middle)


def test_a_fresh_run_and_a_shorter_one_are_as_ever(tmp_path: Path) -> None:
    path = [corpus(tmp_path / "c", 0, 100)]
    assert drawn(build(path, SampleCount(250))) == drawn(build(path, 250))
    assert not isinstance(build(path, SampleCount(95, (60,))), ContinuedDataset)


def test_no_sample_of_an_epoch_is_lost_or_repeated(tmp_path: Path) -> None:
    """A launch of 60 samples that goes on to 180 of an epoch of 99."""
    path = [corpus(tmp_path / "c", 0, 100)]
    whole = drawn(build(path, SampleCount(180, (60,))), 0, 99)
    assert max(Counter(whole).values()) == 1


@pytest.mark.parametrize("weights", [("1", "3"), ("5", "1")])
def test_a_blend_keeps_its_order_and_each_part_its_own(
    weights: tuple[str, str], tmp_path: Path
) -> None:
    parts = [corpus(tmp_path / "a", 0, 40), corpus(tmp_path / "b", 100, 60)]
    words = [weights[0], parts[0], weights[1], parts[1]]
    before, after = build(words, 70), build(words, SampleCount(300, (70,)))
    assert len(after) == 300
    assert drawn(after, 0, 70) == drawn(before, 0, 70)
    # No document of a part comes a second time before its epoch is over (39 and 59 samples).
    for low, size in ((0, 39), (100, 59)):
        mine = [sample for sample in drawn(after) if low <= sample[0] < low + 100]
        assert len(set(mine[:size])) == min(size, len(mine))


def test_counts() -> None:
    count = SampleCount(90, (30, 60))
    assert (count, all_counts(count), all_counts(7), all_counts(None)) == (
        90,
        (30, 60, 90),
        (7,),
        (None,),
    )
    for twin in (copy.deepcopy(count), pickle.loads(pickle.dumps(count))):
        assert all_counts(twin) == (30, 60, 90)
    with pytest.raises(ValueError, match=r"must ascend, got \[60, 30\]"):
        SampleCount(30, (60,))
