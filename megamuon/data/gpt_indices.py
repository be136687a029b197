"""The three indices that turn documents into shuffled samples of one length.

Owns the document, sample and shuffle index: pure functions of integers and a seed. Invariants:
identical, dtype and bytes, to Megatron-LM's for ``shuffle="global"``; exact integers throughout
(Megatron-LM counts validation samples in 32-bit floats, and documents in 32-bit integers); no
Python loop over samples or documents.
Tested by ``tests/data_room/test_gpt_indices.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megamuon.data import native

Shuffle = Literal["global", "epoch"]
SHUFFLES: tuple[Shuffle, ...] = ("global", "epoch")
_INT32 = np.iinfo(np.int32).max
_SEPARATE_BELOW = (4, 5)  # the last epoch is shuffled apart if less than 0.80 of it is needed


@dataclass(frozen=True, kw_only=True)
class IndexPlan:
    """The integers that decide the indices' sizes, computed before any array is made."""

    sequence_length: int
    extra: int  # 1 where a sample draws one token more, for the last label
    tokens_per_epoch: int
    epochs: int
    samples: int  # rows of the shuffle index
    separate_last: bool
    samples_before_last: int  # samples of all epochs but the last; meaningful if separate_last
    partial: bool  # the last, incomplete sample is kept


def plan_indices(
    *,
    tokens_per_epoch: int,
    sequence_length: int,
    requested: int | None,
    extra: bool,
    drop_partial: bool = True,
    name: str = "dataset",
) -> IndexPlan:
    """How many epochs and samples are needed for ``requested`` samples (None: exactly one epoch).

    Raises ValueError for a corpus without tokens or one that is too short to give a sample.
    """
    if sequence_length < 1:
        raise ValueError(f"--seq-length {sequence_length}: must be at least 1")
    if tokens_per_epoch < 1:
        raise ValueError(f"{name}: empty corpus, there are no tokens to draw from")
    x = int(extra)
    epochs = 1
    if requested is not None:
        needed = requested * sequence_length + x
        epochs = max(1, -(-needed // tokens_per_epoch))
    total = epochs * tokens_per_epoch - x
    samples = total // sequence_length if drop_partial else -(-total // sequence_length)
    if samples < 1:
        raise ValueError(
            f"{name}: {tokens_per_epoch} tokens give no sample of --seq-length {sequence_length} "
            "in one epoch"
        )
    before, separate = 0, False
    if epochs > 1 and requested is not None:
        before = ((epochs - 1) * tokens_per_epoch - x) // sequence_length
        per_epoch = (tokens_per_epoch - x) // sequence_length
        wanted = requested - before
        if not 0 <= wanted <= per_epoch + 1:
            raise ValueError(
                f"{name}: last epoch must give {wanted} samples, but an epoch has {per_epoch}"
            )
        numerator, denominator = _SEPARATE_BELOW
        separate = wanted < numerator * per_epoch // denominator
    return IndexPlan(
        sequence_length=sequence_length,
        extra=x,
        tokens_per_epoch=tokens_per_epoch,
        epochs=epochs,
        samples=samples,
        separate_last=separate,
        samples_before_last=before,
        partial=not drop_partial,
    )


def build_indices(
    lengths: NDArray[np.int32], low: int, high: int, plan: IndexPlan, seed: int, shuffle: Shuffle
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
    """Document (documents * epochs,), sample (samples + 1, 2) and shuffle (samples,) index of
    sequences [low, high).

    ``lengths`` are the items of every sequence of the file. Both shuffles draw from one generator,
    documents first. Source: Megatron-LM's GPT dataset.
    """
    if shuffle not in SHUFFLES:
        raise ValueError(f"--shuffle {shuffle!r}: not one of {', '.join(SHUFFLES)}")
    generator = np.random.RandomState(seed)
    documents = _document_index(low, high, plan, generator, shuffle)
    samples = _sample_index(lengths, documents, plan)
    order = _shuffle_index(plan, generator, shuffle)
    return documents, samples, order


def _document_index(
    low: int, high: int, plan: IndexPlan, generator: np.random.RandomState, shuffle: Shuffle
) -> NDArray[np.integer]:
    # Megatron-LM's are int32 always, and wrap beyond.
    one = np.arange(low, high, dtype=np.int32 if high <= _INT32 + 1 else np.int64)
    whole = np.tile(one, plan.epochs)
    size = one.size
    if shuffle == "epoch":
        cuts = [epoch * size for epoch in range(plan.epochs + 1)]
    elif plan.separate_last:
        cuts = [0, (plan.epochs - 1) * size, plan.epochs * size]
    else:
        cuts = [0, plan.epochs * size]
    _shuffle_parts(whole, cuts, generator)
    return whole


def _sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.integer], plan: IndexPlan
) -> NDArray[np.integer]:
    """Rows (document position, offset) at which samples begin; the last row is where the last one
    ends.
    """
    # Offsets always fit, as lengths are int32.
    wide = documents.size > _INT32
    rows = np.empty((plan.samples + 1, 2), dtype=np.int64 if wide else np.int32)
    filled = native.sample_index(
        lengths,
        documents,
        rows,
        length=plan.sequence_length,
        extra=plan.extra,
        clamp=plan.partial,
    )
    return rows if filled else sample_index_in_numpy(lengths, documents, rows, plan)


def sample_index_in_numpy(
    lengths: NDArray[np.int32],
    documents: NDArray[np.integer],
    rows: NDArray[np.integer],
    plan: IndexPlan,
) -> NDArray[np.integer]:
    """What the host library does, for where there is none, and for comparisons."""
    ends = lengths[documents].astype(np.int64)
    np.cumsum(ends, out=ends)  # ends[i]: items before the end of document i
    # Sample j covers [j*s, j*s + s + x): row j + 1 lies in the document that holds its last item.
    last = np.arange(1, plan.samples + 1, dtype=np.int64)
    last *= plan.sequence_length
    last += plan.extra
    if plan.partial:
        np.minimum(last, int(ends[-1]), out=last)
    place = np.searchsorted(ends, last, side="left")
    rows[0] = 0
    rows[1:, 0] = place
    last -= ends[place]
    last += lengths[documents[place]]
    last -= plan.extra
    rows[1:, 1] = last
    return rows


def _shuffle_index(
    plan: IndexPlan, generator: np.random.RandomState, shuffle: Shuffle
) -> NDArray[np.integer]:
    wide = plan.samples >= np.iinfo(np.uint32).max - 1
    order = np.arange(plan.samples, dtype=np.int64 if wide else np.uint32)
    if shuffle == "epoch":
        per = plan.tokens_per_epoch
        inner = [
            (epoch * per - plan.extra) // plan.sequence_length for epoch in range(1, plan.epochs)
        ]
        cuts = [0, *(max(cut, 0) for cut in inner), plan.samples]
    elif plan.separate_last:
        cuts = [0, plan.samples_before_last, plan.samples]
    else:
        cuts = [0, plan.samples]
    _shuffle_parts(order, cuts, generator)
    return order


def _shuffle_parts(
    array: NDArray[np.integer], cuts: list[int], generator: np.random.RandomState
) -> None:
    for start, stop in zip(cuts, cuts[1:], strict=False):
        native.shuffle(array[start:stop], generator)
