"""A resume goes on with what the checkpoint was trained with, or names what differs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megamuon.data.indexed import IndexedDatasetBuilder
from tests.support.training import Recorded, documents, flags, train

QUICK = {"eval_iters": 0, "save_interval": 2, "global_batch_size": 4}


def corpus(prefix: Path, seed: int = 0, documents: int = 60) -> str:
    draw = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(str(prefix), dtype=np.uint16)
    for _ in range(documents):
        builder.add_document(draw.integers(0, 255, 16).astype(np.uint16), [16])
    builder.finalize()
    return str(prefix)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("checks")
    shared = {**QUICK, "data_path": corpus(folder / "corpus"), "split": "9,1,0", "train_iters": 4}
    assert train(flags(**shared, save=folder / "run", exit_interval=2)) == 0
    return folder, {**shared, "load": folder / "run", "save_interval": None}


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert train(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_everything_that_differs_is_named_at_once(
    saved: tuple[Path, dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, shared = saved
    changes = {"seed": 5, "seq_length": 8, "rotary_base": 500, "norm_epsilon": 1e-3}
    changes |= {"use_rope_scaling": True, "muon_momentum_form": "ema", "clip_grad": 2.0}
    line = refusal(flags(**{**shared, **changes}), capsys)
    assert line.startswith(f"error: {folder / 'run'} iteration 2 does not fit the flags: ")
    for part in (
        "seed is 1234 in the checkpoint and 5 here (--seed)",
        "seq_length is 16 in the checkpoint and 8 here",
        "rotary_base is 10000 in the checkpoint and 500 here",
        " in the checkpoint and 0.001 here (--norm-epsilon)",
        "use_rope_scaling is False",
        "muon_momentum_form is 'sgd' in the checkpoint and 'ema' here",
        "--override-checkpoint-args rotary_base use_rope_scaling layernorm_epsilon seq_length seed",
    ):
        assert part in line, part


def test_another_corpus_split_or_tokenizer_is_named(
    saved: tuple[Path, dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shared = saved
    other = corpus(tmp_path / "other", seed=1)
    line = refusal(flags(**{**shared, "data_path": other}), capsys)
    assert "the training data is another one: corpora[0].tokens_sha256" in line
    assert "--override-checkpoint-args data_path" in line
    line = refusal(flags(**{**shared, "split": "8,2,0"}), capsys)
    assert "corpora[0].sequences [0, 54] in the checkpoint, [0, 48] here" in line
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": 256}
    words = flags(**{**shared, **null}) + ["--override-checkpoint-args", "tokenizer_type"]
    line = refusal(words, capsys)
    assert "the tokenizer is another one: " in line and "tokenizer_model" in line


def test_a_moved_corpus_is_taken(
    saved: tuple[Path, dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, shared = saved
    for end in ("bin", "idx"):
        (tmp_path / f"moved.{end}").write_bytes((folder / f"corpus.{end}").read_bytes())
    step = Recorded()
    assert train(flags(**{**shared, "data_path": tmp_path / "moved"}), step) == 0
    same = Recorded()
    assert train(flags(**shared), same) == 0
    assert step.losses == same.losses


def test_an_override_names_what_it_allows_and_new_data_begins_anew(
    saved: tuple[Path, dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shared = saved
    other = corpus(tmp_path / "other", seed=1)
    changes = {"data_path": other, "clip_grad": 2.0, "save": tmp_path / "run", "save_interval": 1}
    words = flags(**{**shared, **changes}) + ["--override-checkpoint-args", "clip_grad"]
    assert "data_path to go on" in refusal(words, capsys)
    step, fresh = Recorded(), Recorded()
    assert train([*words, "data_path"], step) == 0
    text = capsys.readouterr().out
    assert "note: clip_grad is 1.0 in the checkpoint and 2.0 here (--clip-grad), by" in text
    assert "note: another training data than the checkpoint's (corpora[0].tokens" in text
    alone = {**QUICK, "data_path": other, "split": "9,1,0", "train_iters": 2}
    assert train(flags(**{**alone, "save_interval": None}), fresh) == 0
    assert step.first_tokens[True] == fresh.first_tokens[True]
    order = documents(tmp_path / "run", 3)["counters"]["train_order"]
    assert (order["start"], order["requests"]) == (8, [8])
    # The flag may stay: the next launch goes on where the new data stood.
    later = flags(**{**shared, **changes, "load": tmp_path / "run", "ckpt_step": 3})
    again = Recorded()
    assert train([*later, "--override-checkpoint-args", "clip_grad", "data_path"], again) == 0
    assert again.first_tokens[True] == step.first_tokens[True][2:]


def test_weights_alone_are_taken_with_a_warning_about_their_meaning(
    saved: tuple[Path, dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, shared = saved
    changes = {"finetune": True, "rotary_base": 500, "seed": 5}
    assert train(flags(**{**shared, **changes})) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("WARNING")]
    assert "rotary_base is 10000 in the checkpoint and 500 here" in line


def test_a_longer_run_draws_every_sample_before_any_comes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """54 samples in an epoch; a run of 32 that is made longer twice."""
    shared = {**QUICK, "data_path": corpus(tmp_path / "c"), "split": "9,1,0", "save_interval": 8}
    seen: list[int] = []
    for length in (8, 13, 27):
        step = Recorded()
        words = flags(**{**shared, "train_iters": length}, save=tmp_path / "run")
        words += ["--load", str(tmp_path / "run"), "--override-opt_param-scheduler"]
        assert train(words, step) == 0
        seen += step.first_tokens[True]
    assert documents(tmp_path / "run", 27)["counters"]["train_order"]["requests"] == [32, 52, 108]
    # 108 samples in micro-batches of two: 27 of them are an epoch.
    assert len(seen) == 54
    assert max(Counter(seen[:26]).values()) == 1
