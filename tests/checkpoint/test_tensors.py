"""Pieces and the index: what is refused, and that the index survives JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megamuon.checkpoint.chunks import Chunk
from megamuon.checkpoint.ranks import CheckpointError
from megamuon.checkpoint.tensors import (
    Piece,
    TensorEntry,
    index_from_json,
    index_to_text,
    listed,
    widens,
)
from tests.support.pieces import stored

SOURCE = Path("tensors.json")


def _index() -> dict[str, TensorEntry]:
    halves = tuple(
        Piece(chunk=Chunk((start, 0), (2, 3)), file=f"f{start}", key=f"w@{start},0")
        for start in (0, 2)
    )
    scalar = (Piece(chunk=Chunk((), ()), file="f0", key="s"),)
    return {
        "w": TensorEntry(shape=(4, 3), dtype=torch.float32, pieces=halves),
        "s": TensorEntry(shape=(), dtype=torch.int64, pieces=scalar),
    }


def test_the_index_survives_json() -> None:
    value = json.loads(index_to_text(_index()))
    assert index_from_json(value, SOURCE, {"f0": 1, "f2": 1}) == _index()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": []}, "tensor w of shape .4, 3.: no rank saved the elements .0:4, 0:3."),
        ({"shape": [2, 3]}, "tensor w: piece .2:4, 0:3. lies outside"),
        ({"dtype": "F31"}, "tensor w: malformed entry"),
        ({"shape": None}, "tensor w: malformed entry"),
    ],
)
def test_a_bad_index_names_file_and_tensor(change: dict[str, Any], message: str) -> None:
    value = json.loads(index_to_text(_index()))
    value["tensors"]["w"].update(change)
    with pytest.raises(CheckpointError, match=f"tensors.json: {message}"):
        index_from_json(value, SOURCE, {"f0": 1, "f2": 1})


def test_a_file_that_the_manifest_does_not_list_is_refused() -> None:
    with pytest.raises(CheckpointError, match="tensor w lies in f2, which the manifest does not"):
        index_from_json(json.loads(index_to_text(_index())), SOURCE, {"f0": 1})


def test_pieces_that_cannot_be_stored() -> None:
    with pytest.raises(CheckpointError, match=r"tensor w: a piece .* does not lie inside"):
        stored("w", torch.zeros(2, 3), (3, 0), (4, 3)).check()
    with pytest.raises(CheckpointError, match=r"tensor w: dtype torch.complex64 cannot be stored"):
        stored("w", torch.zeros(2, dtype=torch.complex64)).check()


def test_long_lists_are_cut() -> None:
    assert listed(["b", "a"]) == "a, b"
    assert listed([str(n) for n in range(8)]) == "0, 1, 2, 3, 4 and 3 more"


def test_only_what_keeps_every_number_widens() -> None:
    half, brain, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    for saved, wanted in ((brain, single), (half, single), (single, double), (single, single)):
        assert widens(saved, wanted)
    for saved, wanted in (
        (single, brain),
        (double, single),
        (half, brain),
        (brain, half),
        (torch.int32, single),
        (torch.int32, torch.int64),
    ):
        assert not widens(saved, wanted)


def test_holders_of_a_piece_share_its_rows() -> None:
    whole = torch.arange(20.0).reshape(10, 2)
    piece = stored("w", whole[3:8], (3, 0), (10, 2))
    shares = [piece.share(place, 3) for place in range(3)]
    assert [(s.offset, s.shape, s.data.tolist()) for s in shares if s is not None] == [
        ((3, 0), (10, 2), whole[3:5].tolist()),
        ((5, 0), (10, 2), whole[5:7].tolist()),
        ((7, 0), (10, 2), whole[7:8].tolist()),
    ]
    assert shares[0].data.data_ptr() == whole[3:].data_ptr()  # a view: nothing is copied
    assert piece.share(3, 4) is None and piece.share(0, 1) is piece
    scalar = stored("s", torch.tensor(1.0))
    assert scalar.share(0, 3) is scalar and scalar.share(1, 3) is None
