"""Resume: bit for bit at the same size, and correct at any other."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.training import (
    LOG_LINE,
    Recorded,
    documents,
    flags,
    same_bits,
    stored_tensors,
    train,
    use_launcher_variables,
)

RUN = {
    "train_iters": 6,
    "global_batch_size": 8,
    "hidden_dropout": 0.1,  # random numbers are part of what must continue
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "eval_interval": 2,
    "save_interval": 3,
    "ns_cost": None,  # measured: the plan is another one each time unless the stored one is reused
}


def captured(words: list[str], step: Recorded) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = train(words, step)
    return code, output.getvalue()


def whole_and_first_half(rank: int, world: int, folder: Path) -> dict[str, Any]:
    use_launcher_variables(rank, world)
    whole, half = Recorded(), Recorded()
    cache = {"ns_cost_cache": folder / "costs"}
    first = captured(flags(**RUN, **cache, save=folder / "whole"), whole)
    second = captured(
        flags(**RUN, **cache, save=folder / "cut", exit_interval=3, async_save=True), half
    )
    return {"whole": whole.losses, "half": half.losses, "codes": (first[0], second[0])}


def second_half(rank: int, world: int, folder: Path, source: str, target: str) -> dict[str, Any]:
    """In a fresh process."""
    use_launcher_variables(rank, world)
    torch.manual_seed(rank)  # whatever the state was, the checkpoint's counts
    step = Recorded()
    words = flags(**RUN, save=folder / target, load=folder / source)
    code, text = captured(words + (["--zero-stage", "2"] if world != 2 else []), step)
    return {"losses": step.losses, "code": code, "text": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def started(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(whole_and_first_half, 2, folder)


@pytest.fixture(scope="module")
def resumed(folder: Path, started: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_ranks(second_half, 2, folder, "cut", "cut")


def test_losses_continue_bit_for_bit(
    started: list[dict[str, Any]], resumed: list[dict[str, Any]]
) -> None:
    for before, after in zip(started, resumed, strict=True):
        assert before["codes"] == (0, 0)
        assert after["code"] == 0
        assert len(after["losses"]) == 6  # three steps of two micro-batches
        assert before["half"] + after["losses"] == before["whole"]


def test_weights_and_optimizer_state_are_bit_for_bit_equal(
    folder: Path, resumed: list[dict[str, Any]]
) -> None:
    whole, cut = stored_tensors(folder / "whole", 6), stored_tensors(folder / "cut", 6)
    assert any(name.startswith("optimizer.momentum_buffer.") for name in whole)
    assert same_bits(whole, cut) == []
    same = ("counters", "schedule", "rng")
    first, second = documents(folder / "whole", 6), documents(folder / "cut", 6)
    assert {name: first[name] for name in same} == {name: second[name] for name in same}
    assert len(first["rng"]) == 2


def test_messages_and_the_reused_plan(folder: Path, resumed: list[dict[str, Any]]) -> None:
    text = resumed[0]["text"]
    assert f" loading distributed checkpoint from {folder / 'cut'} at iteration 3" in text
    assert f"  successfully loaded checkpoint from {folder / 'cut'} [ t 1/1, p 1/1 ] at" in text
    assert "(from the checkpoint): " in text
    assert documents(folder / "cut", 6)["plan"] == documents(folder / "cut", 3)["plan"]


@pytest.mark.parametrize("world", [1, 4])
def test_another_world_size_and_zero_stage_follow_the_same_curve(
    world: int, folder: Path, started: list[dict[str, Any]]
) -> None:
    """Dropout draws differ between sizes, so the curve is compared without it."""
    plain = {"hidden_dropout": 0.0, "override_checkpoint_args": "hidden_dropout"}
    results = run_ranks(other_size, world, folder, plain)
    assert results[-1]["code"] == 0
    assert "made now" in results[0]["text"]
    if world == 4:
        assert "random states of 2 ranks do not fit 4 ranks" in results[0]["text"]
    loaded = next(LOG_LINE.finditer(results[-1]["text"]))
    assert (loaded["iteration"], loaded["consumed"]) == ("4", "32")
    reference = run_reference(folder, plain)
    found = [float(line["loss"]) for line in LOG_LINE.finditer(results[-1]["text"])]
    assert found == pytest.approx(reference, rel=1e-5)


def other_size(rank: int, world: int, folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    use_launcher_variables(rank, world)
    words = flags(**{**RUN, **changes, "save_interval": None}, load=folder / "cut", ckpt_step=3)
    code, text = captured(words + ["--zero-stage", "2"], Recorded())
    return {"code": code, "text": text}


_REFERENCE: dict[Path, list[float]] = {}


def run_reference(folder: Path, changes: dict[str, Any]) -> list[float]:
    """The log lines of a resume at the size that saved, made once."""
    if folder not in _REFERENCE:
        text = run_ranks(other_size, 2, folder, changes)[-1]["text"]
        _REFERENCE[folder] = [float(line["loss"]) for line in LOG_LINE.finditer(text)]
    return _REFERENCE[folder]
