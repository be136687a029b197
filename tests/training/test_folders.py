"""Runs that start from a Hugging Face folder, and folders that a run must not pass over."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.hugging_face import add_tokenizer
from tests.support.training import documents, flags, train
from tools import generate
from tools.convert_checkpoint import to_theirs
from tools.convert_trials import our_model
from tools.hf_folders import write_folder

OF_FOLDER = {"model": None, "tokenizer_type": None, "eval_iters": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("folders") / "qwen3"
    write_folder(made, "qwen3", old=True, sharded=True)
    add_tokenizer(made)
    return made


def words(folder: Path, save: Path, **more: object) -> list[str]:
    """A run that takes everything that it can from the folder."""
    return flags(**{**OF_FOLDER, "load": folder, "save": save, "save_interval": 2, **more})


class Compared:
    """A forward step that also asks ``transformers`` for the loss of the same batch."""

    def __init__(self, theirs: nn.Module) -> None:
        self.theirs = theirs
        self.pairs: list[tuple[float, float]] = []

    def __call__(self, batches: Iterator[Any], model: nn.Module) -> tuple[torch.Tensor, Any]:
        import pretrain_gpt

        batch = next(batches)
        losses, loss_function = pretrain_gpt.forward_step(iter([batch]), model)
        with torch.no_grad():
            logits = self.theirs(batch["tokens"]).logits
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.pairs.append((losses.detach().mean().item(), expected.item()))
        return losses, loss_function


def test_first_loss_rerun_and_export(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    step = Compared(theirs)
    save = tmp_path / "save"
    assert train(words(folder, save, train_iters=2), step) == 0
    mine, expected = step.pairs[0]
    assert mine == pytest.approx(expected, abs=1e-5)
    output = capsys.readouterr().out
    assert f"loading Hugging Face folder from {folder}" in output
    assert "filled 24 of 24 weights" in output
    stored = documents(save, 2)
    assert stored["args"]["tokenizer"]["tokenizer_type"] == "HuggingFaceTokenizer"
    assert "tokenizer.json" in stored["hugging_face"]["tokenizer"]
    # The same command again goes on with what it has saved.
    more = ["--train-iters", "4", "--override-opt_param-scheduler"]
    assert train([*words(folder, save), *more]) == 0
    assert f"loading distributed checkpoint from {save} at iteration 2" in capsys.readouterr().out
    assert documents(save, 4)["counters"]["consumed_train_samples"] == 8
    assert "hugging_face" in documents(save, 4)
    to_theirs(save, tmp_path / "exported", None, None)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    ids = torch.arange(40).view(2, 20)
    difference = again(ids).logits - our_model(tmp_path / "exported")(ids)
    assert difference.abs().max() < 1e-5
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "exported").eos_token_id == 256


def test_the_kept_tokenizer_serves_where_the_folder_is_gone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "folder")
    assert train(words(tmp_path / "folder", tmp_path / "save", train_iters=2)) == 0
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "save").rename(tmp_path / "moved")
    sampled = ["--load", str(tmp_path / "moved"), "--prompt", "a", "--tokens", "2"]
    assert generate.main(sampled) == 0
    again = words(tmp_path / "moved", tmp_path / "moved", train_iters=2, use_checkpoint_args=True)
    assert train(again) == 0
    assert "at iteration 2" in capsys.readouterr().out


def test_pretrained_checkpoint_may_be_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"load": tmp_path, "pretrained_checkpoint": folder, "tokenizer_type": "byte"}
    assert train(words(folder, tmp_path, **given, train_iters=2)) == 0
    assert f"loading Hugging Face folder from {folder}" in capsys.readouterr().out
    assert documents(tmp_path, 2)["args"]["tokenizer"]["tokenizer_type"] == "byte"
    assert not (tmp_path / "tokenizer").exists()


def test_an_explicit_flag_wins_with_a_note(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(words(folder, tmp_path, norm_epsilon=1e-5, train_iters=2)) == 0
    output = capsys.readouterr().out
    assert "--norm-epsilon 1e-05: wins over" in output
    assert "the weights were trained with the former" in output


def test_its_own_folder_is_no_place_to_save(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(words(folder, folder)) == 1
    assert f"--save {folder} is the folder of --load" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "iter_1/mp_rank_00.pt", ".metadata"]
)
def test_weights_that_cannot_be_read_are_an_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "load" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(pickle.dumps(print))
    assert train(flags(load=tmp_path / "load", train_iters=1, eval_iters=0)) == 1
    assert f"holds {name}, and no checkpoint of this program" in capsys.readouterr().err


def test_logs_and_a_corpus_are_a_fresh_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("corpus.bin", "corpus.idx", "progress.txt"):
        (tmp_path / name).touch()
    (tmp_path / "iter_0000002.partial-00ff").mkdir()
    (tmp_path / "iter_0000002.partial-00ff" / "rank_00000.safetensors").touch()
    assert train(flags(load=tmp_path, train_iters=1, eval_iters=0)) == 0
    assert "WARNING: no checkpoint in --load" in capsys.readouterr().out


def test_a_bad_folder_is_a_usage_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(SystemExit) as caught:
        train(words(tmp_path, tmp_path / "save"))
    assert caught.value.code == 2
    assert "--load: " in capsys.readouterr().err
