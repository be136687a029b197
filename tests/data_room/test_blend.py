"""Word lists and blends beyond the golden cases."""

from __future__ import annotations

import numpy as np
import pytest

from megamuon.data.blend import (
    Blend,
    blend_indices,
    check_draws,
    exhaustive_indices,
    parse_blend,
    part_sizes,
)
from megamuon.data.splits import normalize


def plain(weights: list[float], size: int, limits: list[int] | None) -> tuple[list[int], list[int]]:
    """The rule, written as it is stated."""
    counts = [0] * len(weights)
    datasets, samples = [], []
    for step in range(size):
        behind = [
            weight * max(step, 1) - count if limits is None or count < limits[i] else -np.inf
            for i, (weight, count) in enumerate(zip(weights, counts, strict=True))
        ]
        best = behind.index(max(behind))
        datasets.append(best)
        samples.append(counts[best])
        counts[best] += 1
    return datasets, samples


@pytest.mark.parametrize("parts", [1, 2, 3, 12, 13, 40])
def test_both_ways_follow_the_rule(parts: int) -> None:
    generator = np.random.default_rng(parts)
    weights = normalize(generator.random(parts).tolist(), "test")
    datasets, samples = blend_indices(weights, 500)
    assert (datasets.tolist(), samples.tolist()) == plain(weights, 500, None)
    sizes = generator.integers(0, 30, size=parts).tolist()
    sizes[0] += 1
    datasets, samples = exhaustive_indices(sizes)
    shares = [size / sum(sizes) for size in sizes]
    assert (datasets.tolist(), samples.tolist()) == plain(shares, sum(sizes), sizes)
    assert np.bincount(datasets, minlength=parts).tolist() == sizes


def test_every_prefix_is_near_its_weights() -> None:
    weights = normalize([0.2, 0.5, 0.3], "test")
    datasets, _ = blend_indices(weights, 1000)
    for stop in (10, 100, 999):
        counts = np.bincount(datasets[:stop], minlength=3)
        assert np.abs(counts - np.array(weights) * stop).max() <= 1


def test_word_lists() -> None:
    assert parse_blend(["a"]) == Blend(prefixes=("a",), weights=None)
    assert parse_blend(["a", "b", "c"]) == Blend(prefixes=("a", "b", "c"), weights=None)
    assert parse_blend(["30", "a", "70", "b"]) == Blend(prefixes=("a", "b"), weights=(30.0, 70.0))
    assert parse_blend(["0.3:a", "0.7:2"]) == Blend(prefixes=("a", "2"), weights=(0.3, 0.7))


@pytest.mark.parametrize(
    "words",
    [
        ["30", "a", "x", "b"],  # read as four prefixes by Megatron-LM
        ["30", "a", "b"],
        ["a", "30"],
        ["1", "2", "3", "4"],  # numeric prefixes, or weights?
        ["0.3:a", "b"],
        ["-1", "a", "2", "b"],
        ["0", "a"],
        [],
    ],
)
def test_ambiguous_lists_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="--train-data-path"):
        parse_blend(words, "--train-data-path")


def test_part_sizes() -> None:
    assert part_sizes([0.3, 0.7], 10) == [3, 7]
    assert part_sizes([0.3, 0.7], 1000, 0.005) == [302, 704]


def test_over_drawing_is_an_error() -> None:
    datasets, _ = blend_indices([0.5, 0.5], 10)
    check_draws(datasets, [5, 5], ["one", "two"])
    with pytest.raises(ValueError, match="two would be drawn 5 times but has 4"):
        check_draws(datasets, [5, 4], ["one", "two"])
