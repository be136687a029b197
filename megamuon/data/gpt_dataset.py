"""Samples of one length from documents, as a language model trains on them.

Owns ``GPTDataset`` (indices plus reading) and ``ItemOptions`` (what an item holds). Invariants:
item k of a given seed, split and corpus is the same tensor for every rank, worker count and resume,
and identical to Megatron-LM's; a token id outside the vocabulary is an error that names file,
sequence, sample and id, before it reaches an embedding. Tested by
``tests/data_room/test_gpt_dataset.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megamuon.data.gpt_indices import IndexPlan, Shuffle, build_indices, plan_indices
from megamuon.data.index_cache import Arrays, CacheEntry, IndexCache, hash_arrays
from megamuon.data.splits import Bounds

INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")
Item = dict[str, Tensor]


class Sequences(Protocol):
    """Token sequences by number: an ``IndexedDataset`` or the mock corpus."""

    lengths: NDArray[np.int32]

    @property
    def path(self) -> str: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]: ...

    def fingerprint(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class ItemOptions:
    """What an item holds, beside tokens, labels, loss_mask and position_ids (each
    (sequence_length,)).

    ``pad`` is -1 where no token means padding. With ``reset_attention_mask`` an item has
    ``document_ids`` (sequence_length,) int64, or with ``create_attention_mask`` a boolean
    ``attention_mask`` (1, s, s) that is True where attention is masked. With
    ``inter_document_masking`` it has ``cu_seqlens`` (s + 1,) int32, padded with s, and
    ``max_seqlen`` () int32, and positions restart in each document.
    """

    eod: int
    vocab_size: int
    pad: int = -1
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    create_attention_mask: bool = False
    inter_document_masking: bool = False


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """Which samples to draw from a corpus."""

    sequence_length: int
    samples: int | None  # None: one epoch
    seed: int
    split: str  # train, valid or test
    bounds: Bounds  # sequences [low, high)
    extra_token: bool = True
    drop_partial: bool = True
    shuffle: Shuffle = "global"


class GPTDataset(Dataset[Item]):
    """Items by number; ``None`` gives one whose loss is fully masked, to pad a last batch."""

    def __init__(
        self,
        sequences: Sequences,
        spec: SampleSpec,
        options: ItemOptions,
        *,
        cache: IndexCache | None = None,
        directory: Path | None = None,
    ) -> None:
        """Build the indices, or load them from ``directory`` (None: keep them in memory)."""
        self.sequences = sequences
        self.spec = spec
        self.options = options
        low, high = spec.bounds
        name = f"{sequences.path}, {spec.split} split"
        if high <= low:
            raise ValueError(
                f"{name}: empty, sequences [{low}, {high}) of {sequences.lengths.size}; change "
                "--split or the corpus"
            )
        self.plan = plan_indices(
            tokens_per_epoch=int(sequences.lengths[low:high].sum(dtype=np.int64)),
            sequence_length=spec.sequence_length,
            requested=spec.samples,
            extra=spec.extra_token,
            drop_partial=spec.drop_partial,
            name=name,
        )
        arrays, self.digest = self._indices(cache, directory)
        self.document_index, self.sample_index, self.shuffle_index = (
            arrays[n] for n in INDEX_NAMES
        )

    def _indices(self, cache: IndexCache | None, directory: Path | None) -> tuple[Arrays, str]:
        build = _builder(self.sequences.lengths, self.spec, self.plan)
        if cache is None or directory is None:
            arrays = build()
            return arrays, hash_arrays(arrays)
        inputs = {"spec": asdict(self.spec), "corpus": self.sequences.fingerprint()}
        entry = CacheEntry(
            directory=directory,
            kind="GPTDataset",
            split=self.spec.split,
            names=INDEX_NAMES,
            inputs=inputs,
        )
        return cache.arrays(entry, build)

    def __len__(self) -> int:
        return self.plan.samples

    def __getitem__(self, index: int | None) -> Item:
        if index is not None and not 0 <= index < len(self):
            raise IndexError(f"{self.sequences.path}: sample {index} of {len(self)}")
        text = self._text(0 if index is None else index)
        if self.spec.extra_token:
            tokens, labels = text[:-1], text[1:]
        else:
            tokens = text
            labels = np.roll(text, -1)
            labels[-1] = self.options.pad
        item = make_item(tokens, labels, self.options)
        if index is None:
            item["loss_mask"].zero_()
        return item

    def _text(self, index: int) -> NDArray[np.int64]:
        """Token ids of sample ``index``, (sequence_length + extra,), padded at the end of a partial
        sample.
        """
        extra = self.plan.extra
        text = np.empty(self.spec.sequence_length + extra, dtype=np.int64)
        place = 0
        for sequence, offset, length in self._pieces(index):
            part = self.sequences.get(sequence, offset, length)
            text[place : place + part.size] = part
            place += part.size
        # As unsigned numbers the negative ones are the largest: one pass finds both kinds.
        if place and int(text[:place].view(np.uint64).max()) >= self.options.vocab_size:
            self._refuse(index)
        text[place:] = self.options.pad
        return text

    def _pieces(self, index: int) -> Iterator[tuple[int, int, int | None]]:
        """Sequence, offset and length (None: to its end) of what sample ``index`` is made of."""
        row = int(self.shuffle_index[index])
        (first, start), (last, stop) = self.sample_index[row : row + 2].tolist()
        documents = self.document_index[first : last + 1].tolist()
        for sequence in documents[:-1]:
            yield sequence, start, None
            start = 0
        yield documents[-1], start, stop + self.plan.extra - start

    def _refuse(self, sample: int) -> NoReturn:
        for sequence, offset, length in self._pieces(sample):
            part = self.sequences.get(sequence, offset, length)
            wrong = np.flatnonzero((part >= self.options.vocab_size) | (part < 0))
            if wrong.size:
                at = int(wrong[0])
                raise ValueError(
                    f"{self.sequences.path}: token id {int(part[at])} at item {offset + at} of "
                    f"sequence {sequence} (sample {sample} of {self.spec.split}) is outside the "
                    f"vocabulary of {self.options.vocab_size}; was the corpus written with another "
                    "tokenizer (--tokenizer-type, --tokenizer-model, --vocab-size)?"
                )
        raise ValueError(f"{self.sequences.path}: sample {sample} changed while it was read")


def _builder(lengths: NDArray[np.int32], spec: SampleSpec, plan: IndexPlan) -> Callable[[], Arrays]:
    def build() -> Arrays:
        low, high = spec.bounds
        built = build_indices(lengths, low, high, plan, spec.seed, spec.shuffle)
        return dict(zip(INDEX_NAMES, built, strict=True))

    return build


def make_item(tokens: NDArray[np.int64], labels: NDArray[np.int64], options: ItemOptions) -> Item:
    """Tensors of one item from ids of shape (s,); padding becomes id 0 with its loss masked.

    Source: Megatron-LM's GPT dataset: a label that is padding, and with ``eod_mask_loss`` an input
    that is the end of a document, has no loss; what follows an end of document is a new document.
    """
    length = tokens.size
    padding = labels == options.pad
    loss_mask = torch.ones(length)
    if padding.any():
        loss_mask[torch.from_numpy(padding)] = 0.0
    if options.eod_mask_loss:
        loss_mask[torch.from_numpy(tokens == options.eod)] = 0.0
    restarts = options.reset_position_ids or options.inter_document_masking
    positions = torch.arange(length)
    if restarts or options.reset_attention_mask:
        starts, documents = _documents(tokens, options.eod)
        if restarts:
            positions -= torch.from_numpy(starts[documents])
    item = {
        "tokens": _clean(tokens, tokens == options.pad),
        "labels": _clean(labels, padding),
        "loss_mask": loss_mask,
        "position_ids": positions,
    }
    if options.create_attention_mask:
        visible = np.tri(length, dtype=bool)
        if options.reset_attention_mask:
            visible &= documents[:, None] == documents[None, :]
        item["attention_mask"] = torch.from_numpy(~visible[None])
    elif options.reset_attention_mask:
        item["document_ids"] = torch.from_numpy(documents)
    if options.inter_document_masking:
        bounds = np.full(length + 1, length, dtype=np.int32)
        bounds[: starts.size] = starts
        item["cu_seqlens"] = torch.from_numpy(bounds)
        item["max_seqlen"] = torch.tensor(int(np.diff(bounds).max()), dtype=torch.int32)
    return item


def _clean(ids: NDArray[np.int64], padding: NDArray[np.bool_]) -> Tensor:
    """A tensor of its own with id 0 where padding is; a plain copy is four times as fast as a
    choice per element, and most samples have none.
    """
    copy = ids.copy()
    if padding.any():
        copy[padding] = 0
    return torch.from_numpy(copy)


def _documents(tokens: NDArray[np.int64], eod: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where documents start (documents,), and which one each token is of (s,)."""
    starts = np.flatnonzero(tokens == eod) + 1
    starts = np.concatenate(([0], starts[starts < tokens.size]))
    documents = np.zeros(tokens.size, dtype=np.int64)
    documents[starts[1:]] = 1
    np.cumsum(documents, out=documents)
    return starts, documents


class MockSequences:
    """The mock corpus: 100,000 sequences of fixed pseudo-random lengths, counting up and ending in
    EOD.

    Source: Megatron-LM's ``--mock-data``.
    """

    SEQUENCES = 100_000
    LONGEST = 4096

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        generator = np.random.default_rng(0)
        self.lengths = generator.integers(1, self.LONGEST, size=self.SEQUENCES, dtype=np.int32)

    @property
    def path(self) -> str:
        """For messages."""
        return "--mock-data"

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Items ``[offset, offset + length)`` of a sequence, (length,)."""
        if not 0 <= index < self.SEQUENCES:
            raise IndexError(f"--mock-data: sequence {index} of {self.SEQUENCES}")
        whole = int(self.lengths[index])
        stop = whole if length is None else offset + length
        if not 0 <= offset <= stop <= whole:
            raise IndexError(
                f"--mock-data: items [{offset}, {stop}) of sequence {index}, which has {whole}"
            )
        items = np.arange(offset + 1, stop + 1, dtype=np.int64) % self.vocab_size
        if stop == whole and stop > offset:
            items[-1] = self.eod
        return items

    def fingerprint(self) -> dict[str, Any]:
        """What the sample indices depend on."""
        return {"mock": True, "sequences": self.SEQUENCES, "longest": self.LONGEST}
