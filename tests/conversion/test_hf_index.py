"""Folders that are not as they should be: one line each, and no pickle is opened."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamuon.checkpoint.tensors import TensorEntry
from megamuon.conversion import ConversionError
from megamuon.conversion.tensor_file import Reader, read_header
from tests.support.hugging_face import add_tokenizer, change_config
from tools.convert_checkpoint import to_ours
from tools.hf_folders import write_folder

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    write_folder(root / "sharded", "qwen2", old=True, sharded=True)
    write_folder(root / "single", "llama", old=True)
    write_folder(root / "tied", "qwen2", old=True)
    write_folder(root / "fused", "qwen3_moe")
    return root


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    table = json.loads((folder / INDEX).read_text())
    change(table["weight_map"])
    (folder / INDEX).write_text(json.dumps(table))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def missing_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].unlink()


def outside(folder: Path) -> None:
    change_index(folder, lambda table: table.update({"model.norm.weight": "../x.safetensors"}))


def twice_in_index(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    line = '"model.norm.weight": "model-00001-of-00009.safetensors",'
    (folder / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {' + line))


def twice_in_files(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    save_file({**load_file(first), **load_file(second)}, second)


def cut(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:-100])


def cut_in_header(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:30])


def other_head(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"lm_head.weight": torch.zeros(260, 48)}))


def no_head(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop("lm_head.weight"))


def no_weight(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop("model.norm.weight"))


def one_more(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"model.extra.weight": torch.zeros(2)}))


def other_shape(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"model.norm.weight": torch.zeros(47)}))


def quantized(folder: Path) -> None:
    norm = {"model.norm.weight": torch.zeros(48, dtype=torch.int8)}
    change_tensors(folder, lambda t: t.update(norm))


def few_rows(folder: Path) -> None:
    add_tokenizer(folder, tokens=300)


def fewer_experts(folder: Path) -> None:
    change_config(folder, lambda config: config.update({"num_local_experts": 3}))
    gates = {f"model.layers.{layer}.mlp.gate.weight": torch.zeros(3, 48) for layer in range(2)}
    change_tensors(folder, lambda t: t.update(gates))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("form", "harm", "message"),
    [
        ("sharded", missing_file, "is missing: model.safetensors.index.json lists it"),
        ("sharded", outside, r"'../x.safetensors': not a plain file name"),
        ("sharded", twice_in_index, "'model.norm.weight' stands there twice"),
        ("sharded", twice_in_files, "lies in model-00001-.* and in model-00002-"),
        ("single", cut, "cannot be read as safetensors: its header promises"),
        ("single", cut_in_header, "30 bytes, too short for its header"),
        ("tied", other_head, "tie_word_embeddings is true, and lm_head.weight is another table"),
        ("single", no_head, "tie_word_embeddings is false, and no file holds lm_head.weight"),
        ("single", no_weight, "holds nothing for model.norm.weight"),
        ("single", one_more, "holds model.extra.weight, which the model has no place for"),
        ("single", other_shape, r"model.norm.weight has shape \[47\], which does not fit"),
        ("single", quantized, "model.norm.weight is I8"),
        ("single", few_rows, "has 260 rows, and the tokenizer's highest id is 299"),
        ("fused", fewer_experts, r"experts.down_proj \(a part of it\)"),
        ("single", no_config, "no model_type"),
    ],
)
def test_one_line(
    folders: Path, tmp_path: Path, form: str, harm: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(folders / form, tmp_path / "folder")
    harm(tmp_path / "folder")
    with pytest.raises(ConversionError, match=message) as caught:
        to_ours(tmp_path / "folder", tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ours").exists()


class _Planted:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", SINGLE, "config.json"])
def test_a_planted_pickle_never_runs(folders: Path, tmp_path: Path, name: str) -> None:
    folder, trace = tmp_path / "folder", tmp_path / "trace"
    shutil.copytree(folders / "single", folder)
    (folder / SINGLE).unlink()
    (folder / name).write_bytes(pickle.dumps(_Planted(trace)))
    with pytest.raises(ConversionError) as caught:
        to_ours(folder, tmp_path / "ours")
    if name.endswith((".bin", ".pt")):
        assert "pickled weights are never loaded" in str(caught.value)
    assert not trace.exists()


def test_rows_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megamuon.checkpoint.chunks import Chunk
    from megamuon.checkpoint.tensors import Piece, View

    monkeypatch.setattr("megamuon.conversion.tensor_file.BLOCK", 100)
    stored = torch.arange(2 * 30 * 40.0).view(2, 30, 40)
    save_file({"x": stored}, tmp_path / "a.safetensors")
    assert read_header(tmp_path / "a.safetensors")["x"].shape == (2, 30, 40)
    for transpose, shape in ((False, (10, 40)), (True, (10, 30))):
        view = View(lead=1, start=15, transpose=transpose)
        piece = Piece(chunk=Chunk((0, 0), shape), file="a.safetensors", key="x", view=view)
        entry = TensorEntry(shape=shape, dtype=torch.float32, pieces=(piece,))
        assert torch.equal(Reader(tmp_path).tensor(entry), view.inside(stored, 10))
