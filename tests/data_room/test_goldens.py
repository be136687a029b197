"""Every golden vector of Megatron-LM's data formats and algorithms: 42 cases."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamuon.data.blend import blend_indices, exhaustive_indices
from megamuon.data.gpt_dataset import GPTDataset, ItemOptions, SampleSpec
from megamuon.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megamuon.data.splits import normalize, parse_split, split_bounds

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "data" / "megatron_dataset_golden.json").read_text()
)
SMALL = [[5, 6, 7, 0], [8, 9, 0], [10, 11, 12, 13, 14, 0], [15, 0]]


def write(prefix: Path, documents: list[Any]) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, "uint16") as builder:
        for document in documents:
            builder.add_item(document)
            builder.end_document()
    return IndexedDataset(prefix)


def dataset(sequences: IndexedDataset, case: dict[str, Any]) -> GPTDataset:
    spec = SampleSpec(
        sequence_length=case["seq"],
        samples=case["num_samples"],
        seed=case["seed"],
        split="train",
        bounds=(0, len(sequences)),
        extra_token=bool(case["extra"]),
        drop_partial=case["drop_last"],
    )
    return GPTDataset(sequences, spec, ItemOptions(eod=0, vocab_size=100))


def test_there_are_42() -> None:
    parts = ("idx_files", "gpt_small", "gpt_big", "blend", "blend_exhaustive", "split")
    assert sum(len(GOLDEN[part]) for part in parts) == 42


@pytest.mark.parametrize("case", GOLDEN["idx_files"], ids=lambda case: case["name"])
def test_files(case: dict[str, Any], tmp_path: Path) -> None:
    multimodal = "modes" in case
    prefix = tmp_path / "corpus"
    modes = iter(case.get("modes", []))
    with IndexedDatasetBuilder(prefix, case["dtype"], multimodal=multimodal) as builder:
        for document in case["documents"]:
            if multimodal:
                for sequence in document:
                    builder.add_item(sequence, next(modes))
                builder.end_document()
            else:
                flat = [item for sequence in document for item in sequence]
                builder.add_document(flat, [len(sequence) for sequence in document])
    assert prefix.with_suffix(".idx").read_bytes().hex() == case["idx_hex"]
    assert prefix.with_suffix(".bin").read_bytes().hex() == case["bin_hex"]
    read = IndexedDataset(prefix, multimodal=multimodal)
    assert read.lengths.tolist() == case["lengths"]
    assert read.document_indices.tolist() == case["document_indices"]
    sequences = [sequence for document in case["documents"] for sequence in document]
    for index, sequence in enumerate(sequences):
        assert read.get(index).tolist() == sequence
        if multimodal:
            assert read[index][1] == case["modes"][index]


@pytest.mark.parametrize("case", GOLDEN["gpt_small"])
def test_small_indices(case: dict[str, Any], tmp_path: Path) -> None:
    built = dataset(write(tmp_path / "corpus", SMALL), case)
    assert built.plan.epochs == case["epochs"]
    assert built.document_index.tolist() == case["document_index"]
    assert built.sample_index.tolist() == case["sample_index"]
    assert built.shuffle_index.tolist() == case["shuffle_index"]
    assert built.document_index.dtype == np.int32
    assert built.sample_index.dtype == np.int32
    assert built.shuffle_index.dtype == np.uint32
    item = built[0]
    assert item["tokens"].tolist() == case["tokens_of_item_0"]
    assert item["labels"].tolist() == case["labels_of_item_0"]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    generator = np.random.RandomState(7)
    documents = []
    for _ in range(200):
        length = generator.randint(1, 60)
        documents.append([*generator.randint(1, 99, size=length), 0])
    return write(tmp_path_factory.mktemp("big") / "corpus", documents)


@pytest.mark.parametrize("case", GOLDEN["gpt_big"])
def test_big_indices(case: dict[str, Any], big: IndexedDataset) -> None:
    built = dataset(big, case)
    arrays = (built.document_index, built.sample_index, built.shuffle_index)
    hashes = [hashlib.sha256(array.tobytes()).hexdigest()[:16] for array in arrays]
    assert hashes == [case["doc_sha"], case["sample_sha"], case["shuffle_sha"]]
    assert (built.plan.epochs, len(built)) == (case["epochs"], case["len"])
    assert built.shuffle_index[:6].tolist() == case["first_shuffle"]
    assert built[0]["tokens"][:16].tolist() == case["tokens_of_item_0"]


@pytest.mark.parametrize("case", GOLDEN["blend"])
def test_blends(case: dict[str, Any]) -> None:
    datasets, samples = blend_indices(normalize(case["weights"], "test"), case["size"])
    assert datasets.tolist() == case["dataset_index"]
    assert samples.tolist() == case["dataset_sample_index"]
    assert (datasets.dtype, samples.dtype) == (np.int16, np.int64)


@pytest.mark.parametrize("case", GOLDEN["blend_exhaustive"])
def test_exhaustive_blends(case: dict[str, Any]) -> None:
    datasets, samples = exhaustive_indices(case["sizes"])
    assert datasets.tolist() == case["dataset_index"]
    assert samples.tolist() == case["dataset_sample_index"]


@pytest.mark.parametrize("case", GOLDEN["split"])
def test_splits(case: dict[str, Any]) -> None:
    expected = [None if part is None else tuple(part) for part in case["matrix"]]
    assert list(parse_split(case["split"])) == expected
    bounds = [None if part is None else tuple(part) for part in case["bounds_of_1000"]]
    assert list(split_bounds(case["split"], 1000)) == bounds
