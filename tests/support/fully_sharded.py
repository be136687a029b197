"""What the tests of line A share: settings, grids, a training run, pieces put together.

Owns nothing of the code under test; the oracle of each test is its own.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.baselines.fully_sharded import FullyShardedRuntime, fully_shard_model
from megamuon.mesh import Mesh
from megamuon.models.gpt import GPT
from megamuon.optim.adamw import AdamWConfig
from megamuon.runtime import OptimizerSettings, RuntimeConfig
from tests.support.reference import SEED, Case, batch_of, nano_config
from tests.support.runtime_config import plain_config

STEPS = 10
ADAMW = AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run a case."""

    replicas: int = 1
    zero_stage: int = 3
    accumulation: int = 1
    reduce_once: bool = False
    recompute: bool = False
    evaluate: bool = False  # a forward pass without gradients between the steps

    @property
    def case(self) -> Case:
        return Case(steps=STEPS, accumulation=self.accumulation, recompute=self.recompute)


def grid(rank: int, replicas: int, shards: int, tp: int = 1) -> Mesh:
    return Mesh(
        world_size=replicas * shards * tp,
        rank=rank,
        local_rank=rank,
        replicas=replicas,
        shards=shards,
        tp=tp,
        device=torch.device("cpu"),
        backend="gloo",
    )


def config(zero_stage: int = 3, matrices: str = "adam", **changes: Any) -> RuntimeConfig:
    wide = torch.float64
    return plain_config(
        zero_stage=zero_stage,
        compute_dtype=wide,
        reduce_dtype=wide,
        master_dtype=wide,
        unit_threshold=2_000,
        seed=SEED,
        optimizer=OptimizerSettings(matrices=matrices, rest=ADAMW),
        **changes,
    )


def make(mesh: Mesh | None, setting: Setting) -> FullyShardedRuntime:
    with torch.device("meta"):
        model = GPT(nano_config(setting.recompute))
    return fully_shard_model(
        model,
        layers=GPT.layer_classes,
        config=config(setting.zero_stage),
        mesh=mesh,
        initial=model.initialise_,
    )


def advance(
    runtime: Any, rank: int, world: int, steps: range, setting: Setting, wd: float = Case.wd
) -> tuple[list[float], list[float]]:
    """Losses and norms of ``steps``."""
    case, model = setting.case, runtime.model
    losses, norms = [], []
    for step in steps:
        tokens, labels = (part.chunk(case.accumulation) for part in batch_of(step, case))
        total = torch.zeros(1, dtype=torch.float64)
        for index, (part, target) in enumerate(zip(tokens, labels, strict=True)):
            keep = setting.reduce_once and (index + 1 < case.accumulation or step % 3 == 2)
            with runtime.accumulate() if keep else contextlib.nullcontext():
                mine = slice(rank * len(part) // world, (rank + 1) * len(part) // world)
                loss = model(part[mine], labels=target[mine]).mean()
                (loss / case.accumulation).backward()
            total += loss.detach() / case.accumulation
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / world)
        if setting.evaluate:
            with torch.no_grad():
                model(tokens[0][:1])
        norms.append(runtime.step(case.lr, wd).gradient_norm)
    return losses, norms


def described(pieces: list) -> list[tuple]:
    """State in a form that travels."""
    return [(p.name, p.shape, p.offset, p.data.detach().clone()) for p in pieces]


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    apart = [(ours[name] - whole).abs().max() for name, whole in theirs.items()]
    return float(torch.stack(apart).max())  # torch's maximum keeps a NaN, Python's may lose it


def pasted(pieces: list[tuple]) -> dict[str, Tensor]:
    """Whole tensors from pieces; each element must come exactly once."""
    wholes, counts = {}, {}
    for name, shape, offset, data in pieces:
        whole = wholes.setdefault(name, torch.zeros(shape, dtype=torch.float64))
        count = counts.setdefault(name, torch.zeros(shape))
        place = tuple(
            slice(start, start + size) for start, size in zip(offset, data.shape, strict=True)
        )
        whole[place] += data
        count[place] += 1
    for name, count in counts.items():
        assert (count == 1).all(), name
    return wholes
