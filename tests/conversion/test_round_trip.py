"""Every family, both generations on disk: folder, checkpoint, folder; logits and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megamuon.checkpoint import RELEASE, CheckpointError, read_documents, read_index
from megamuon.conversion import FAMILIES
from tests.support.hugging_face import add_tokenizer
from tools.convert_checkpoint import to_ours, to_theirs
from tools.convert_trials import differences, folder_contents, our_model, same_bits
from tools.hf_folders import LLAMA3, write_folder

GENERATIONS = pytest.mark.parametrize("old", [True, False], ids=["release 4", "release 5"])


def round_trip(first: Path, scratch: Path, dtype: torch.dtype | None = None) -> Path:
    to_ours(first, scratch / "ours")
    to_theirs(scratch / "ours", scratch / "second", None, dtype)
    return scratch / "second"


@GENERATIONS
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_there_and_back(family: str, old: bool, tmp_path: Path) -> None:
    import transformers

    first = tmp_path / "first"
    theirs = write_folder(first, family, old=old, sharded=old)
    files = add_tokenizer(first)
    second = round_trip(first, tmp_path)
    theirs.save_pretrained(tmp_path / "original")  # the names of a save as it is by default
    assert same_bits(folder_contents(tmp_path / "original"), folder_contents(second))
    read = transformers.AutoConfig.from_pretrained
    found, expected = read(second).to_dict(), read(first).to_dict()
    for name in ("_name_or_path", "rope_theta", "rope_scaling", "torch_dtype", "num_experts"):
        found.pop(name, None), expected.pop(name, None)
    assert found == expected
    for name in (*files, "generation_config.json"):
        same = (second / name).read_bytes() == (first / name).read_bytes()
        assert same or name == "generation_config.json"
    again = transformers.AutoModelForCausalLM.from_pretrained(second)
    assert same_bits(dict(again.state_dict()), dict(theirs.state_dict()))
    logits, gradients = differences(theirs, our_model(second), family)
    assert max(logits, gradients) < 1e-5


def test_bf16_stays_bf16_and_a_dtype_is_cast(tmp_path: Path) -> None:
    first = tmp_path / "first"
    write_folder(first, "qwen2_moe", dtype=torch.bfloat16)
    second = round_trip(first, tmp_path)
    assert {tensor.dtype for tensor in folder_contents(second).values()} == {torch.bfloat16}
    assert json.loads((second / "config.json").read_text())["torch_dtype"] == "bfloat16"
    to_theirs(tmp_path / "ours", tmp_path / "wide", None, torch.float32)
    narrow, wide = folder_contents(second), folder_contents(tmp_path / "wide")
    assert all(torch.equal(tensor.float(), wide[key]) for key, tensor in narrow.items())


def test_llama_3_scaling_in_both_spellings(tmp_path: Path) -> None:
    first = tmp_path / "first"
    theirs = write_folder(first, "llama", old=True, rope_parameters=dict(LLAMA3))
    config = json.loads((round_trip(first, tmp_path) / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    assert config["rope_scaling"]["factor"] == config["rope_parameters"]["factor"] == 8.0
    logits, _ = differences(theirs, our_model(tmp_path / "second"), "llama")
    assert logits < 1e-5


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_tied_with_the_head_on_disk_too(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    first = tmp_path / "first"
    write_folder(first, family, old=True)
    tensors = load_file(first / "model.safetensors")
    table = next(tensors[key] for key in tensors if key.endswith(("wte.weight", "tokens.weight")))
    save_file({**tensors, "lm_head.weight": table.clone()}, first / "model.safetensors")
    assert same_bits(tensors, folder_contents(round_trip(first, tmp_path)))


def test_what_the_checkpoint_says(tmp_path: Path) -> None:
    write_folder(tmp_path / "first", "qwen3")
    files = add_tokenizer(tmp_path / "first")
    to_ours(tmp_path / "first", tmp_path / "ours")
    documents = read_documents(tmp_path / "ours", RELEASE)
    kept = {*files, "config.json", "generation_config.json"}  # these say ids of special tokens
    assert set(documents["hugging_face"]["tokenizer"]) == kept
    assert documents["args"]["tokenizer"]["tokenizer_type"] == "HuggingFaceTokenizer"
    assert "model.layers.1.self_attn.q_norm.weight" in read_index(tmp_path / "ours", RELEASE)
    (tmp_path / "ours" / "tokenizer" / files[0]).write_text("{}")
    with pytest.raises(CheckpointError, match="changed since the checkpoint was saved"):
        to_theirs(tmp_path / "ours", tmp_path / "second", None, None)
    assert not list(tmp_path.glob(".second*")) and not (tmp_path / "second").exists()


def test_shards_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tools.convert_checkpoint as tool

    write_folder(tmp_path / "first", "qwen2")
    to_ours(tmp_path / "first", tmp_path / "ours")
    export = tool.export_checkpoint

    def small(*words: Any, **options: Any) -> str:
        return export(*words, **options, shard_bytes=60_000)

    monkeypatch.setattr(tool, "export_checkpoint", small)
    to_theirs(tmp_path / "ours", tmp_path / "second", None, None)
    table = json.loads((tmp_path / "second" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "second").glob("*.safetensors")}
    assert set(table["weight_map"].values()) == files and len(files) > 2
    again = our_model(tmp_path / "second").state_dict()
    assert same_bits(dict(our_model(tmp_path / "first").state_dict()), dict(again))


def test_an_output_with_something_in_it_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "first", "qwen2")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        to_ours(tmp_path / "first", tmp_path / "ours")
