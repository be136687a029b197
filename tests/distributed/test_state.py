"""State by canonical name: saved on one layout, loaded on another, training goes on as if nothing
had happened.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megamuon.checkpoint import load, save
from megamuon.checkpoint.ranks import Ranks
from megamuon.models.gpt import GPT
from megamuon.optim.adamw import AdamWConfig
from megamuon.runtime import OptimizerSettings, Runtime, shard
from tests.support.ranks import run_ranks
from tests.support.reference import SEED, Case, batch_of, nano_config, reference_run
from tests.support.runtime_config import plain_config

STEPS = 8
CASE = Case(steps=STEPS)


def make(stage: int, threshold: int) -> Runtime:
    with torch.device("meta"):
        model = GPT(nano_config())
    return shard(
        model,
        layers=GPT.layer_classes,
        initial=model.initialise_,
        config=plain_config(
            zero_stage=stage,
            compute_dtype=CASE.dtype,
            reduce_dtype=CASE.dtype,
            master_dtype=CASE.dtype,
            unit_threshold=threshold,
            seed=SEED,
            optimizer=OptimizerSettings(
                clip=CASE.clip, rest=AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8)
            ),
        ),
    )


def advance(runtime: Runtime, rank: int, world: int, steps: range) -> None:
    for step in steps:
        tokens, labels = batch_of(step, CASE)
        mine = slice(rank * len(tokens) // world, (rank + 1) * len(tokens) // world)
        runtime.model(tokens[mine], labels=labels[mine]).mean().backward()
        runtime.step(CASE.lr, CASE.wd)


def first_half(rank: int, world: int, folder: str) -> None:
    runtime = make(3, 2_000)
    advance(runtime, rank, world, range(STEPS // 2))
    save(
        Path(folder),
        4,
        runtime.state(),
        documents={"plan": runtime.plan.to_json()},
        ranks=Ranks.create(),
    )


def second_half(rank: int, world: int, folder: str, stage: int, threshold: int) -> dict:
    runtime = make(stage, threshold)
    load(Path(folder), 4, runtime.state(everywhere=True), ranks=Ranks.create())
    runtime.loaded()
    advance(runtime, rank, world, range(STEPS // 2, STEPS))
    return dict(runtime.full_parameters())


def test_resume_on_any_layout(tmp_path: Path) -> None:
    run_ranks(first_half, 4, str(tmp_path), timeout=120.0)
    _, _, weights = reference_run(CASE)
    for world, stage, threshold in ((1, 3, 2_000), (2, 2, 5_000_000), (3, 3, 2_000), (6, 2, 2_000)):
        results = run_ranks(second_half, world, str(tmp_path), stage, threshold, timeout=120.0)
        for name, whole in weights.items():
            worst = (results[0][name] - whole).abs().max()
            assert worst < 1e-10, (world, stage, threshold, name, float(worst))
