"""Mixtures of datasets: what ``--data-path`` says, and in which order a mixture draws.

Owns the parsing of the word list, the sample counts of the parts and the blend indices. Invariants:
every prefix of a weighted blend is as close to its weights as whole samples allow; the order is
identical to Megatron-LM's; no part is ever drawn beyond its length; an ambiguous word list is an
error, not a guess. Tested by ``tests/data_room/test_blend.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamuon.data import native
from megamuon.data.splits import normalize

MAX_DATASETS = 32_766  # dataset ids are int16 in the cache files


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Prefixes and their weights as given (not normalised), or None for the parts' own lengths."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Read ``prefix``, ``p p p``, ``w p w p`` or ``w:p w:p``.

    A list whose odd words are only partly numbers, that has a weight without a prefix, or that
    mixes the forms is refused: Megatron-LM would read such lists as prefixes. Raises ValueError
    naming ``flag``.
    """
    if not words:
        raise ValueError(f"{flag}: empty; give a prefix, or weights and prefixes")
    pairs = [_explicit(word) for word in words]
    if any(pair is not None for pair in pairs):
        if not all(pair is not None for pair in pairs):
            plain = next(word for word, pair in zip(words, pairs, strict=True) if pair is None)
            raise ValueError(
                f"{flag}: {plain!r} stands among weight:prefix words; write all words that way"
            )
        found = [pair for pair in pairs if pair is not None]
        return _checked([p for _, p in found], [w for w, _ in found], flag)
    numeric = [_number(word) is not None for word in words]
    if not any(numeric):
        return _checked(list(words), None, flag)
    if all(numeric):
        raise ValueError(
            f"{flag}: only numbers in {' '.join(words)!r}; write numeric prefixes as weight:prefix"
        )
    if len(words) % 2 or not all(numeric[0::2]) or any(numeric[1::2]):
        raise ValueError(
            f"{flag}: {' '.join(words)!r} mixes weights and prefixes; give 'w p w p ...', only "
            "prefixes, "
            "or weight:prefix words"
        )
    return _checked(list(words[1::2]), [float(word) for word in words[0::2]], flag)


def _checked(prefixes: list[str], weights: list[float] | None, flag: str) -> Blend:
    if len(prefixes) > MAX_DATASETS:
        raise ValueError(f"{flag}: {len(prefixes)} datasets, at most {MAX_DATASETS} can be blended")
    if any(not prefix for prefix in prefixes):
        raise ValueError(f"{flag}: an empty prefix")
    if weights is not None:
        normalize(weights, flag)
    return Blend(prefixes=tuple(prefixes), weights=None if weights is None else tuple(weights))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _explicit(word: str) -> tuple[float, str] | None:
    head, colon, prefix = word.partition(":")
    weight = _number(head) if colon and prefix else None
    # A file of this very name is a prefix, whatever it looks like.
    if weight is None or Path(f"{word}.idx").exists():
        return None
    return weight, prefix


def without_zeros(blend: Blend) -> tuple[Blend, tuple[int, ...]]:
    """The blend without the parts of weight zero, and the places that the others had in it.

    A part that is never drawn is neither opened nor built; and the greedy rule, which looks for the
    part that is furthest behind, would draw one where all are even.
    """
    if blend.weights is None:
        return blend, tuple(range(len(blend.prefixes)))
    kept = tuple(place for place, weight in enumerate(blend.weights) if weight > 0)
    return (
        Blend(
            prefixes=tuple(blend.prefixes[place] for place in kept),
            weights=tuple(blend.weights[place] for place in kept),
        ),
        kept,
    )


def part_sizes(weights: Sequence[float], size: int, surplus: float = 0.0) -> list[int]:
    """Samples that each part must offer for a blend of ``size``; weights are normalised.

    Source: Megatron-LM; the surplus (``--mid-level-dataset-surplus``) covers what greedy drawing
    may need.
    """
    return [math.ceil(math.ceil(size * weight) * (1 + surplus)) for weight in weights]


def blend_indices(
    weights: Sequence[float], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Dataset (size,) int16 and sample (size,) int64 of each draw: always the part that is furthest
    behind.

    Draw i takes the first dataset with the largest ``w * max(i, 1) - drawn``. Weights must be
    normalised.
    """
    if not 0 < len(weights) <= MAX_DATASETS:
        raise ValueError(f"a blend of {len(weights)} datasets; 1 to {MAX_DATASETS} are possible")
    if size < 0:
        raise ValueError(f"a blend of {size} samples")
    return _greedy(weights, size, None)


def exhaustive_indices(
    sizes: Sequence[int],
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The same order, with weights ``size / total``, until every sample of every dataset is drawn
    once.
    """
    total = sum(sizes)
    if total <= 0:
        raise ValueError(f"a blend of datasets of sizes {list(sizes)} has no samples")
    return _greedy([size / total for size in sizes], total, sizes)


def check_draws(datasets: NDArray[np.int16], lengths: Sequence[int], names: Sequence[str]) -> None:
    """Raise ValueError, naming the part, if one would be drawn beyond its samples."""
    drawn = np.bincount(datasets, minlength=len(lengths))
    for name, count, length in zip(names, drawn.tolist(), lengths, strict=True):
        if count > length:
            raise ValueError(
                f"blend: {name} would be drawn {count} times but has {length} samples; raise "
                "--mid-level-dataset-surplus or lower its weight"
            )


def _greedy(
    weights: Sequence[float], size: int, limits: Sequence[int] | None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    if len(weights) == 1:
        return np.zeros(size, dtype=np.int16), np.arange(size, dtype=np.int64)
    drawn = native.blend_indices(weights, size, limits)
    return drawn if drawn is not None else greedy_in_python(weights, size, limits)


def greedy_in_python(
    weights: Sequence[float], size: int, limits: Sequence[int] | None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """What the host library does, for where there is none, and for comparisons."""
    share = np.asarray(weights, dtype=np.float64)
    counts = np.zeros(share.size, dtype=np.float64)  # exact up to 2^53; infinite: exhausted
    drawn = [0] * share.size
    behind: NDArray[Any] = np.empty_like(share)
    datasets, samples = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    if limits is not None:
        counts[np.asarray(limits) <= 0] = np.inf
    for step in range(size):
        np.multiply(share, step or 1, out=behind)
        np.subtract(behind, counts, out=behind)
        chosen = int(behind.argmax())  # the first of several
        datasets[step], samples[step] = chosen, drawn[chosen]
        drawn[chosen] += 1
        exhausted = limits is not None and drawn[chosen] >= limits[chosen]
        counts[chosen] = np.inf if exhausted else drawn[chosen]
    return datasets, samples
