"""tools/bench/equal_time.py: both optimizers get the same time, and the best rate counts."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from tools.bench import equal_time
from tools.bench.equal_time import Finished, compared, parse
from tools.bench.equal_time_ranks import Kept, Plan, Run, schedule_config

SMALL = "--models nano --steps 10 --rates 0.01,0.02 --seeds 2 --samples 2 --length 32 --blocks 2"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A sweep of ten steps on two ranks, and its folder."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("equal_time")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equal_time, "VALIDATION", 8)
        code = equal_time.main(arguments(folder))
    document = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    assert code == int(document["muon_over_adamw"]["nano"] > 1)
    return document, folder


def arguments(folder: Path) -> list[str]:
    words = f"{SMALL} --files 12 --runs {folder} --resume {folder}/kept.json"
    return [*words.split(), "--json", str(folder / "found.json")]


@pytest.mark.slow
def test_both_get_the_same_time(ran: tuple[dict[str, Any], Path]) -> None:
    document, _ = ran
    entry = document["models"]["nano"]
    times, muon, adamw = entry["step_time"], entry["muon"], entry["adamw"]
    assert (adamw["steps"], muon["steps"]) == (10, max(1, round(10 / times["muon_over_adamw"])))
    assert adamw["seconds"] == pytest.approx(10 * times["adamw_seconds"])
    step = times["adamw_seconds"] * times["muon_over_adamw"]
    assert muon["seconds"] == pytest.approx(muon["steps"] * step)
    assert abs(muon["seconds"] - adamw["seconds"]) <= step / 2 + 1e-9
    assert len(times["blocks"]["muon"]) == len(times["blocks"]["adamw"]) == 2
    assert times["ns_dtype"] in ("fp32", "bf16")


@pytest.mark.slow
def test_figures_are_those_of_the_runs(ran: tuple[dict[str, Any], Path]) -> None:
    document, folder = ran
    entry = document["models"]["nano"]
    for name in ("muon", "adamw"):
        own = entry[name]
        assert list(own["loss_by_rate"]) == ["0.01", "0.02"]
        assert own["loss_by_rate"][f"{own['best_rate']:g}"] == min(own["loss_by_rate"].values())
        assert own["losses"] == [curve[-1][1] for curve in own["curves"]]
        assert own["losses"][0] != own["losses"][1]  # other weights, other samples
        assert own["loss"] == pytest.approx(sum(own["losses"]) / 2)
        assert all(1 < loss < 2 * math.log(257) for loss in own["losses"])
    curve = entry["adamw"]["curves"][0]
    assert len(curve) == 10 and curve[0][1] > curve[-1][1]  # it has learnt something
    ratio = entry["muon"]["loss"] / entry["adamw"]["loss"]
    assert document["muon_over_adamw"] == {"nano": pytest.approx(ratio)}
    header = Path(document["png"]).read_bytes()[:24]
    assert Path(document["png"]) == folder / "found.png"
    assert header.startswith(b"\x89PNG") and min(struct.unpack(">II", header[16:])) > 400


@pytest.mark.slow
def test_a_sweep_that_was_ended_goes_on(ran: tuple[dict[str, Any], Path]) -> None:
    """With one run taken out of the file, that one is trained again, to the same loss."""
    document, folder = ran
    kept = json.loads((folder / "kept.json").read_text(encoding="utf-8"))
    ((settings, stored),) = kept.items()
    assert len(stored["runs"]) == 2 * (2 + 1)
    lost = stored["runs"].pop("adamw 0.01 0")
    for run in stored["runs"].values():
        run["kept"] = True
    (folder / "kept.json").write_text(json.dumps(kept), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equal_time, "VALIDATION", 8)
        equal_time.main(arguments(folder))
    again = json.loads((folder / "kept.json").read_text(encoding="utf-8"))[settings]["runs"]
    assert again["adamw 0.01 0"] == lost
    assert all(run.get("kept") for name, run in again.items() if name != "adamw 0.01 0")
    figures = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    assert figures["muon_over_adamw"] == document["muon_over_adamw"]


def run_of(optimizer: str, rate: float, seed: int, *losses: float) -> dict[str, Any]:
    curve = [[float(step), loss] for step, loss in enumerate(losses, 1)]
    return {"optimizer": optimizer, "rate": rate, "seed": seed, "steps": 2, "curve": curve}


def test_the_best_rate_of_the_first_seed_counts() -> None:
    runs = [
        run_of("muon", 1.0, 0, 5.0, 3.0),
        run_of("muon", 2.0, 0, 5.0, 2.0),
        run_of("muon", 4.0, 0, 1.0, math.nan),  # a run that broke is never the best
        run_of("muon", 2.0, 1, 5.0, 4.0),
        run_of("adamw", 1.0, 0, 5.0, 4.0),
        run_of("adamw", 2.0, 0, 5.0, 5.0),
        run_of("adamw", 1.0, 1, 5.0, 2.0),
    ]
    entry = compared(Finished(times={}, runs={str(i): run for i, run in enumerate(runs)}))
    assert (entry["muon"]["best_rate"], entry["adamw"]["best_rate"]) == (2.0, 1.0)
    assert entry["muon"]["best_is_at_the_edge"] is False
    assert entry["adamw"]["best_is_at_the_edge"] is True
    assert entry["muon"]["losses"] == [2.0, 4.0]
    assert entry["muon_over_adamw"] == 1.0
    assert entry["muon_over_adamw_by_seed"] == [0.5, 2.0]


def test_kept_work_is_taken_under_equal_settings_alone(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    first = Kept(path, {"steps": 10})
    first.times = {"adamw_seconds": 1.0}
    first.runs["muon 1 0"] = {"curve": []}
    first.write(rank=1)
    assert not path.exists()
    first.write(rank=0)
    other = Kept(path, {"steps": 20})
    assert other.times is None and other.runs == {}
    other.write(rank=0)
    assert Kept(path, {"steps": 10}).runs == first.runs


def test_both_have_one_shape_of_schedule() -> None:
    plan = Plan(ranks=2, line="D", seeds=1, samples=8, length=16, validation=8, blocks=1)
    found = [
        schedule_config(
            Run(optimizer=name, rate=0.1, seed=0, steps=50, seconds=1.0, ns_dtype="fp32"), plan
        )
        for name in ("muon", "adamw")
    ]
    assert found[0] == found[1]
    assert (found[0].warmup_steps, found[0].decay_steps) == (5 * 8, 50 * 8)
    assert found[0].min_lr == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--models gpt2", "choose of tiny,nano"),
        ("--models nano,nano", "choose of"),
        ("--rates x", "give numbers"),
        ("--samples 7", "a multiple of --ranks"),
        ("--seeds 0", "at least 1"),
        ("--steps 20", "a number of 10 or more for each of --models"),
        ("--models nano --steps 9", "10 or more"),
    ],
)
def test_bad_flags(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(words.split())
    assert message in capsys.readouterr().err


def test_five_rates_of_each_by_default() -> None:
    for rates in equal_time.RATES.values():
        assert all(len(set(own)) == 5 for own in rates.values())
    pytest.importorskip("matplotlib")
    options = parse(["--json", "a/b.json"])
    assert options.png == Path("a/b.png")
    assert options.steps == {"tiny": 120, "nano": 300}
