"""Small corpora for tests of the data room: writing them, and the datasets over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megamuon.data.indexed import IndexedDatasetBuilder

SMALL = ((5, 6, 7, 0), (8, 9, 0), (10, 11, 12, 13, 14, 0), (15, 0))


def write_corpus(
    prefix: Path, documents: Sequence[Sequence[int]] = SMALL, dtype: str = "uint16"
) -> str:
    """One sequence per document; returns the prefix as a flag would give it."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_item(document)
            builder.end_document()
    return str(prefix)


def random_documents(count: int, seed: int, longest: int = 40, vocabulary: int = 100) -> list[Any]:
    """Documents of pseudo-random ids above 0 that end in 0."""
    generator = np.random.default_rng(seed)
    return [
        [*generator.integers(1, vocabulary, size=generator.integers(1, longest)).tolist(), 0]
        for _ in range(count)
    ]
