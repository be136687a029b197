"""tools/bench/long_run.py: it compares what it says, and its exit code follows the figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import long_run
from tools.pretrain_default import Machine, Settings, training_flags

SMALL = ["--ranks", "2", "--steps", "6", "--samples", "4", "--length", "16", "--files", "12"]


def options(*more: str) -> Any:
    return long_run.parse([*SMALL, *more])


def made_up(losses: dict[str, list[float]], weight: float = 1e-3) -> dict[str, Any]:
    """What ranks would return for these losses."""
    return {
        name: {
            "line": name[0],
            "losses": values,
            "seconds": 1.0,
            "clipped_steps": 0,
            "weight_difference": weight,
        }
        for name, values in losses.items()
    }


BASE = [5.0, 4.0, 3.0, 2.0, 2.0, 2.0]
SECOND = [5.0 * 1.02, *(value * 1.01 for value in BASE[1:])]
OTHER_SEED = f"B, seed {long_run.SECOND_SEED}"


@pytest.mark.slow
def test_lines_train_alike_and_seeds_do_not(tmp_path: Path) -> None:
    target, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    drawn = ["--png", str(picture)] if long_run_can_draw() else []
    arguments = [*SMALL, "--runs", str(tmp_path), "--json", str(target), *drawn]
    assert long_run.main(arguments) == 0
    document = json.loads(target.read_text(encoding="utf-8"))
    assert set(document["runs"]) == {"B", "C", OTHER_SEED}
    for run in document["runs"].values():
        assert len(run["losses"]) == 6
        assert run["losses"][-1] < run["losses"][0]
        assert run["skipped_steps"] == 0
    entry = document["lines"]["C"]
    assert entry["first_loss_identical"]
    assert entry["largest_relative_difference"] < 1e-4
    assert entry["final_weight_difference"] < 1e-2
    assert document["seeds"]["median_relative_difference"] > 1e-4
    assert not document["seeds"]["first_loss_identical"]
    assert document["ratio"] == entry["ratio"] < long_run.LIMIT
    assert not drawn or picture.stat().st_size > 10_000


def long_run_can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def test_the_ratio_is_of_medians_without_step_zero() -> None:
    runs = long_run.runs_of(options())
    ours = [5.0, 4.0 * 1.001, 3.0, 2.0 * 0.998, 2.0 * 1.003, 2.0 * 1.5]
    found = made_up({"B": BASE, "C": ours, OTHER_SEED: SECOND})
    document = long_run.document_of(runs, found)
    entry = document["lines"]["C"]
    assert entry["median_relative_difference"] == pytest.approx(0.002)
    assert document["seeds"]["median_relative_difference"] == pytest.approx(0.01)
    assert document["ratio"] == pytest.approx(0.2)
    assert entry["first_loss_identical"] and entry["first_step_that_differs"] == 1
    assert entry["steps_identical"] == 2 and not entry["bit_for_bit"]


@pytest.mark.parametrize(("factor", "code"), [(1.0009, 0), (1.0011, 1)])
def test_the_exit_code_says_whether_the_limit_holds(
    factor: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [value * factor for value in BASE]
    found = made_up({"B": BASE, "C": ours, OTHER_SEED: SECOND})
    monkeypatch.setattr(long_run, "corpus", lambda options: None)
    monkeypatch.setattr(long_run, "run_bench_ranks", lambda *_, **__: [found, found])
    assert long_run.main(SMALL) == code


def test_equal_lines_are_called_equal(capsys: pytest.CaptureFixture[str]) -> None:
    runs = long_run.runs_of(options())
    found = made_up({"B": BASE, "C": list(BASE), OTHER_SEED: SECOND}, weight=0.0)
    document = long_run.document_of(runs, found)
    assert document["ratio"] == 0
    long_run.print_report(document)
    assert "line C is B bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["C", OTHER_SEED])
def test_nothing_is_concluded_from_losses_that_are_not_finite(name: str) -> None:
    losses = {"B": BASE, "C": list(BASE), OTHER_SEED: SECOND}
    losses[name] = [*losses[name][:-1], float("nan")]
    with pytest.raises(ValueError, match=f"run {name}: a loss is not finite"):
        long_run.document_of(long_run.runs_of(options()), made_up(losses))


def test_nothing_is_concluded_from_seeds_that_do_not_differ() -> None:
    found = made_up({"B": BASE, "C": list(BASE), OTHER_SEED: list(BASE)})
    with pytest.raises(ValueError, match="take another --seed"):
        long_run.document_of(long_run.runs_of(options()), found)


def test_runs_differ_by_line_or_by_seed_alone() -> None:
    flags = ["--ranks", "4", "--sharding", "hsdp", "--shard-size", "2", "--lines", "B,C"]
    first, other, second = long_run.runs_of(options(*flags[:-1], "B,D"))
    assert replace(other.case, line="B") == first.case and other.name == "D"
    first, other, second = long_run.runs_of(options(*flags))
    assert (first.case.replicas, first.case.shards) == (2, 2)
    assert replace(other.case, line="B") == first.case
    training = replace(second.case.training, seed=first.case.training.seed)
    assert replace(second.case, training=training) == first.case
    assert first.case.training.dtype == torch.float32


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--lines", "B"], "two or more of A,B,C,D,M"),
        (["--lines", "B,X"], "two or more"),
        (["--lines", "A,C"], "--optimizer adam"),
        (["--ranks", "3"], "--samples 4"),
        (
            ["--ranks", "4", "--sharding", "hsdp", "--lines", "B,M"],
            "line M is owners on one replica",
        ),
        (["--shard-size", "1"], "goes with --sharding hsdp"),
        (["--steps", "4"], "5 or more"),
        (["--seed", str(long_run.SEED)], "take another"),
    ],
)
def test_runs_that_do_not_exist_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(SystemExit, match=problem):
        long_run.main([*SMALL, *flags])


def test_the_schedule_is_the_main_jobs() -> None:
    job = Settings(steps=300)
    flags = training_flags(Path("run"), "data", Machine(ranks=2, gpu=False), job)
    given = dict(zip(flags, flags[1:], strict=False))
    run = long_run.runs_of(long_run.parse(["--steps", "300"]))[0]
    training = run.case.training
    config = long_run.schedule_config(training)
    batch = int(given["--global-batch-size"])
    assert (training.batch, training.length) == (batch, int(given["--seq-length"]))
    assert (config.max_lr, config.min_lr) == (float(given["--lr"]), float(given["--min-lr"]))
    assert config.style == given["--lr-decay-style"]
    assert config.warmup_steps == int(given["--lr-warmup-iters"]) * batch
    assert config.decay_steps == 300 * batch
    assert config.start_wd == config.end_wd == float(given["--weight-decay"])
    assert given["--split"] == long_run.SPLIT
