"""Train, validation and test as fractions of one corpus.

Owns the meaning of ``--split``. Invariant: the three ranges are disjoint, in order, and identical
to Megatron-LM's, banker's rounding included; the unit is sequences, not documents. Tested by
``tests/data_room/test_splits.py``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

SPLITS = ("train", "valid", "test")
Bounds = tuple[int, int]
Fractions = tuple[float, float]


def normalize(weights: Sequence[float], what: str) -> list[float]:
    """``weights`` divided by their sum, in float64.  Raises ValueError naming ``what``."""
    array = np.asarray(weights, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all() or (array < 0).any() or array.sum() <= 0:
        raise ValueError(
            f"{what}: weights {list(weights)} must be finite, not negative, and not all zero"
        )
    return (array / array.sum()).tolist()


def parse_split(split: str) -> tuple[Fractions | None, ...]:
    """``"969,30,1"`` as three (low, high) fractions; None where a split gets nothing.

    Source: Megatron-LM's ``--split``: every run of digits and points is a number, missing ones are
    zero.
    """
    words = re.findall(r"[.0-9]+", split)
    if not 1 <= len(words) <= len(SPLITS):
        raise ValueError(
            f"--split {split!r}: {len(words)} numbers, expected 1 to {len(SPLITS)} like 969,30,1"
        )
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ValueError(f"--split {split!r}: not numbers like 969,30,1") from None
    numbers += [0.0] * (len(SPLITS) - len(numbers))
    shares = normalize(numbers, f"--split {split!r}")
    ends = list(itertools.accumulate(shares, initial=0.0))
    return tuple((ends[i], ends[i + 1]) if shares[i] > 0 else None for i in range(len(SPLITS)))


def split_bounds(split: str, sequences: int) -> tuple[Bounds | None, ...]:
    """Sequence ranges [low, high) of train, validation and test over ``sequences``; a range may be
    empty.
    """
    return tuple(
        None if part is None else (round(part[0] * sequences), round(part[1] * sequences))
        for part in parse_split(split)
    )
