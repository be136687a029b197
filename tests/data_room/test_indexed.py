"""The reader refuses every broken file with one line that names file and field; the writer is
atomic.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megamuon.data.gpt_dataset import MockSequences
from megamuon.data.indexed import (
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexedDatasetError,
    writer_dtype,
)
from tests.support.corpora import SMALL, write_corpus

HEADER = 34


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus")


def refuse(prefix: str, *words: str) -> None:
    with pytest.raises(IndexedDatasetError) as caught:
        IndexedDataset(prefix)
    message = str(caught.value)
    assert "\n" not in message
    for word in (prefix, *words):
        assert word in message


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(bytes(content))


def test_every_truncation_of_the_index_is_refused(prefix: str) -> None:
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refuse(prefix, "header" if size < HEADER else "file size", str(size))
    path.write_bytes(whole + b"\0")
    refuse(prefix, "file size")


def test_every_truncation_of_the_items_is_refused(prefix: str) -> None:
    path = Path(f"{prefix}.bin")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refuse(prefix, "file size", str(size), str(len(whole)))
    path.write_bytes(whole + b"\0\0")
    refuse(prefix, "file size")


@pytest.mark.parametrize(
    ("offset", "layout", "value", "field"),
    [
        (0, "<B", 0x50, "magic"),
        (9, "<Q", 2, "version"),
        (17, "<B", 9, "item type"),
        (17, "<B", 4, "pointers[1]"),
        (26, "<Q", 0, "document count"),
        (HEADER, "<i", -4, "lengths[0]"),
        (HEADER, "<i", 5, "pointers[1]"),
        (HEADER + 12, "<i", 9, "file size"),
        (HEADER + 16, "<q", 2, "pointers[0]"),
        (HEADER + 32, "<q", 15, "pointers[2]"),
        (HEADER + 48, "<q", 1, "document_indices[0]"),
        (HEADER + 64, "<q", 0, "document_indices[2]"),
        (HEADER + 80, "<q", 3, "document_indices[4]"),
    ],
)
def test_each_field_is_checked(
    prefix: str, offset: int, layout: str, value: int, field: str
) -> None:
    edit(Path(f"{prefix}.idx"), lambda content: struct.pack_into(layout, content, offset, value))
    refuse(prefix, field)


def test_a_foreign_file_is_named(prefix: str) -> None:
    Path(f"{prefix}.idx").write_bytes(b"\x93NUMPY\x01\x00" + bytes(200))
    refuse(prefix, "magic")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.idx"):
        IndexedDataset(tmp_path / "nothing")


def test_multimodal_files_must_be_announced(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "pairs", "int32", multimodal=True) as builder:
        builder.add_document([1, 2, 3], [2, 1], [0, 1])
    with pytest.raises(IndexedDatasetError, match="looks like a multimodal"):
        IndexedDataset(tmp_path / "pairs")
    read = IndexedDataset(tmp_path / "pairs", multimodal=True)
    assert [(items.tolist(), mode) for items, mode in read[0:2]] == [([1, 2], 0), ([3], 1)]
    text = write_corpus(tmp_path / "text")
    with pytest.raises(IndexedDatasetError, match="looks like a text"):
        IndexedDataset(text, multimodal=True)


@pytest.mark.parametrize("mmap", [True, False])
def test_reading(prefix: str, mmap: bool) -> None:
    read = IndexedDataset(prefix, mmap=mmap)
    assert len(read) == 4
    assert read[-1].tolist() == [15, 0]
    assert [items.tolist() for items in read[1:3]] == [list(SMALL[1]), list(SMALL[2])]
    assert read.get(2, 1, 3).tolist() == [11, 12, 13]
    assert read.get(2, 4).tolist() == [14, 0]
    assert read.get(0, 4).tolist() == []
    copy = pickle.loads(pickle.dumps(read))
    assert copy.get(2).tolist() == list(SMALL[2])
    with pytest.raises(IndexError, match="sequence 2"):
        read.get(2, 4, 3)  # would run into the next sequence
    with pytest.raises(IndexError, match="sequence 4"):
        read[4]
    with pytest.raises(ValueError, match="step 2"):
        read[0:4:2]


@pytest.mark.parametrize("mmap", [True, False])
def test_places_that_have_wrapped_are_refused(prefix: str, mmap: bool) -> None:
    read = IndexedDataset(prefix, mmap=mmap)
    for place in (-1, -3, np.int32(-3), 4, 2**31):
        with pytest.raises(IndexError, match=f"sequence {place} of 4"):
            read.get(place)
    with pytest.raises(IndexError, match="sequence -1 of 100000"):
        MockSequences(100, 0).get(-1)


def test_lengths_are_summed_as_integers(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "sums", "uint16")
    wide = np.array([2**31 - 1, 2**31 - 1, 6], dtype=np.int32)  # 4 in 32 bits
    with pytest.raises(ValueError, match="a document of 4 items has lengths"):
        builder.add_document([1, 2, 3, 4], wide)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a document of 1 items has lengths"):
        builder.add_document([1], [3, -2])
    builder.add_document([1, 2, 3], np.array([2, 1], dtype=np.int8))  # type: ignore[arg-type]
    builder.finalize()
    assert IndexedDataset(tmp_path / "sums").lengths.tolist() == [2, 1]


def test_an_empty_dataset_is_legal(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "none", "uint16") as builder:
        builder.end_document()
    read = IndexedDataset(tmp_path / "none")
    assert (len(read), read.document_indices.tolist()) == (0, [0, 0])


def test_writer_dtype_rule() -> None:
    found = [writer_dtype(vocabulary).name for vocabulary in (257, 65499, 65500, 65536, None)]
    assert found == ["uint16", "uint16", "int32", "int32", "int32"]


def test_values_that_would_wrap_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"70000.*uint16"),
        IndexedDatasetBuilder(tmp_path / "wide", "uint16") as builder,
    ):
        builder.add_item([1, 70000])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_pair(prefix: str) -> None:
    before = {path.name: path.read_bytes() for path in Path(prefix).parent.iterdir()}
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(prefix, "uint16") as builder:
        builder.add_item([1, 2, 3])
        raise RuntimeError("the writer dies")
    with pytest.raises(ValueError, match="last end_document"):  # noqa: SIM117
        with IndexedDatasetBuilder(prefix, "uint16") as builder:
            builder.add_item([1, 2, 3])
    assert {p.name: p.read_bytes() for p in Path(prefix).parent.iterdir()} == before


def test_merge_equals_writing_at_once(tmp_path: Path) -> None:
    one = write_corpus(tmp_path / "one", SMALL[:2])
    two = write_corpus(tmp_path / "two", SMALL[2:])
    whole = write_corpus(tmp_path / "whole")
    with IndexedDatasetBuilder(tmp_path / "merged", "uint16") as builder:
        builder.add_index(one)
        builder.add_index(two)
    for suffix in ("bin", "idx"):
        merged = Path(f"{tmp_path}/merged.{suffix}").read_bytes()
        assert merged == Path(f"{whole}.{suffix}").read_bytes()
    wide = write_corpus(tmp_path / "wide", SMALL, "int32")
    with (
        pytest.raises(ValueError, match="int32"),
        IndexedDatasetBuilder(tmp_path / "bad", "uint16") as builder,
    ):
        builder.add_index(wide)


def test_all_item_types_round_trip(tmp_path: Path) -> None:
    for name in ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"):
        write_corpus(tmp_path / name, [[1, 2, 3]], name)
        read = IndexedDataset(tmp_path / name)
        assert (read.dtype.name, read[0].tolist()) == (name, [1, 2, 3])
    with pytest.raises(ValueError, match="complex64"):
        IndexedDatasetBuilder(tmp_path / "complex", np.complex64)
