"""From flags' values to datasets and loaders: sources, blends, caches, ranks, workers."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megamuon.data.blended_dataset import BlendedDataset
from megamuon.data.build import DataSpec, build_train_valid_test, data_loader, split_sources
from megamuon.data.gpt_dataset import GPTDataset
from megamuon.data.index_cache import Ranks
from megamuon.data.indexed import IndexedDatasetError
from megamuon.data.sampler import SamplerSpec
from tests.support.corpora import random_documents, write_corpus


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [
        write_corpus(tmp_path / f"part{i}", random_documents(40 + 10 * i, seed=i)) for i in range(3)
    ]


def spec(**more: Any) -> DataSpec:
    fields: dict[str, Any] = {"sequence_length": 8, "samples": (50, 5, 0), "eod": 0}
    return DataSpec(**fields | {"vocab_size": 100, "split": "80,20,0"} | more)


def cache_files(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "GPTDataset_indices").iterdir()}


def test_one_prefix(prefixes: list[str], tmp_path: Path) -> None:
    train, valid, test = build_train_valid_test(spec(data_path=prefixes[:1]))
    assert isinstance(train, GPTDataset)
    assert isinstance(valid, GPTDataset)
    assert test is None
    assert (train.spec.bounds, valid.spec.bounds) == ((0, 32), (32, 40))
    assert len(train) >= 50
    assert len(cache_files(tmp_path)) == 8
    again, _, _ = build_train_valid_test(spec(data_path=prefixes[:1]))
    assert again is not None
    assert again.digest == train.digest
    assert len(cache_files(tmp_path)) == 8


def test_every_setting_has_its_own_cache(prefixes: list[str], tmp_path: Path) -> None:
    base = spec(data_path=prefixes[:1], data_cache_path=str(tmp_path / "elsewhere"))
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 5},
        {"sequence_length": 9},
        {"samples": (51, 0, 0)},
        {"split": "70,30,0"},
        {"extra_token": False},
        {"shuffle": "epoch"},
    ]
    for count, change in enumerate(changes, start=1):
        build_train_valid_test(dataclasses.replace(base, **{"samples": (50, 0, 0)} | change))
        assert len(list((tmp_path / "elsewhere").iterdir())) == 4 * count
    valid = dataclasses.replace(base, samples=(0, None, 0))
    dropped = build_train_valid_test(valid)[1]
    kept = build_train_valid_test(
        dataclasses.replace(valid, drop_last_partial_validation_sequence=False)
    )[1]
    assert dropped is not None
    assert kept is not None
    assert len(kept) == len(dropped) + 1


def test_a_rewritten_corpus_is_indexed_anew(prefixes: list[str]) -> None:
    first = build_train_valid_test(spec(data_path=prefixes[:1]))[0]
    write_corpus(Path(prefixes[0]), random_documents(40, seed=99))  # same path, same count
    second = build_train_valid_test(spec(data_path=prefixes[:1]))[0]
    assert first is not None
    assert second is not None
    assert first.digest != second.digest
    stream = np.concatenate([random_documents(40, seed=99)[d] for d in second.document_index])
    row = int(second.shuffle_index[0])
    assert second[0]["tokens"].tolist() == stream[row * 8 : row * 8 + 8].tolist()


def test_weighted_blend(prefixes: list[str], tmp_path: Path) -> None:
    words = ["0.3", prefixes[0], "0.7", prefixes[1]]
    train = build_train_valid_test(spec(data_path=words, samples=(101, 0, 0)))[0]
    assert isinstance(train, BlendedDataset)
    assert len(train) == 31 + 71
    assert np.bincount(train.dataset_index).tolist() == [31, 71]
    item = train[0]
    assert int(item["dataset_id"]) == 1
    assert torch.equal(item["tokens"], train.parts[1][0]["tokens"])
    assert train[None]["loss_mask"].sum() == 0
    assert [part.spec.samples for part in train.parts] == [32, 72]  # with the surplus
    assert any("BlendedDataset-train-dataset_index" in name for name in cache_files(tmp_path))
    threaded = build_train_valid_test(
        spec(data_path=words, samples=(101, 0, 0), builder_threads=3, data_cache_path=str(tmp_path))
    )[0]
    assert threaded is not None
    assert threaded.digest == train.digest


@pytest.mark.parametrize("weights", [("1.0",), ("0.5", "0"), ("0.0", "2")])
@pytest.mark.parametrize("flag", ["data_path", "train_data_path"])
def test_a_blend_of_one_is_its_part(
    prefixes: list[str], tmp_path: Path, flag: str, weights: tuple[str, ...]
) -> None:
    drawn = next(place for place, weight in enumerate(weights) if float(weight))
    places = [str(tmp_path / "absent")] * len(weights)  # what is not drawn need not be there
    places[drawn] = prefixes[0]
    words = [word for pair in zip(weights, places, strict=True) for word in pair]
    split = "80,20,0" if flag == "data_path" else None
    for samples in (50, 500, None):
        sizes = (samples, 5, 0)
        plain = spec(split=split, samples=sizes, **{flag: [prefixes[0]]})
        weighted = spec(split=split, samples=sizes, **{flag: words})
        for mine, other in zip(
            build_train_valid_test(weighted), build_train_valid_test(plain), strict=True
        ):
            assert type(mine) is type(other)
            assert getattr(mine, "digest", None) == getattr(other, "digest", None)


def test_parts_of_weight_zero_are_never_drawn(prefixes: list[str], tmp_path: Path) -> None:
    tiny = write_corpus(tmp_path / "tiny", [[1, 0]])  # no sample of this length
    words = ["0", tiny, "1", prefixes[0], "1", prefixes[1]]
    with_zero = build_train_valid_test(spec(data_path=words, samples=(101, 0, 0)))[0]
    without = build_train_valid_test(spec(data_path=words[2:], samples=(101, 0, 0)))[0]
    assert isinstance(with_zero, BlendedDataset)
    assert isinstance(without, BlendedDataset)
    assert with_zero.digest == without.digest
    assert {int(with_zero[place]["dataset_id"]) for place in range(20)} == {1, 2}  # as given


def test_one_file_twice_on_several_threads(prefixes: list[str], tmp_path: Path) -> None:
    for turn in range(5):
        cache = str(tmp_path / f"cache{turn}")
        words = [prefixes[0]] * 4
        made = build_train_valid_test(
            spec(data_path=words, builder_threads=4, data_cache_path=cache)
        )[0]
        assert isinstance(made, BlendedDataset)
        assert len({part.digest for part in made.parts}) == 1
        assert not list(Path(cache).glob("*.tmp-*"))


def test_unweighted_blends(prefixes: list[str]) -> None:
    every = build_train_valid_test(spec(data_path=prefixes, samples=(None, 0, 0)))[0]
    assert isinstance(every, BlendedDataset)
    lengths = [len(part) for part in every.parts]
    assert np.bincount(every.dataset_index).tolist() == lengths
    some = build_train_valid_test(spec(data_path=prefixes, samples=(40, 0, 0)))[0]
    assert some is not None
    assert len(some) == 40
    more = build_train_valid_test(spec(data_path=prefixes, samples=(10_000, 0, 0)))[0]
    assert more is not None
    assert len(more) == sum(lengths)


def test_separate_paths(prefixes: list[str]) -> None:
    apart = spec(
        split=None,
        train_data_path=[prefixes[0]],
        valid_data_path=["1", prefixes[1], "3", prefixes[2]],
    )
    train, valid, test = build_train_valid_test(apart)
    assert isinstance(train, GPTDataset)
    assert isinstance(valid, BlendedDataset)
    assert (train.spec.bounds, test) == ((0, 40), None)


def test_default_split_warns(prefixes: list[str]) -> None:
    with pytest.warns(UserWarning, match="969, 30, 1"):
        sources = split_sources(spec(data_path=prefixes[:1], split=None))
    assert sources[2] is not None
    assert sources[2].split == "969, 30, 1"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no data: give --data-path"),
        ({"data_path": ["a"], "train_data_path": ["b"]}, "--data-path and --train-data-path"),
        ({"train_data_path": ["a"]}, "--split '80,20,0' contradicts --train-data-path"),
        ({"mock_data": True, "data_path": ["a"]}, "--mock-data contradicts"),
        ({"data_path": ["1", "a", "x", "b"]}, "--data-path"),
    ],
)
def test_contradictions(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_train_valid_test(spec(**fields))


def test_a_split_without_sequences_is_named(prefixes: list[str]) -> None:
    with pytest.raises(ValueError, match=r"part0\.bin, valid split: empty, sequences \[40, 40\)"):
        build_train_valid_test(spec(data_path=prefixes[:1], split="99.9,0.1"))
    train, valid, _ = build_train_valid_test(
        spec(data_path=prefixes[:1], split="99.9,0.1", samples=(5, 0, 0))
    )
    assert train is not None
    assert valid is None
    with pytest.raises(ValueError, match="weighted blend needs a number of samples"):
        words = ["1", prefixes[0], "2", prefixes[1]]
        build_train_valid_test(spec(data_path=words, samples=(None, 0, 0)))


def test_mock_data() -> None:
    data = spec(mock_data=True, split=None, samples=(10, 10, 10), sequence_length=2048)
    made = build_train_valid_test(data)
    bounds = [dataset.spec.bounds for dataset in made if isinstance(dataset, GPTDataset)]
    assert bounds == [(0, 33333), (33333, 66667), (66667, 100000)]
    assert made[0] is not None
    assert made[0][0]["tokens"].shape == (2048,)


def rank_results(data: DataSpec, local_ranks: list[int]) -> list[Any]:
    """Build on every rank in threads; gives (digests seen by compare) or the exception."""
    size = len(local_ranks)
    meeting = threading.Barrier(size, timeout=20)
    results: list[Any] = [None] * size

    def main(rank: int) -> None:
        seen: list[tuple[str, str]] = []
        try:
            build_train_valid_test(
                data,
                ranks=Ranks(rank=rank, local_rank=local_ranks[rank], world_size=size),
                barrier=lambda label: (meeting.wait(), None)[1],
                compare=lambda label, digest: seen.append((label, digest)),
            )
            results[rank] = seen
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_compare_the_same_hashes(prefixes: list[str]) -> None:
    words = ["1", prefixes[0], "1", prefixes[1]]
    results = rank_results(spec(data_path=words), [0, 1, 0])
    assert results[0] == results[1] == results[2]
    labels = [label for label, _ in results[0]]
    assert labels[0] == f"train indices of {prefixes[0]}.bin"
    assert labels[2] == "train blend"
    assert len(labels) == 6


def test_bad_input_is_the_same_error_on_every_rank(prefixes: list[str]) -> None:
    path = Path(f"{prefixes[0]}.idx")
    path.write_bytes(path.read_bytes()[:-3])
    results = rank_results(spec(data_path=prefixes[:1]), [0, 1])
    assert all(isinstance(result, IndexedDatasetError) for result in results)
    results = rank_results(spec(data_path=prefixes[1:2], split="99.9,0.1"), [0, 1])
    assert ["empty" in str(result) for result in results] == [True, True]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_loader_resumes_with_any_number_of_workers(prefixes: list[str], kind: str) -> None:
    train = build_train_valid_test(spec(data_path=prefixes[:1], samples=(40, 0, 0)))[0]
    assert train is not None

    def draw(consumed: int, workers: int, count: int) -> list[torch.Tensor]:
        sampler = SamplerSpec(
            kind=kind,  # type: ignore[arg-type]
            consumed_samples=consumed,
            micro_batch_size=2,
            data_parallel_rank=1,
            data_parallel_size=2,
        )
        loader = iter(data_loader(train, sampler, num_workers=workers))
        return [next(loader)["tokens"] for _ in range(count)]

    before = torch.get_rng_state()
    whole = draw(0, 0, 8)
    assert torch.equal(before, torch.get_rng_state())  # the loop's own randomness is not moved
    assert whole[0].shape == (2, 8)
    assert whole[0].dtype == torch.int64
    for resumed in (draw(12, 0, 5), draw(12, 2, 5)):
        assert all(torch.equal(a, b) for a, b in zip(resumed, whole[3:], strict=True))


def test_batches_hold_everything(prefixes: list[str]) -> None:
    words = ["1", prefixes[0], "1", prefixes[1]]
    data = spec(data_path=words, inter_document_masking=True, create_attention_mask=True)
    train = build_train_valid_test(data)[0]
    assert train is not None
    batch = next(iter(data_loader(train, SamplerSpec(micro_batch_size=3), num_workers=0)))
    assert {key: tuple(value.shape) for key, value in batch.items()} == {
        "tokens": (3, 8),
        "labels": (3, 8),
        "loss_mask": (3, 8),
        "position_ids": (3, 8),
        "attention_mask": (3, 1, 8, 8),
        "cu_seqlens": (3, 9),
        "max_seqlen": (3,),
        "dataset_id": (3,),
    }
