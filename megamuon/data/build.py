"""From flags' values to datasets and loaders.

Owns ``DataSpec`` (everything that the data flags say, as plain values), the datasets that it stands
for and the torch loader over them. Invariants: files are opened and checked on every rank before
any rank builds or waits, so that bad input is one error everywhere and never a hang; what a rank
reads depends on the spec and its sampler alone. Tested by ``tests/data_room/test_build.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from megamuon.data.blend import Blend, parse_blend, part_sizes, without_zeros
from megamuon.data.blended_dataset import BlendedDataset
from megamuon.data.continued import ContinuedDataset, all_counts, continued
from megamuon.data.gpt_dataset import (
    GPTDataset,
    Item,
    ItemOptions,
    MockSequences,
    SampleSpec,
    Sequences,
)
from megamuon.data.gpt_indices import Shuffle
from megamuon.data.index_cache import Barrier, Compare, IndexCache, Ranks
from megamuon.data.indexed import IndexedDataset
from megamuon.data.sampler import SamplerSpec, build_sampler
from megamuon.data.splits import SPLITS, Bounds, normalize, split_bounds

DEFAULT_SPLIT = "969, 30, 1"
MOCK_SPLIT = "1,1,1"
AnyDataset = GPTDataset | ContinuedDataset | BlendedDataset
Three = tuple[AnyDataset | None, AnyDataset | None, AnyDataset | None]


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What the data flags say.

    ``samples`` are train, valid, test; None means one epoch, 0 no dataset, and a ``SampleCount``
    a dataset that grew. ``eod``, ``vocab_size``
    and ``pad`` come from the tokenizer (``pad`` through ``tokenizer.pad_id``); ``vocab_size``
    bounds the token ids.
    """

    sequence_length: int
    samples: tuple[int | None, int | None, int | None]
    seed: int = 1234
    eod: int
    vocab_size: int
    pad: int = -1
    data_path: Sequence[str] | None = None
    split: str | None = None
    train_data_path: Sequence[str] | None = None
    valid_data_path: Sequence[str] | None = None
    test_data_path: Sequence[str] | None = None
    mock_data: bool = False
    data_cache_path: str | None = None
    cache_timeout: float = 600.0
    fast_cache_load: bool = False
    mmap_bin_files: bool = True
    builder_threads: int = 1
    mid_level_dataset_surplus: float = 0.005
    extra_token: bool = True
    drop_last_partial_validation_sequence: bool = True
    shuffle: Shuffle = "global"
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    create_attention_mask: bool = False
    inter_document_masking: bool = False

    def item_options(self) -> ItemOptions:
        """The part that says what items hold."""
        return ItemOptions(
            eod=self.eod,
            vocab_size=self.vocab_size,
            pad=self.pad,
            eod_mask_loss=self.eod_mask_loss,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            create_attention_mask=self.create_attention_mask,
            inter_document_masking=self.inter_document_masking,
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one split's samples come from: a blend, and which part of each of its files."""

    blend: Blend
    split: str  # text of --split
    position: int  # which of its three ranges


def split_sources(spec: DataSpec) -> tuple[Source | None, Source | None, Source | None]:
    """Train, valid and test source of a spec. Raises ValueError for flags that contradict or are
    missing.
    """
    apart = {
        "--train-data-path": spec.train_data_path,
        "--valid-data-path": spec.valid_data_path,
        "--test-data-path": spec.test_data_path,
    }
    given = [flag for flag, value in apart.items() if value]
    if not given and not spec.data_path:
        raise ValueError("no data: give --data-path, --train-data-path, or --mock-data")
    if given and spec.data_path:
        raise ValueError(
            f"--data-path and {' and '.join(given)} contradict each other: data comes from one of"
            " them"
        )
    if spec.data_path:
        if spec.split is None:
            warnings.warn(f"--split is not given; using {DEFAULT_SPLIT}", stacklevel=2)
        blend, text = parse_blend(tuple(spec.data_path)), spec.split or DEFAULT_SPLIT
        first, second, third = (Source(blend=blend, split=text, position=i) for i in range(3))
        return first, second, third
    if spec.split is not None:
        raise ValueError(
            f"--split {spec.split!r} contradicts {' and '.join(given)}: each split has its own data"
        )
    found = [
        Source(blend=parse_blend(tuple(words), flag), split="1", position=0) if words else None
        for flag, words in apart.items()
    ]
    return found[0], found[1], found[2]


def build_train_valid_test(
    spec: DataSpec,
    *,
    ranks: Ranks | None = None,
    barrier: Barrier | None = None,
    compare: Compare | None = None,
) -> Three:
    """The three datasets of a spec, None where nothing is asked for or nothing given.

    All ranks must call it alike. ``barrier(label)`` lets rank 0 build the index caches first;
    without one, other ranks than local rank 0 poll for the files. ``compare(label, digest)`` gets
    every index hash, in the same order on every rank, and should raise if ranks differ.
    """
    cache = IndexCache(
        ranks=ranks or Ranks(),
        barrier=barrier,
        compare=compare,
        timeout=spec.cache_timeout,
        trust=spec.fast_cache_load,
    )
    if spec.mock_data:
        made = _mock(spec)
    else:
        sources = split_sources(spec)
        files = _open(spec, sources)

        def work() -> Three:
            built = [_split(spec, i, sources[i], files, cache) for i in range(len(SPLITS))]
            return built[0], built[1], built[2]

        made = cache.staged("datasets", work)
    for dataset in made:
        for label, digest in _digests(dataset):
            cache.check(label, digest)
    return made


def _mock(spec: DataSpec) -> Three:
    if spec.data_path or spec.train_data_path:
        raise ValueError("--mock-data contradicts the data paths: drop one of them")
    mock = MockSequences(spec.vocab_size, spec.eod)
    bounds = split_bounds(MOCK_SPLIT, mock.lengths.size)
    built = [
        None
        if spec.samples[i] == 0
        else _dataset(spec, i, mock, bounds[i], all_counts(spec.samples[i]), None, None)
        for i in range(len(SPLITS))
    ]
    return built[0], built[1], built[2]


def _open(spec: DataSpec, sources: Sequence[Source | None]) -> dict[str, IndexedDataset]:
    files: dict[str, IndexedDataset] = {}
    for source, samples in zip(sources, spec.samples, strict=True):
        drawn = source is not None and samples != 0
        for prefix in without_zeros(source.blend)[0].prefixes if drawn else ():
            if prefix not in files:
                files[prefix] = IndexedDataset(prefix, mmap=spec.mmap_bin_files)
    return files


def _split(
    spec: DataSpec,
    index: int,
    source: Source | None,
    files: dict[str, IndexedDataset],
    cache: IndexCache,
) -> AnyDataset | None:
    size = spec.samples[index]
    if source is None or size == 0:
        return None
    blend, places = without_zeros(source.blend)
    prefixes, weights = blend.prefixes, blend.weights
    if len(prefixes) == 1:
        weights = None  # a blend of one is its part, in its order (Megatron-LM's rule)
    bounds = [split_bounds(source.split, len(files[p]))[source.position] for p in prefixes]
    if bounds[0] is None:  # the split has no share: the same for every file
        return None
    if weights is None:
        one = all_counts(size) if len(prefixes) == 1 else (None,)
        wanted: list[tuple[int | None, ...]] = [one] * len(prefixes)
        shares: list[float] = []
    elif size is None:
        raise ValueError(
            f"{SPLITS[index]}: a weighted blend needs a number of samples; one epoch is possible "
            "only without weights"
        )
    else:
        shares = normalize(weights, "blend")
        surplus = spec.mid_level_dataset_surplus
        grown = [part_sizes(shares, count or 0, surplus) for count in all_counts(size)]
        wanted = list(zip(*grown, strict=True))

    def build(part: int) -> GPTDataset | ContinuedDataset:
        prefix = prefixes[part]
        directory = _cache_directory(spec, prefix)
        return _dataset(spec, index, files[prefix], bounds[part], wanted[part], cache, directory)

    parts = _map(build, len(prefixes), spec.builder_threads)
    if weights is None and len(parts) == 1:
        return parts[0]
    if weights is None:
        lengths = [len(part) for part in parts]
        shares = normalize(lengths, "blend")
        total = None if size is None else min(size, sum(lengths))
    else:
        total = sum(part_sizes(shares, size or 0))
    directory = _cache_directory(spec, prefixes[0])
    return BlendedDataset(parts, shares, total, places=places, cache=cache, directory=directory)


def _map(
    build: Callable[[int], GPTDataset | ContinuedDataset], count: int, threads: int
) -> list[GPTDataset | ContinuedDataset]:
    if threads <= 1 or count == 1:
        return [build(part) for part in range(count)]
    with ThreadPoolExecutor(max_workers=threads) as pool:
        return list(pool.map(build, range(count)))


def _cache_directory(spec: DataSpec, prefix: str) -> Path:
    if spec.data_cache_path is not None:
        return Path(spec.data_cache_path)
    return Path(prefix).parent / "cache" / "GPTDataset_indices"


def _dataset(
    spec: DataSpec,
    index: int,
    sequences: Sequences,
    bounds: Bounds | None,
    counts: Sequence[int | None],
    cache: IndexCache | None,
    directory: Path | None,
) -> GPTDataset | ContinuedDataset:
    def build(samples: int | None, seed: int) -> GPTDataset:
        sample_spec = SampleSpec(
            sequence_length=spec.sequence_length,
            samples=samples,
            seed=seed,
            split=SPLITS[index],
            bounds=bounds or (0, 0),
            extra_token=spec.extra_token,
            drop_partial=SPLITS[index] != "valid" or spec.drop_last_partial_validation_sequence,
            shuffle=spec.shuffle,
        )
        items = spec.item_options()
        return GPTDataset(sequences, sample_spec, items, cache=cache, directory=directory)

    return continued(counts, spec.seed, build)


def _digests(dataset: AnyDataset | None) -> list[tuple[str, str]]:
    if dataset is None:
        return []
    if isinstance(dataset, GPTDataset):
        return [(f"{dataset.spec.split} indices of {dataset.sequences.path}", dataset.digest)]
    found = [pair for part in dataset.parts for pair in _digests(part)]
    return [*found, (f"{dataset.split} blend", dataset.digest)]


def collate(items: Sequence[Item]) -> Item:
    """Stack the tensors of items along a new first dim (micro_batch_size)."""
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def data_loader(
    dataset: AnyDataset, sampler: SamplerSpec, *, num_workers: int = 2, pin_memory: bool = False
) -> DataLoader[Item]:
    """Micro-batches of this rank: tokens, labels, position_ids (micro_batch, s) int64, loss_mask
    float32, ….

    The loader has a generator of its own, so that making an iterator does not move torch's global
    generator.
    """
    return DataLoader(
        dataset,
        batch_sampler=build_sampler(len(dataset), sampler),
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        generator=torch.Generator().manual_seed(0),
    )
