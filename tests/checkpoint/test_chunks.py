"""Coverage of a shape by rectangles, against a count over every element."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from megamuon.checkpoint.chunks import Chunk, coverage, inside, shared, without


def _count(shape: tuple[int, ...], chunks: list[Chunk]) -> np.ndarray:
    count = np.zeros(shape, dtype=int)
    for chunk in chunks:
        ranges = (slice(at, at + size) for at, size in zip(chunk.offset, chunk.shape, strict=True))
        count[tuple(ranges)] += 1
    return count


@pytest.mark.parametrize("seed", range(30))
def test_coverage_agrees_with_counting_every_element(seed: int) -> None:
    choose = random.Random(seed)
    shape = tuple(choose.randint(1, 5) for _ in range(choose.randint(0, 3)))
    chunks = []
    for _ in range(choose.randint(0, 6)):
        offset = tuple(choose.randint(0, size) for size in shape)
        chunks.append(
            Chunk(
                offset, tuple(choose.randint(0, s - o) for s, o in zip(shape, offset, strict=True))
            )
        )
    count = _count(shape, chunks)
    found = coverage(shape, chunks)
    assert (found.overlap is not None) == bool((count > 1).any())
    missing = _count(shape, list(found.missing))
    assert np.array_equal(missing, (count == 0).astype(int))


def test_slices_of_one_dim_cover_it_and_a_lost_one_is_named() -> None:
    rows = [Chunk((start, 0), (3, 4)) for start in (0, 3, 6)] + [Chunk((9, 0), (0, 4))]
    assert coverage((9, 4), rows) == coverage((0, 4), [])
    lost = coverage((9, 4), rows[:1] + rows[2:])
    assert [str(chunk) for chunk in lost.missing] == ["[3:6, 0:4]"]
    assert coverage((), []).missing and not coverage((), [Chunk((), ())]).missing


def test_many_slices_stay_linear() -> None:
    rows = [Chunk((start, 0), (1, 2)) for start in range(20_000)]
    random.Random(0).shuffle(rows)
    assert coverage((20_000, 2), rows).missing == ()


def test_shared_and_without_split_a_box() -> None:
    chunk, other = Chunk((0, 0), (4, 4)), Chunk((2, 1), (9, 2))
    hole = shared(chunk, other)
    assert hole == Chunk((2, 1), (2, 2))
    parts = without(chunk, hole)
    assert sum(part.numel for part in parts) == 12
    assert all(shared(a, b) is None for a, b in itertools.combinations([*parts, hole], 2))
    assert shared(chunk, Chunk((4, 0), (1, 1))) is None


@pytest.mark.parametrize(
    "chunk",
    [Chunk((0,), (1,)), Chunk((-1, 0), (1, 1)), Chunk((0, 0), (3, 2)), Chunk((0, 0), (1, -1))],
)
def test_a_chunk_outside_is_told(chunk: Chunk) -> None:
    assert not inside((2, 2), chunk)
