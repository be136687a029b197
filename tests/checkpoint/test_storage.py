"""Data files: plain safetensors, cut at a size, one tensor in memory at a time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from megamuon.checkpoint.dcp_planner import PieceSavePlanner
from megamuon.checkpoint.files import write_durably
from megamuon.checkpoint.storage import PieceWriter, file_blocks
from megamuon.checkpoint.tensors import INDEX
from tests.support.pieces import stored, wholes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _write(directory: Path, pieces: list, **options: int) -> PieceWriter:
    writer = PieceWriter(directory, 3, **options)
    dcp.save({}, storage_writer=writer, planner=PieceSavePlanner(pieces), no_dist=True)
    return writer


def test_whole_tensors_are_plain_safetensors_under_their_own_names(tmp_path: Path) -> None:
    _write(tmp_path, [stored(name, data) for name, data in wholes().items()])
    found = load_file(tmp_path / "rank_00003.safetensors")
    expected = {name: data for name, data in wholes().items() if data.numel()}
    assert found.keys() == expected.keys()
    for name, data in expected.items():
        assert found[name].dtype == data.dtype and torch.equal(found[name], data)


def test_slices_of_one_tensor_in_one_file_have_keys_of_their_own(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    _write(tmp_path, [stored("w", whole[i : i + 2], (i, 0), (4, 3)) for i in (0, 2)])
    with safe_open(tmp_path / "rank_00003.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["w@0,0", "w@2,0"]
        assert torch.equal(file.get_tensor("w@2,0"), whole[2:])


def test_a_rank_with_much_data_writes_several_files(tmp_path: Path) -> None:
    pieces = [stored(f"w{i}", torch.full((10,), float(i))) for i in range(5)]
    writer = _write(tmp_path, pieces, file_bytes=80)
    data = ["rank_00003.safetensors", "rank_00003_001.safetensors", "rank_00003_002.safetensors"]
    assert [record.name for record in writer.records] == [*data, INDEX]
    assert sorted(load_file(tmp_path / data[1])) == ["w2", "w3"]


def test_a_rank_with_nothing_writes_no_data_file(tmp_path: Path) -> None:
    _write(tmp_path, [stored("empty", torch.zeros(0, 4))])
    assert [path.name for path in tmp_path.iterdir()] == [INDEX]


def test_a_tensor_is_let_go_before_the_next_is_made(tmp_path: Path) -> None:
    """What bounds the memory of a conversion, through both the stream and the writer."""
    living: list[weakref.ref[np.ndarray]] = []

    def tensors() -> Iterator[torch.Tensor]:
        for _ in range(4):
            until = (
                time.monotonic() + 5
            )  # the thread that hashes has the last bytes a little longer
            while any(ref() is not None for ref in living) and time.monotonic() < until:
                time.sleep(0.001)
            assert not any(ref() is not None for ref in living)
            array = np.zeros((300, 1000), dtype=np.float32)
            living[:] = [weakref.ref(array)]
            yield torch.from_numpy(array)
            del array

    entries = [(f"t{number}", torch.float32, (300, 1000)) for number in range(4)]
    write_durably(tmp_path / "a.safetensors", file_blocks(entries, tensors()))
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.get_tensor("t3").shape == (300, 1000)
