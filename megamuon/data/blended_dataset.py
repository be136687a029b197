"""A dataset that draws from several in the order of a blend.

Owns ``BlendedDataset``: the blend indices of ``blend.py`` over parts, cached like sample indices.
Invariants: item k is the same for every rank and resume; no part is drawn beyond its length. Tested
by ``tests/data_room/test_build.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from megamuon.data.blend import blend_indices, check_draws, exhaustive_indices
from megamuon.data.continued import ContinuedDataset
from megamuon.data.gpt_dataset import GPTDataset, Item
from megamuon.data.index_cache import Arrays, CacheEntry, IndexCache, hash_arrays

BLEND_NAMES = ("dataset_index", "dataset_sample_index")


class BlendedDataset(Dataset[Item]):
    """Items of the parts with ``dataset_id`` () int64 beside them; ``weights`` are normalised.

    ``size`` None draws every sample of every part once (weights are then not used). ``places`` are
    the parts' places in the blend as the flags give it, where parts were left out of it.
    """

    def __init__(
        self,
        parts: Sequence[GPTDataset | ContinuedDataset],
        weights: Sequence[float],
        size: int | None,
        *,
        places: Sequence[int] | None = None,
        cache: IndexCache | None = None,
        directory: Path | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self._places = tuple(range(len(parts)) if places is None else places)
        self.split = self.parts[0].spec.split
        self.weights = tuple(weights)
        self._size = size
        self._lengths = [len(part) for part in self.parts]
        if cache is None or directory is None:
            arrays = self._build()
            self.digest = hash_arrays(arrays)
        else:
            inputs = {"weights": list(weights), "size": size, "lengths": self._lengths}
            entry = CacheEntry(
                directory=directory,
                kind="BlendedDataset",
                split=self.split,
                names=BLEND_NAMES,
                inputs=inputs,
            )
            arrays, self.digest = cache.arrays(entry, self._build)
        self.dataset_index, self.dataset_sample_index = (arrays[name] for name in BLEND_NAMES)

    def _build(self) -> Arrays:
        if self._size is None:
            built = exhaustive_indices(self._lengths)
        else:
            built = blend_indices(self.weights, self._size)
        # What is checked here need not be when it is loaded: the lengths are in the cache's key.
        names = [part.sequences.path for part in self.parts]
        check_draws(np.asarray(built[0]), self._lengths, names)
        return dict(zip(BLEND_NAMES, built, strict=True))

    def __len__(self) -> int:
        return int(self.dataset_index.size)

    def __getitem__(self, index: int | None) -> Item:
        position = 0 if index is None else index
        if not 0 <= position < len(self):
            raise IndexError(f"blended {self.split} dataset: sample {index} of {len(self)}")
        dataset = int(self.dataset_index[position])
        sample = None if index is None else int(self.dataset_sample_index[position])
        item = self.parts[dataset][sample]
        item["dataset_id"] = torch.tensor(self._places[dataset], dtype=torch.int64)
        return item
