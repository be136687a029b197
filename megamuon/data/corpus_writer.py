"""Encoded documents to indexed datasets, one per JSON key.

Owns the order in which documents are written. Invariant: nothing is left behind on an error, and an
existing dataset is replaced only by a complete one. Tested by
``tests/tools/test_preprocess_data.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from megamuon.data.corpus import TEXT_KEY, CorpusError, CorpusOptions, chunks, find_files
from megamuon.data.corpus_workers import encode_all
from megamuon.data.indexed import IndexedDatasetBuilder, bin_path, idx_path, writer_dtype
from megamuon.data.tokenizer import Tokenizer


@dataclass(kw_only=True)
class Progress:
    """Running totals over all keys."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)  # documents by what they were read from
    replaced: int = 0  # text documents that were not UTF-8
    left_out: str = "nothing"  # of the folders, with reasons and counts
    left_out_counts: dict[str, int] = field(default_factory=dict)


def write_corpus(
    inputs: Sequence[str],
    prefix: str,
    make_tokenizer: Callable[[], Tokenizer],
    options: CorpusOptions,
    report: Callable[[Progress], None],
) -> tuple[Progress, list[str]]:
    """Write ``{prefix}_{key}_document`` for every key; returns the totals and the prefixes written.

    With several partitions document i goes to partition i mod n and the partitions follow one
    another in the result. Nothing is left behind on an error. Raises CorpusError for an empty
    corpus.
    """
    found = find_files(inputs, options)
    if found.texts and options.json_keys != (TEXT_KEY,):
        raise CorpusError(
            f"{found.texts[0]}: a text file has no key but {TEXT_KEY!r}; drop --json-keys"
        )
    dtype = writer_dtype(make_tokenizer().vocab_size)
    keys = options.json_keys
    targets = {key: f"{prefix}_{key}_document" for key in keys}
    progress = Progress(left_out=found.describe_left_out())
    progress.left_out_counts = {reason: len(paths) for reason, paths in found.left_out.items()}
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(_Partitions(targets[key], dtype, options.partitions))
            for key in keys
        }
        for encoded in encode_all(chunks(found.lines, found.texts), make_tokenizer, options):
            for key in keys:
                writers[key].add(encoded.ids[key], encoded.lengths[key])
                progress.tokens += int(encoded.ids[key].size)
                progress.empty_documents += encoded.lengths[key].count(0)
            progress.documents += len(encoded.lengths[keys[0]])
            progress.bytes += encoded.text_bytes
            progress.kinds.update(encoded.kinds)
            progress.replaced += encoded.replaced
            report(progress)
        if progress.tokens == 0:
            raise CorpusError(f"--input {' '.join(inputs)}: empty corpus, no text to encode")
    return progress, list(targets.values())


class _Partitions:
    """One dataset, written directly or as several that are dealt documents in turn and merged at
    the end.
    """

    def __init__(self, target: str, dtype: Any, count: int) -> None:
        if count < 1:
            raise ValueError(f"--partitions {count}: must be at least 1")
        self._target, self._dtype = target, dtype
        self._names = [target] if count == 1 else [f"{target}_partition_{i}" for i in range(count)]
        self._builders = [IndexedDatasetBuilder(name, dtype) for name in self._names]
        self._next = 0

    def add(self, ids: NDArray[Any], lengths: Sequence[int]) -> None:
        """Append documents; an empty one is recorded without a sequence, as Megatron-LM does."""
        place = 0
        for length in lengths:
            builder = self._builders[self._next % len(self._builders)]
            builder.add_document(ids[place : place + length], [length] if length else [])
            place += length
            self._next += 1

    def __enter__(self) -> _Partitions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        try:
            if kind is None:
                for builder in self._builders:
                    builder.finalize()
                if len(self._names) > 1:
                    self._merge()
        finally:
            for builder in self._builders:
                builder.abort()
            if len(self._names) > 1:
                for name in self._names:
                    for path in (bin_path(name), idx_path(name)):
                        with suppress(OSError):
                            path.unlink(missing_ok=True)

    def _merge(self) -> None:
        with IndexedDatasetBuilder(self._target, self._dtype) as merged:
            for name in self._names:
                merged.add_index(name)
