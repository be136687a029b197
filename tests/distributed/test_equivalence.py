"""Owner training against the single-process textbook loop.

In FP64, where rounding cannot hide a fault, losses, norms and weights agree to 1e-9 over 50 steps
for every combination of ranks, ZeRO stage, accumulation and recompute; transports, unit thresholds
and reduction modes are dealt over them. In FP32 losses agree to 1e-4 over 20 steps.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from megamuon.models.gpt import GPT
from megamuon.optim.adamw import AdamWConfig
from megamuon.runtime import OptimizerSettings, RuntimeConfig, shard
from tests.support.ranks import run_ranks
from tests.support.reference import SEED, Case, batch_of, nano_config, reference_run


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run a case on the owner runtime."""

    case: Case
    zero_stage: int
    threshold: int = 2_000
    collectives: str = "grouped"
    reduce_once: bool = False  # accumulate on the rank, reduce once per step
    matrices: str = "muon"


def train(rank: int, world: int, setting: Setting) -> tuple[list[float], list[float], dict]:
    """Losses, norms and whole final weights of one run."""
    case = setting.case
    with torch.device("meta"):
        model = GPT(nano_config(case.recompute))
    runtime = shard(
        model,
        layers=GPT.layer_classes,
        initial=model.initialise_,
        config=RuntimeConfig(
            zero_stage=setting.zero_stage,
            collectives=setting.collectives,
            compute_dtype=case.dtype,
            reduce_dtype=case.dtype,
            master_dtype=case.dtype,
            unit_threshold=setting.threshold,
            seed=SEED,
            optimizer=OptimizerSettings(
                matrices=setting.matrices,
                clip=case.clip,
                adamw=AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8),
            ),
        ),
    )
    losses, norms = [], []
    for step in range(case.steps):
        tokens, labels = (part.chunk(case.accumulation) for part in batch_of(step, case))
        total = torch.zeros(1, dtype=torch.float64)
        for index, (part, target) in enumerate(zip(tokens, labels, strict=True)):
            keep = setting.reduce_once and index + 1 < case.accumulation
            with runtime.accumulate() if keep else contextlib.nullcontext():
                mine = slice(rank * len(part) // world, (rank + 1) * len(part) // world)
                loss = model(part[mine], labels=target[mine]).mean()
                (loss / case.accumulation).backward()
            total += loss.detach() / case.accumulation
        dist.all_reduce(total)
        losses.append(float(total) / world)
        norms.append(runtime.step(case.lr, case.wd).gradient_norm)
    return losses, norms, dict(runtime.full_parameters())


def work(rank: int, world: int, settings: list[Setting]) -> list[tuple]:
    """All settings in one start of the ranks; weights come back from rank 0 only."""
    results = []
    for setting in settings:
        losses, norms, weights = train(rank, world, setting)
        results.append((losses, norms, weights if rank == 0 else None))
    return results


def grid(dtype: torch.dtype, steps: int, world: int) -> list[Setting]:
    """ZeRO x accumulation x recompute; the rest is dealt over it, shifted by the ranks, so
    that over the numbers of ranks every combination meets both thresholds and both transports.
    """
    chosen = []
    axes = itertools.product((2, 3), (1, 2), (False, True))
    for number, (zero_stage, accumulation, recompute) in enumerate(axes):
        turn = number + world
        chosen.append(
            Setting(
                case=Case(steps=steps, accumulation=accumulation, recompute=recompute, dtype=dtype),
                zero_stage=zero_stage,
                threshold=(2_000, 5_000_000)[turn % 2],
                collectives=("grouped", "per_owner")[turn // 2 % 2],
                reduce_once=turn % 3 == 0,
            )
        )
    return chosen


_references: dict[Case, tuple] = {}


def reference(case: Case) -> tuple:
    """The oracle's run, once per case."""
    if case not in _references:
        _references[case] = reference_run(case)
    return _references[case]


def largest(ours: list[float], theirs: list[float]) -> float:
    """Largest absolute difference."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_float64_follows_the_textbook(world: int) -> None:
    settings = grid(torch.float64, 50, world)
    everyone = run_ranks(work, world, settings, timeout=900.0)
    for place, setting in enumerate(settings):
        losses, norms, weights = reference(setting.case)
        for rank in range(world):
            ours = everyone[rank][place]
            assert largest(ours[0], losses) < 1e-9, (rank, setting)
            assert largest(ours[1], norms) < 1e-9, (rank, setting)
        final = everyone[0][place][2]
        assert final.keys() == weights.keys()
        for name, whole in weights.items():
            assert (final[name] - whole).abs().max() < 1e-9, (name, setting)


def test_float32_losses_stay_close() -> None:
    settings = grid(torch.float32, 20, 4)[::2]
    everyone = run_ranks(work, 4, settings, timeout=600.0)
    for place, setting in enumerate(settings):
        losses, _, _ = reference(setting.case)
        assert largest(everyone[0][place][0], losses) < 1e-4, setting


def test_more_ranks_than_units_and_adamw_for_everything() -> None:
    """Eight ranks on a model of five units; and the same runtime with AdamW on all matrices."""
    case = Case(steps=6)
    many = [
        Setting(case=case, zero_stage=3, threshold=5_000_000),
        Setting(case=case, zero_stage=2, threshold=5_000_000, matrices="adam"),
    ]
    everyone = run_ranks(work, 8, many, timeout=300.0)
    losses, _, weights = reference(case)
    assert largest(everyone[0][0][0], losses) < 1e-9
    assert all((everyone[0][0][2][n] - w).abs().max() < 1e-9 for n, w in weights.items())
    alone = run_ranks(work, 1, [Setting(case=case, zero_stage=3, matrices="adam")], timeout=120.0)
    assert largest(everyone[0][1][0], alone[0][0][0]) < 1e-9
