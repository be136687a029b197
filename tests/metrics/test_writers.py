"""Scalars: names, steps, pairs; destinations that work alone; clear errors."""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megamuon.metrics.log_line import LogRecord
from megamuon.metrics.writers import MetricsWriter, WriterError, build_writer

RECORD = LogRecord(
    iteration=7,
    train_iterations=10,
    consumed_samples=112,
    skipped_samples=16,
    milliseconds_per_iteration=250.0,
    tflops_per_gpu=1.5,
    learning_rate=1e-3,
    global_batch_size=16,
    losses={"lm loss": 2.0},
    grad_norm=0.5,
    zeros_in_grad=3,
    params_norm=4.0,
    extra={"muon-update-rms": 0.2, "note": "text"},
)
PAIRED = {
    "batch-size": 16,
    "lm loss": 2.0,
    "learning-rate": 1e-3,
    "loss-scale": 1.0,
    "grad-norm": 0.5,
    "num-zeros": 3,
    "params-norm": 4.0,
    "muon-update-rms": 0.2,
}


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int, int | None]] = []

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        self.calls.append((dict(values), iteration, samples))

    def config(self, values: Mapping[str, Any]) -> None:
        self.calls.append((dict(values), -1, None))

    def close(self) -> None:
        self.calls.append(({}, -2, None))


def test_training_scalars_and_their_steps() -> None:
    recorder = Recorder()
    MetricsWriter((recorder,)).training(RECORD, world_size=4, throughput=True)
    paired, single = recorder.calls
    assert paired == ({**PAIRED, "world-size": 4}, 7, 112)
    assert single == (
        {"skipped-train-samples": 16, "iteration-time": 0.25, "throughput": 1.5},
        7,
        None,
    )
    recorder.calls.clear()
    MetricsWriter((recorder,)).training(RECORD, loss_scale=False)
    assert "loss-scale" not in recorder.calls[0][0]
    assert "world-size" not in recorder.calls[0][0]


def test_validation_timers_and_memory() -> None:
    recorder = Recorder()
    writer = MetricsWriter((recorder,))
    writer.validation({"lm loss": 0.0}, 7, 112, set_name="code", with_perplexity=True)
    writer.timers({"optimizer": 1500.0}, 7)
    writer.memory({"reserved_bytes.all.current": 5, "unrelated": 1}, 7)
    assert recorder.calls == [
        ({"lm loss validation-code": 0.0, "lm loss validation-code ppl": 1.0}, 7, 112),
        ({"optimizer-time": 1.5}, 7, None),
        ({"mem-reserved-bytes": 5}, 7, None),
    ]


def test_every_destination_gets_everything() -> None:
    first, second = Recorder(), Recorder()
    writer = MetricsWriter((first, second))
    writer.training(RECORD)
    writer.config({"seed": 1})
    writer.close()
    assert first.calls == second.calls
    assert [call[1] for call in first.calls] == [7, 7, -1, -2]
    empty = build_writer()
    assert not empty
    empty.training(RECORD)
    empty.close()


def test_tensorboard_files_hold_the_pairs(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = build_writer(tensorboard_dir=str(tmp_path), tensorboard_queue_size=1)
    assert writer
    writer.training(RECORD)
    writer.config({"seed": 1234})
    writer.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert names == {
        *PAIRED,
        *(f"{name} vs samples" for name in PAIRED),
        "skipped-train-samples",
    }
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [(7, 2.0)]
    assert [event.step for event in events.Scalars("lm loss vs samples")] == [112]
    assert "seed/text_summary" in events.Tags()["tensors"]


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.settings: dict[str, Any] = {}
        self.config = types.SimpleNamespace(update=self.settings.update)
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished = True


def test_wandb_works_without_tensorboard_a_name_and_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, opened = FakeRun(), {}
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: opened.update(settings) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.chdir(tmp_path)
    writer = build_writer(wandb_project="pretraining", wandb_exp_name="")
    writer.training(RECORD)
    writer.config({"seed": 1, "betas": (0.9, 0.95)})
    writer.close()
    assert opened == {"project": "pretraining", "name": None, "entity": None, "dir": "wandb"}
    assert run.logged[0] == ({**PAIRED, "samples vs steps": 112}, 7)
    assert run.settings == {"seed": 1, "betas": "(0.9, 0.95)"}
    assert run.finished
    build_writer(wandb_project="pretraining", save=str(tmp_path / "run"))
    assert opened["dir"] == str(tmp_path / "run" / "wandb")
    assert (tmp_path / "run" / "wandb").is_dir()


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        ("wandb", {"wandb_project": "p"}, "--wandb-project p needs .* wandb.*pip install wandb"),
        (
            "torch.utils.tensorboard",
            {"tensorboard_dir": "d"},
            "--tensorboard-dir d needs .* tensorboard.*pip install tensorboard",
        ),
    ],
)
def test_a_missing_package_is_named(
    module: str, settings: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def refuse(name: str, package: str | None = None) -> types.ModuleType:
        if name == module:
            raise builtins.ImportError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(WriterError, match=message):
        build_writer(**settings)
