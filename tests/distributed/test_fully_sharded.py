"""Line A: FSDP2 with AdamW against the single-process textbook loop, and its state against the
owner runtime's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megamuon.agreement import PlanMismatchError
from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.checkpoint import load, save
from megamuon.checkpoint.ranks import Ranks
from megamuon.models.gpt import GPT
from megamuon.runtime import shard
from tests.support.fully_sharded import (
    STEPS,
    Setting,
    advance,
    config,
    described,
    grid,
    make,
    pasted,
    worst,
)
from tests.support.ranks import run_ranks
from tests.support.reference import Case, batch_of, build_reference, nano_config

SETTINGS = (
    Setting(),
    Setting(zero_stage=2, accumulation=2, evaluate=True),
    Setting(accumulation=2, reduce_once=True, recompute=True),
    Setting(replicas=2, recompute=True),
    Setting(replicas=2, zero_stage=2, accumulation=2, reduce_once=True),
    Setting(replicas=4, evaluate=True),
)


def textbook(case: Case) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """``torch.optim.AdamW`` on whole parameters."""
    model = build_reference(case)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": case.wd},
        {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=case.lr, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(case.steps):
        tokens, labels = batch_of(step, case)
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), case.clip)))
        adamw.step()
        adamw.zero_grad()
    return losses, norms, {n: p.detach().clone() for n, p in named.items()}


def skipped_steps(rank: int) -> dict[str, Any]:
    """A gradient that is not finite on one rank, then a clean step; then an unused layer."""
    runtime = make(grid(rank, 2, 2), Setting(replicas=2))
    before = described(runtime.state(optimizer=False, everywhere=True))
    tokens, labels = batch_of(0, Case())
    loss = runtime.model(tokens[:2], labels=labels[:2]).mean()
    (loss * (float("inf") if rank == 3 else 1.0)).backward()
    bad = runtime.step(1e-3, 0.1)
    after = described(runtime.state(optimizer=False, everywhere=True))
    same = all(torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=True))
    runtime.model(tokens[:2], labels=labels[:2]).mean().backward()
    runtime.clear_gradients()
    with runtime.accumulate():
        runtime.model(tokens[:2], labels=labels[:2]).mean().backward()
    runtime.clear_gradients()
    nothing = runtime.step(1e-3, 0.1)
    kept = described(runtime.state(optimizer=False, everywhere=True))
    same = same and all(torch.equal(a[3], b[3]) for a, b in zip(before, kept, strict=True))
    good = advance(runtime, rank, 4, range(1), Setting())[1][0]
    return {
        "bad": (bad.skipped, bad.nonfinite, math.isnan(bad.gradient_norm)),
        "same": same,
        "nothing": (nothing.gradient_norm, len(nothing.untouched)),
        "parameters": len(runtime.plan.parameters),
        "version": runtime.version,
        "good": good,
        "memory": runtime.memory(),
    }


def refused(rank: int) -> list[str]:
    """Messages of what cannot be."""
    messages = []
    with torch.device("meta"):
        model = GPT(nano_config())
    for error, change in (
        (ValueError, {"config": config(matrices="muon")}),
        (PlanMismatchError, {"config": config(zero_stage=2 + rank % 2)}),
        (ValueError, {"initial": None}),
    ):
        arguments = {"config": config(), "initial": model.initialise_, **change}
        with pytest.raises(error) as raised:
            fully_shard_model(model, layers=GPT.layer_classes, **arguments)
        messages.append(str(raised.value))
    return messages


def work(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All that needs four ranks."""
    runs = []
    for setting in SETTINGS:
        runtime = make(grid(rank, setting.replicas, world // setting.replicas), setting)
        losses, norms = advance(runtime, rank, world, range(STEPS), setting)
        whole = dict(runtime.full_parameters())
        runs.append((losses, norms, whole if rank in (0, 3) else None))
        if setting == SETTINGS[3]:
            state = described(runtime.state()), described(runtime.state(everywhere=True))
            norm = runtime.parameter_norm()
    return {
        "runs": runs,
        "state": state,
        "norm": norm,
        "checkpoints": checkpoints(rank, world, folder),
        "skipped": skipped_steps(rank),
        "refused": refused(rank),
    }


def owner_runtime() -> Any:
    with torch.device("meta"):
        model = GPT(nano_config())
    return shard(model, layers=GPT.layer_classes, initial=model.initialise_, config=config())


def checkpoints(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    """Half the steps on one runtime, half on the other, both ways."""
    results = []
    makers = [lambda: make(grid(rank, 2, 2), Setting(replicas=2)), owner_runtime]
    for number, (first, second) in enumerate((makers, makers[::-1])):
        runtime = first()
        advance(runtime, rank, world, range(STEPS // 2), Setting())
        document = {"plan": runtime.plan.to_json()}
        place = Path(folder) / str(number)
        save(place, 5, runtime.state(), documents=document, ranks=Ranks.create())
        other = second()
        load(place, 5, other.state(everywhere=True), ranks=Ranks.create())
        other.loaded()
        advance(other, rank, world, range(STEPS // 2, STEPS), Setting())
        results.append(dict(other.full_parameters()))
    return results


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, 4, str(tmp_path_factory.mktemp("line_a")), timeout=240.0)


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], list[float], dict[str, Tensor]]:
    return textbook(Case(steps=STEPS))


@pytest.mark.parametrize("place", range(len(SETTINGS)))
def test_float64_follows_the_textbook(everyone: list, reference: tuple, place: int) -> None:
    losses, norms, weights = reference
    for rank, values in enumerate(everyone):
        ours = values["runs"][place]
        assert ours[0] == pytest.approx(losses, rel=0, abs=1e-9), rank
        assert ours[1] == pytest.approx(norms, rel=0, abs=1e-9), rank
        if rank in (0, 3):
            assert worst(ours[2], weights) < 1e-9, rank


def test_state_tiles_every_whole_once(everyone: list, reference: tuple) -> None:
    _, _, weights = reference
    wholes = pasted([piece for values in everyone for piece in values["state"][0]])
    names = {f"optimizer.{key}.{n}" for key in ("exp_avg", "exp_avg_sq", "step") for n in weights}
    assert wholes.keys() == weights.keys() | names
    assert worst({name: wholes[name] for name in weights}, weights) < 1e-9
    assert all(wholes[f"optimizer.step.{name}"] == STEPS for name in weights)
    # With everywhere, a rail of ranks lists the same.
    for replica_zero, replica_one in ((0, 2), (1, 3)):
        first, second = everyone[replica_zero]["state"][1], everyone[replica_one]["state"][1]
        assert [piece[:3] for piece in first] == [piece[:3] for piece in second]
        assert all(torch.equal(a[3], b[3]) for a, b in zip(first, second, strict=True))
    norm = math.sqrt(sum(float(whole.square().sum()) for whole in weights.values()))
    assert all(values["norm"] == pytest.approx(norm, rel=1e-9) for values in everyone)


def test_checkpoints_pass_between_the_runtimes(everyone: list, reference: tuple) -> None:
    for weights in everyone[0]["checkpoints"]:
        assert worst(weights, reference[2]) < 1e-9


def test_a_bad_gradient_skips_the_step_on_all_ranks(everyone: list, reference: tuple) -> None:
    for values in everyone:
        seen = values["skipped"]
        skipped, names, is_nan = seen["bad"]
        assert skipped and is_nan and "model.norm.weight" in names
        assert seen["same"]
        # Cleared gradients are gone: nothing to update, and every parameter is untouched.
        assert seen["nothing"] == (0.0, seen["parameters"])
        assert seen["good"] == pytest.approx(reference[1][0], abs=1e-9)
        assert seen["version"] == 2  # the empty step counts, the skipped one does not
        memory = seen["memory"]
        assert memory["masters"] > 0 and memory["optimizer_state"] >= 2 * memory["masters"] * 0.9
        resident = ("sharded_gradients", "gathered_weights", "unsharded_gradients", "accumulators")
        assert not any(memory[kind] for kind in resident)


def test_what_cannot_be_is_refused(everyone: list) -> None:
    for values in everyone:
        optimizer, settings, meta = values["refused"]
        assert "line A trains with AdamW (or SGD)" in optimizer
        assert "zero_stage" in settings
        assert "meta device" in meta


def test_one_process_without_a_group(reference: tuple) -> None:
    """Starts a group of its own, trains as all others do, and ends it."""
    setting = Setting(zero_stage=2)
    runtime = make(None, setting)
    try:
        losses, norms = advance(runtime, 0, 1, range(3), setting)
    finally:
        runtime.close()
    assert losses == pytest.approx(reference[0][:3], rel=0, abs=1e-9)
    assert norms == pytest.approx(reference[1][:3], rel=0, abs=1e-9)
    assert not dist.is_initialized()


def test_a_failed_start_leaves_no_group() -> None:
    with pytest.raises(ValueError, match="rank 1 of 4, but this is rank 0 of 1"):
        make(grid(1, 2, 2), Setting())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="0-d parameters: scale"):
        fully_shard_model(model, layers=(), config=config())
    del model.scale
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"0.weight is shared by the layers 0, 1 alone"):
        fully_shard_model(model, layers=(nn.Linear,), config=config())
    assert not dist.is_initialized()
