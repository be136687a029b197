"""Which checkpoint a run starts from, and with what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamuon.training import read_checkpoint_args
from tests.support.training import (
    Recorded,
    documents,
    flags,
    same_bits,
    stored_tensors,
    train,
)

QUICK = {"eval_iters": 0, "save_interval": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert train(flags(**QUICK, train_iters=4, save=folder, global_batch_size=4)) == 0
    return folder


def test_documents_are_plain_and_complete(saved: Path) -> None:
    found = documents(saved, 4)
    assert {"args", "counters", "schedule", "plan", "rng"} <= set(found)
    assert found["counters"]["consumed_train_samples"] == 16
    assert found["counters"]["floating_point_operations"] > 0
    assert found["schedule"]["num_steps"] == 16
    assert found["args"]["model"]["num_layers"] == 3
    assert not list((saved / "iter_0000004").glob("*.pt"))


def test_a_missing_checkpoint_starts_from_random_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(flags(**{**QUICK, "save_interval": None}, train_iters=1, load=tmp_path)) == 0
    assert "WARNING: no checkpoint in --load" in capsys.readouterr().out


def test_finetune_takes_weights_only(saved: Path, tmp_path: Path) -> None:
    words = flags(**QUICK, train_iters=2, load=saved, finetune=True, save=tmp_path, lr=1e-30)
    assert train(words) == 0
    assert documents(tmp_path, 2)["counters"]["consumed_train_samples"] == 4
    close(stored_tensors(saved, 4), stored_tensors(tmp_path, 2))


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """The weights are those of the checkpoint, since the learning rate was nothing."""
    weights = [name for name in first if not name.startswith("optimizer.")]
    assert weights
    for name in weights:
        torch.testing.assert_close(first[name], second[name], rtol=1e-6, atol=1e-9)


def test_pretrained_checkpoint_counts_only_while_load_is_empty(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(
        **QUICK,
        train_iters=2,
        pretrained_checkpoint=saved,
        load=tmp_path,
        save=tmp_path,
        lr=1e-30,
    )
    assert train(words) == 0
    assert f" loading distributed checkpoint from {saved} at" in capsys.readouterr().out
    close(stored_tensors(saved, 4), stored_tensors(tmp_path, 2))
    longer = ["--train-iters", "4", "--override-opt_param-scheduler"]
    assert train([*words, *longer]) == 0
    assert f"loading distributed checkpoint from {tmp_path} at" in capsys.readouterr().out


def test_an_older_step_and_no_optimizer(saved: Path, tmp_path: Path) -> None:
    step = Recorded()
    words = flags(
        **QUICK,
        train_iters=4,
        global_batch_size=4,
        load=saved,
        ckpt_step=2,
        no_load_optim=True,
        no_load_rng=True,
        save=tmp_path,
    )
    assert train(words, step) == 0
    assert len(step.losses) == 4  # iterations 3 and 4
    assert documents(tmp_path, 4)["schedule"]["num_steps"] == 8  # the schedule began anew
    assert same_bits(stored_tensors(saved, 4), stored_tensors(tmp_path, 4)) != []


def test_without_optimizer_state_a_resume_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {**QUICK, "save": tmp_path, "no_save_optim": True, "no_save_rng": True}
    assert train(flags(**shared, train_iters=2)) == 0
    assert not [name for name in stored_tensors(tmp_path, 2) if name.startswith("optimizer.")]
    assert train(flags(**shared, train_iters=4, load=tmp_path)) == 1
    assert "add --no-load-optim" in capsys.readouterr().err
    assert train(flags(**shared, train_iters=4, load=tmp_path, no_load_optim=True)) == 0


def test_an_architecture_of_the_same_shapes_and_another_meaning_is_refused(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(
        **{**QUICK, "save_interval": None}, train_iters=4, global_batch_size=4, load=saved
    )
    assert train([*words, "--apply-layernorm-1p", "--rotary-percent", "0.5"]) == 1
    text = capsys.readouterr().err
    assert "layernorm_zero_centered_gamma is False in the checkpoint and True here" in text
    assert "rotary_percent is 1.0 in the checkpoint and 0.5 here" in text


def test_schedule_modes_on_resume(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {**QUICK, "train_iters": 6, "global_batch_size": 4, "load": saved, "lr": 5e-3}
    assert train(flags(**shared, save=tmp_path / "c")) == 1
    error = capsys.readouterr().err
    assert "max_lr is 0.01 in the checkpoint and 0.005 in the configuration" in error
    over = flags(**shared, save=tmp_path / "a") + ["--override-opt_param-scheduler"]
    assert train(over) == 0
    assert documents(tmp_path / "a", 6)["schedule"]["max_lr"] == 5e-3
    stored = flags(**shared, save=tmp_path / "b") + ["--use-checkpoint-opt_param-scheduler"]
    assert train(stored) == 0
    assert documents(tmp_path / "b", 6)["schedule"]["max_lr"] == 1e-2


def test_retain_interval_and_a_failed_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(**{**QUICK, "save_interval": 1}, train_iters=3, save=tmp_path / "ck")
    assert train([*words, "--save-retain-interval", "2"]) == 0
    kept = sorted(path.name for path in (tmp_path / "ck").glob("iter_*"))
    assert kept == ["iter_0000002", "iter_0000003"]

    def block(call: int, training: bool, losses: torch.Tensor) -> torch.Tensor:
        if call == 1:  # a file where the directory of checkpoints should be
            (tmp_path / "no" / "config.json").unlink()
            (tmp_path / "no").rmdir()
            (tmp_path / "no").write_text("")
        return losses

    blocked = flags(**QUICK, train_iters=2, save=tmp_path / "no", save_failure="warn")
    assert train(blocked, Recorded(block)) == 0
    assert "going on (--save-failure warn)" in capsys.readouterr().out
    (tmp_path / "no").unlink()
    blocked[blocked.index("warn")] = "fatal"
    assert train(blocked, Recorded(block)) == 1


def test_checkpoint_arguments_fill_the_model(saved: Path, tmp_path: Path) -> None:
    stored = read_checkpoint_args(str(saved), None)
    assert stored is not None
    assert stored["model"]["hidden_size"] == 50
    assert read_checkpoint_args(str(tmp_path), None) is None
    words = flags(
        model=None,
        tokenizer_type=None,
        load=saved,
        use_checkpoint_args=True,
        train_iters=6,
        global_batch_size=4,
        eval_iters=0,
    )
    words += ["--owner-unit-threshold", "2000", "--override-opt_param-scheduler"]
    step = Recorded()
    assert train(words, step) == 0
    assert len(step.losses) == 4  # iterations 5 and 6
