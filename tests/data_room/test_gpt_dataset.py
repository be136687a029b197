"""Items: masks, positions, padding, partial samples, the vocabulary check and the mock corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megamuon.data.gpt_dataset import (
    GPTDataset,
    ItemOptions,
    MockSequences,
    SampleSpec,
    make_item,
)
from megamuon.data.indexed import IndexedDataset
from tests.support.corpora import random_documents, write_corpus

TOKENS = np.array([5, 6, 0, 7, 0, 8], dtype=np.int64)
LABELS = np.array([6, 0, 7, 0, 8, -1], dtype=np.int64)


def item(**more: Any) -> dict[str, torch.Tensor]:
    return make_item(TOKENS, LABELS, ItemOptions(eod=0, vocab_size=100, **more))


def make(prefix: str, *, vocab_size: int = 100, mmap: bool = True, **more: Any) -> GPTDataset:
    read = IndexedDataset(prefix, mmap=mmap)
    fields: dict[str, Any] = {"sequence_length": 4, "samples": None, "seed": 3, "split": "train"}
    fields |= {"bounds": (0, len(read))} | more
    return GPTDataset(read, SampleSpec(**fields), ItemOptions(eod=0, vocab_size=vocab_size))


def test_plain_item() -> None:
    made = item()
    assert {key: (value.dtype, tuple(value.shape)) for key, value in made.items()} == {
        "tokens": (torch.int64, (6,)),
        "labels": (torch.int64, (6,)),
        "loss_mask": (torch.float32, (6,)),
        "position_ids": (torch.int64, (6,)),
    }
    assert made["labels"].tolist() == [6, 0, 7, 0, 8, 0]
    assert made["loss_mask"].tolist() == [1, 1, 1, 1, 1, 0]
    assert made["position_ids"].tolist() == [0, 1, 2, 3, 4, 5]


def test_end_of_document_has_no_loss() -> None:
    assert item(eod_mask_loss=True)["loss_mask"].tolist() == [1, 1, 0, 1, 0, 0]


def test_positions_restart() -> None:
    assert item(reset_position_ids=True)["position_ids"].tolist() == [0, 1, 2, 0, 1, 0]


def test_attention_is_cut_between_documents() -> None:
    assert item(reset_attention_mask=True)["document_ids"].tolist() == [0, 0, 0, 1, 1, 2]
    causal = item(create_attention_mask=True)["attention_mask"]
    assert (causal.shape, causal.dtype) == ((1, 6, 6), torch.bool)
    assert torch.equal(causal[0], torch.ones(6, 6).triu(1).bool())  # True is masked
    cut = item(create_attention_mask=True, reset_attention_mask=True)["attention_mask"][0]
    same = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2), torch.ones(1, 1)).bool()
    assert torch.equal(~cut, same & ~causal[0])


def test_inter_document_masking() -> None:
    made = item(inter_document_masking=True)
    assert made["cu_seqlens"].tolist() == [0, 3, 5, 6, 6, 6, 6]
    assert made["cu_seqlens"].dtype == torch.int32
    assert int(made["max_seqlen"]) == 3
    assert made["position_ids"].tolist() == [0, 1, 2, 0, 1, 0]


def test_a_document_that_ends_with_the_sample_starts_no_other() -> None:
    tokens = np.array([5, 6, 0], dtype=np.int64)
    options = ItemOptions(eod=0, vocab_size=9, inter_document_masking=True)
    made = make_item(tokens, np.array([6, 0, 4]), options)
    assert made["cu_seqlens"].tolist() == [0, 3, 3, 3]


def test_a_pad_token_is_masked_and_replaced() -> None:
    made = item(pad=8)
    assert made["tokens"].tolist() == [5, 6, 0, 7, 0, 0]
    assert made["loss_mask"].tolist() == [1, 1, 1, 1, 0, 1]


def test_items_are_the_stream_cut_in_pieces(tmp_path: Path) -> None:
    documents = random_documents(30, seed=1)
    prefix = write_corpus(tmp_path / "corpus", documents)
    for extra in (True, False):
        made = make(prefix, samples=200, extra_token=extra)
        stream = np.concatenate([documents[d] for d in made.document_index])
        for index in range(len(made)):
            row = int(made.shuffle_index[index])
            got = made[index]
            assert got["tokens"].tolist() == stream[row * 4 : row * 4 + 4].tolist()
            if extra:
                assert got["labels"].tolist() == stream[row * 4 + 1 : row * 4 + 5].tolist()
            else:
                expected = [*stream[row * 4 + 1 : row * 4 + 4].tolist(), 0]
                assert got["labels"].tolist() == expected
                assert got["loss_mask"].tolist() == [1, 1, 1, 0]


def test_both_ways_to_read_agree(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", random_documents(10, seed=2))
    mapped, read = make(prefix), make(prefix, mmap=False)
    for index in range(len(mapped)):
        assert torch.equal(mapped[index]["tokens"], read[index]["tokens"])


def test_partial_validation_sample_is_padded(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus")  # 15 items: samples at 0, 4, 8 and 12
    made = make(prefix, drop_partial=False, split="valid")
    assert (len(made), len(make(prefix))) == (4, 3)
    where = int(np.flatnonzero(np.asarray(made.shuffle_index) == 3)[0])
    assert made[where]["loss_mask"].tolist() == [1, 1, 0, 0]
    assert made[where]["labels"].tolist()[2:] == [0, 0]


def test_padding_item_has_no_loss(tmp_path: Path) -> None:
    made = make(write_corpus(tmp_path / "corpus"))
    assert made[None]["loss_mask"].sum() == 0
    assert torch.equal(made[None]["tokens"], made[0]["tokens"])
    for index in (3, -1):
        with pytest.raises(IndexError, match=rf"sample {index} of 3"):
            made[index]


@pytest.mark.parametrize(("bad", "dtype"), [(60, "uint16"), (-2, "int32")])
def test_ids_outside_the_vocabulary_are_named(tmp_path: Path, bad: int, dtype: str) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[1, 2, 3, 59, 0], [5, 6, bad, 0]], dtype)
    made = make(prefix, vocab_size=60)
    caught = []
    for index in range(len(made)):
        try:
            made[index]
        except ValueError as error:
            caught.append((index, str(error)))
    assert caught
    for index, message in caught:
        for words in (f"{prefix}.bin", f"token id {bad}", "item 2 of sequence 1"):
            assert words in message
        assert f"sample {index} of train" in message
        assert "vocabulary of 60" in message


def test_empty_corpora(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "none", [])
    with pytest.raises(ValueError, match=r"none\.bin, train split: empty"):
        make(prefix)
    prefix = write_corpus(tmp_path / "blank", [[], []])
    with pytest.raises(ValueError, match=r"blank\.bin, train split: empty corpus"):
        make(prefix)


def test_mock_corpus() -> None:
    mock = MockSequences(vocab_size=50, eod=49)
    lengths = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)
    assert np.array_equal(mock.lengths, lengths)
    length = int(lengths[3])
    whole = [(i + 1) % 50 for i in range(length - 1)] + [49]
    assert mock.get(3).tolist() == whole
    assert mock.get(3, 5, 9).tolist() == whole[5:14]
    assert mock.get(3, length - 1).tolist() == [49]
    assert mock.get(3, length).tolist() == []
    with pytest.raises(IndexError):
        mock.get(3, 0, length + 1)
