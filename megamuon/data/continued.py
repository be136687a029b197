"""A dataset that grows when a run is made longer, without a change of what was drawn before.

Owns ``SampleCount`` (a number of samples that remembers the numbers before it) and
``ContinuedDataset``. Megatron-LM shuffles all epochs together, so a dataset for more samples is
another order from its first sample on.  Here the samples that earlier launches asked for keep their
places, to the end of their last epoch, and further epochs follow, in an order of their own.
Invariants: item k of a grown dataset is item k of every dataset that it grew from; an epoch that
has begun ends before another one begins. Tested by ``tests/data_room/test_continued.py``.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate

from torch.utils.data import Dataset

from megamuon.data.gpt_dataset import GPTDataset, Item, SampleSpec, Sequences

SEED_STRIDE = 7919  # between the shuffles of two launches; any number that no user counts seeds by


class SampleCount(int):
    """A number of samples to build a dataset for, with the smaller numbers, ascending, that earlier
    launches of the run built it for.
    """

    earlier: tuple[int, ...]

    def __new__(cls, value: int, earlier: Sequence[int] = ()) -> SampleCount:
        """Raises ValueError where the numbers do not ascend."""
        made = super().__new__(cls, value)
        made.earlier = tuple(earlier)
        numbers = [*made.earlier, value]
        if any(low >= high for low, high in zip(numbers, numbers[1:], strict=False)):
            raise ValueError(f"numbers of samples must ascend, got {numbers}")
        return made

    def __getnewargs__(self) -> tuple[int, tuple[int, ...]]:
        return int(self), self.earlier


def all_counts(samples: int | None) -> tuple[int | None, ...]:
    """The numbers that a dataset was built for, the present one last."""
    if isinstance(samples, SampleCount):
        return (*samples.earlier, int(samples))
    return (samples,)


def continued(
    counts: Sequence[int | None], seed: int, build: Callable[[int | None, int], GPTDataset]
) -> GPTDataset | ContinuedDataset:
    """``build(samples, seed)`` for the first of ``counts``, and as much again for each later one as
    is missing; plain where that is nothing.
    """
    parts = [build(counts[0], seed)]
    length = len(parts[0])
    for place, count in enumerate(counts[1:], start=1):
        assert count is not None  # only a number can grow
        if count > length:
            parts.append(build(count - length, (seed + SEED_STRIDE * place) % 2**32))
            length += len(parts[-1])
    return parts[0] if len(parts) == 1 else ContinuedDataset(parts)


class ContinuedDataset(Dataset[Item]):
    """The samples of ``parts``, one after the other."""

    def __init__(self, parts: Sequence[GPTDataset]) -> None:
        self.parts = tuple(parts)
        self.split = self.parts[0].spec.split
        self._ends = list(accumulate(len(part) for part in self.parts))
        joined = " ".join(part.digest for part in self.parts)
        self.digest = hashlib.sha256(joined.encode()).hexdigest()

    @property
    def spec(self) -> SampleSpec:
        """Of the first part."""
        return self.parts[0].spec

    @property
    def sequences(self) -> Sequences:
        """The corpus, which is that of all parts."""
        return self.parts[0].sequences

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int | None) -> Item:
        if index is None:
            return self.parts[0][None]
        if not 0 <= index < len(self):
            raise IndexError(f"{self.sequences.path}: sample {index} of {len(self)}")
        part = bisect.bisect_right(self._ends, index)
        return self.parts[part][index - (self._ends[part - 1] if part else 0)]
