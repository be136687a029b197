"""A run writes among checkpoints only where it goes on from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.training import documents, flags, train

QUICK = {"eval_iters": 0, "save_interval": 2}
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "run"
    assert train(flags(**QUICK, train_iters=4, save=folder)) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "which this run does not load: give --load "),
        ({"load": "@typo"}, "does not load (--load "),
        ({"load": "@run", "finetune": True}, "takes weights alone from "),
        ({"load": "@copy"}, "does not load, but "),
        ({"pretrained_checkpoint": "@run"}, "takes weights alone from "),
    ],
)
def test_a_used_folder_is_refused_and_left_as_it_was(
    changes: dict[str, object],
    said: str,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    shutil.copytree(saved, tmp_path / "copy")
    before = contents(tmp_path / "run")
    named = {
        name: tmp_path / str(value)[1:] if str(value).startswith("@") else value
        for name, value in changes.items()
    }
    words = flags(**QUICK, train_iters=4, save=tmp_path / "run", save_retain_interval=4, **named)
    assert train(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --save {tmp_path / 'run'} holds 2 checkpoints (2 to 4)")
    assert said in line and "--reuse-save-directory" in line
    assert contents(tmp_path / "run") == before


def test_a_lost_tracker_is_no_fresh_start(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run" / TRACKER).unlink()
    words = flags(**QUICK, train_iters=4, load=tmp_path / "run", save=tmp_path / "run")
    assert train(words) == 1
    error = capsys.readouterr().err
    assert f"give --load {tmp_path / 'run'} --ckpt-step N to continue that run" in error
    assert train([*words, "--ckpt-step", "4"]) == 0


def test_with_the_flag_only_ones_own_is_deleted(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    foreign = contents(tmp_path / "run" / "iter_0000004")
    (tmp_path / "run" / "notes.txt").write_text("kept")
    words = flags(eval_iters=0, train_iters=3, save=tmp_path / "run", save_interval=1)
    words += ["--save-retain-interval", "100", "--reuse-save-directory"]
    assert train(words) == 0
    text = capsys.readouterr().out
    assert "WARNING: --save" in text and "2 checkpoints (2 to 4) of another run" in text
    # Iteration 2 was replaced, iteration 1 retired, iteration 4 is not ours.
    kept = sorted(path.name for path in (tmp_path / "run").glob("iter_*"))
    assert kept == ["iter_0000002", "iter_0000003", "iter_0000004"]
    assert contents(tmp_path / "run" / "iter_0000004") == foreign
    assert (tmp_path / "run" / "notes.txt").read_text() == "kept"
    assert (tmp_path / "run" / TRACKER).read_text() == "3"
    runs = {n: documents(tmp_path / "run", n)["run"]["id"] for n in (2, 3, 4)}
    assert runs[2] == runs[3] != runs[4]


def test_a_run_keeps_its_name_and_goes_on_in_its_folder(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")  # the same folder by another name
    words = flags(**QUICK, train_iters=4, load=tmp_path / "link", save=tmp_path / "run")
    words += ["--ckpt-step", "2"]
    assert train(words) == 0
    text = capsys.readouterr().out
    assert "the run goes on from 2: the newer ones will be replaced" in text
    assert documents(saved, 4)["run"] == documents(tmp_path / "run", 4)["run"]
    first = (tmp_path / "run" / "config-1.json").read_text()
    assert first == (saved / "config.json").read_text()  # other flags: the old ones are kept


def test_a_missing_load_is_said_below_all_other_lines_of_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(**QUICK, train_iters=2, load=tmp_path / "no", save=tmp_path / "new")
    assert train(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith("WARNING: no checkpoint in")]
    assert "] iteration        1/" in lines[place + 1] or "symmetric" in lines[place + 1]


def test_scalars_of_another_run_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(eval_iters=0, train_iters=1, tensorboard_dir=tmp_path)
    assert train(words) == 0
    assert "holds the scalars of an earlier run" not in capsys.readouterr().out
    assert train([*words, "--seed", "5"]) == 0
    assert "holds the scalars of an earlier run" in capsys.readouterr().out
    assert (tmp_path / "config-1.json").exists()
