"""Coverage of a shape by rectangles, against a count over every element."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from megamuon.checkpoint.boxes import Box, coverage, inside, shared, without


def _count(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        ranges = (slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
        count[tuple(ranges)] += 1
    return count


@pytest.mark.parametrize("seed", range(30))
def test_coverage_agrees_with_counting_every_element(seed: int) -> None:
    choose = random.Random(seed)
    shape = tuple(choose.randint(1, 5) for _ in range(choose.randint(0, 3)))
    boxes = []
    for _ in range(choose.randint(0, 6)):
        offset = tuple(choose.randint(0, size) for size in shape)
        boxes.append(
            Box(offset, tuple(choose.randint(0, s - o) for s, o in zip(shape, offset, strict=True)))
        )
    count = _count(shape, boxes)
    found = coverage(shape, boxes)
    assert (found.overlap is not None) == bool((count > 1).any())
    missing = _count(shape, list(found.missing))
    assert np.array_equal(missing, (count == 0).astype(int))


def test_slices_of_one_dim_cover_it_and_a_lost_one_is_named() -> None:
    rows = [Box((start, 0), (3, 4)) for start in (0, 3, 6)] + [Box((9, 0), (0, 4))]
    assert coverage((9, 4), rows) == coverage((0, 4), [])
    lost = coverage((9, 4), rows[:1] + rows[2:])
    assert [str(box) for box in lost.missing] == ["[3:6, 0:4]"]
    assert coverage((), []).missing and not coverage((), [Box((), ())]).missing


def test_many_slices_stay_linear() -> None:
    rows = [Box((start, 0), (1, 2)) for start in range(20_000)]
    random.Random(0).shuffle(rows)
    assert coverage((20_000, 2), rows).missing == ()


def test_shared_and_without_split_a_box() -> None:
    box, other = Box((0, 0), (4, 4)), Box((2, 1), (9, 2))
    hole = shared(box, other)
    assert hole == Box((2, 1), (2, 2))
    parts = without(box, hole)
    assert sum(part.numel for part in parts) == 12
    assert all(shared(a, b) is None for a, b in itertools.combinations([*parts, hole], 2))
    assert shared(box, Box((4, 0), (1, 1))) is None


@pytest.mark.parametrize(
    "box", [Box((0,), (1,)), Box((-1, 0), (1, 1)), Box((0, 0), (3, 2)), Box((0, 0), (1, -1))]
)
def test_a_box_outside_is_told(box: Box) -> None:
    assert not inside((2, 2), box)
