"""Rectangles inside a tensor's shape: what two pieces share, and whether pieces cover the whole
once.

Owns the coverage rule of checkpoints.  Invariant: a set of pieces is accepted only if every
element of the whole shape lies in exactly one of them (saving) or in at least one (loading); the
rule is exact for any rectangles and every number of dims, 0-d included.  Tested by
``tests/checkpoint/test_chunks.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Chunk:
    """A rectangle of elements: where it starts and how far it reaches in each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d chunk."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def __str__(self) -> str:
        ranges = (
            f"{start}:{start + size}" for start, size in zip(self.offset, self.shape, strict=True)
        )
        return f"[{', '.join(ranges)}]"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What pieces leave out of a whole, and the first pair that overlaps."""

    missing: tuple[Chunk, ...]
    overlap: (
        tuple[int, Chunk] | None
    )  # position of the piece that came second, and the elements that it repeats


def inside(shape: Sequence[int], chunk: Chunk) -> bool:
    """Whether ``chunk`` has the dims of ``shape`` and lies within it."""
    if len(chunk.offset) != len(shape) or len(chunk.shape) != len(shape):
        return False
    return all(
        start >= 0 and size >= 0 and start + size <= whole
        for whole, start, size in zip(shape, chunk.offset, chunk.shape, strict=True)
    )


def shared(first: Chunk, second: Chunk) -> Chunk | None:
    """The elements in both chunks (same number of dims), or None where there are none."""
    offset = tuple(max(a, b) for a, b in zip(first.offset, second.offset, strict=True))
    ends = (
        min(a + m, b + n)
        for a, m, b, n in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    )
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return Chunk(offset, shape) if all(size > 0 for size in shape) else None


def without(chunk: Chunk, hole: Chunk) -> list[Chunk]:
    """``chunk`` less ``hole`` (which lies within it), as disjoint chunks."""
    parts: list[Chunk] = []
    offset, shape = list(chunk.offset), list(chunk.shape)
    for dim, (start, size) in enumerate(zip(hole.offset, hole.shape, strict=True)):
        before, after = start - offset[dim], offset[dim] + shape[dim] - (start + size)
        if before:
            parts.append(_with(offset, shape, dim, offset[dim], before))
        if after:
            parts.append(_with(offset, shape, dim, start + size, after))
        offset[dim], shape[dim] = start, size  # the other dims are cut only inside the hole's range
    return parts


def coverage(shape: Sequence[int], pieces: Iterable[Chunk]) -> Coverage:
    """Which elements of ``shape`` no piece holds, and which are held twice.  Pieces lie inside
    ``shape``.

    Pieces are taken in order of their offset, so that slices of one dim leave a single chunk over
    at any time and n slices cost O(n), not O(n^2).
    """
    whole = Chunk((0,) * len(shape), tuple(shape))
    left = [whole] if whole.numel else []
    overlap: tuple[int, Chunk] | None = None
    for position, piece in sorted(enumerate(pieces), key=lambda entry: entry[1]):
        if not piece.numel:
            continue
        taken, rest = 0, []
        for chunk in left:
            hole = shared(chunk, piece)
            if hole is None:
                rest.append(chunk)
            else:
                taken += hole.numel
                rest.extend(without(chunk, hole))
        left = rest
        if taken < piece.numel and overlap is None:
            overlap = (position, piece)
    return Coverage(missing=tuple(sorted(left)), overlap=overlap)


def _with(offset: list[int], shape: list[int], dim: int, start: int, size: int) -> Chunk:
    at, reach = list(offset), list(shape)
    at[dim], reach[dim] = start, size
    return Chunk(tuple(at), tuple(reach))
