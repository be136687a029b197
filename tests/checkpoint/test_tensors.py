"""Pieces and the index: what is refused, and that the index survives JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megamuon.checkpoint.boxes import Box
from megamuon.checkpoint.ranks import CheckpointError
from megamuon.checkpoint.tensors import (
    Piece,
    TensorEntry,
    index_from_json,
    index_to_text,
    listed,
)
from tests.support.pieces import stored

SOURCE = Path("tensors.json")


def _index() -> dict[str, TensorEntry]:
    halves = tuple(
        Piece(box=Box((start, 0), (2, 3)), file=f"f{start}", key=f"w@{start},0") for start in (0, 2)
    )
    scalar = (Piece(box=Box((), ()), file="f0", key="s"),)
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
