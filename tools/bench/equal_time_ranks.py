"""What a rank of ``equal_time.py`` does: it times the steps of both optimizers, then trains.

Owns ``Plan`` and ``Budget`` (what is compared), the time of a step and the runs. Invariants: both
optimizers run on the same line with the same clipping, decay, batch and schedule, and see the same
samples from the same weights; a finished run is written down before the next one starts. Tested by
``tests/tools/test_equal_time.py``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megamuon.data.build import AnyDataset, DataSpec, build_train_valid_test, collate
from megamuon.mesh import Mesh
from megamuon.optim import (
    AdamWConfig,
    MuonConfig,
    NewtonSchulzConfig,
    Schedule,
    ScheduleConfig,
)
from megamuon.optim.ns_probe import LEAST_GAIN, bf16_gain
from megamuon.runtime import OptimizerSettings
from tools.reference_training import Training
from tools.sharded_training import Case, build

OPTIMIZERS = {"muon": "muon", "adamw": "adam"}  # as the runtime names them
WD, CLIP, BETA2 = 0.1, 1.0, 0.95
FLOOR = 0.05  # of the peak learning rate, at the end of the cosine
WARM_UP = 4  # untimed steps: line D opens its pool at the end of the second
BLOCK = 3  # steps
POINTS = 10  # of a curve


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all runs share."""

    ranks: int
    line: str
    seeds: int
    samples: int  # of a step, over all ranks
    length: int  # tokens of a sample
    validation: int  # samples
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A model, AdamW's steps, which are the time that both have, and the rates to try."""

    model: str
    steps: int
    rates: Mapping[str, tuple[float, ...]]  # by optimizer


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    optimizer: str
    rate: float
    seed: int
    steps: int
    seconds: float  # of a step
    ns_dtype: str


def work(
    rank: int, world: int, plan: Plan, budget: Budget, data: DataSpec, resume: Path | None
) -> dict[str, Any]:
    """Times and runs of one model; rank 0 keeps the file, and all ranks read it at the start."""
    train, valid, _ = build_train_valid_test(data)  # the caller has built the indices
    assert train is not None and valid is not None
    settings = {**asdict(plan), "model": budget.model, "steps": budget.steps}
    kept = Kept(resume, {**settings, "torch": torch.__version__})
    dist.barrier()  # nobody writes before all have read
    if kept.times is None:
        kept.times = step_times(plan, budget, train, rank)
        kept.write(rank)
    times, found = kept.times, {}
    steps = {
        "adamw": budget.steps,
        "muon": max(1, round(budget.steps / times["muon_over_adamw"])),
    }
    for name in OPTIMIZERS:
        seconds = times["adamw_seconds"] * (times["muon_over_adamw"] if name == "muon" else 1.0)

        def one(rate: float, seed: int, name: str = name, seconds: float = seconds) -> float:
            run = Run(
                optimizer=name,
                rate=rate,
                seed=seed,
                steps=steps[name],
                seconds=seconds,
                ns_dtype=times["ns_dtype"],
            )
            key = f"{name} {rate:g} {seed}"
            if key not in kept.runs:
                kept.runs[key] = train_one(run, plan, budget, train, valid, rank)
                kept.write(rank)
            found[key] = kept.runs[key]
            final = found[key]["curve"][-1][1]
            return final if final == final else float("inf")

        losses = {rate: one(rate, 0) for rate in budget.rates[name]}
        best = min(losses, key=lambda rate: losses[rate])
        for seed in range(1, plan.seeds):
            one(best, seed)
    return {"times": times, "runs": found}


class Kept:
    """Finished work of one model in a file that holds all models; in memory alone without one."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path = path
        self.name = json.dumps(settings, sort_keys=True)
        self.times: dict[str, Any] | None = None
        self.runs: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            stored = json.loads(path.read_text(encoding="utf-8")).get(self.name, {})
            self.times, self.runs = stored.get("times"), stored.get("runs", {})

    def write(self, rank: int) -> None:
        """By rank 0, at once and whole."""
        if self.path is None or rank != 0:
            return
        stored = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        stored[self.name] = {"times": self.times, "runs": self.runs}
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)


# --- one model on the ranks ----------------------------------------------------------------------


def runtime_of(
    optimizer: str, plan: Plan, budget: Budget, rank: int, *, seed: int, ns_dtype: str
) -> Any:
    """The model on this rank.  A collective."""
    training = Training(
        model=budget.model,
        optimizer=OPTIMIZERS[optimizer],
        dtype=torch.float32,
        clip=CLIP,
        batch=plan.samples,
        length=plan.length,
        seed=1000 + seed,
    )
    case = Case(line=plan.line, shards=plan.ranks, training=training)
    mesh = Mesh(
        world_size=plan.ranks,
        rank=rank,
        local_rank=rank,
        replicas=1,
        shards=plan.ranks,
        device=torch.device("cpu"),
        backend="gloo",
    )
    schulz = NewtonSchulzConfig(cpu_dtype=ns_dtype)  # type: ignore[arg-type]
    muon = optimizer == "muon"
    settings = OptimizerSettings(
        matrices=OPTIMIZERS[optimizer],
        matrix=MuonConfig(newton_schulz=schulz) if muon else None,
        rest=AdamWConfig(beta1=0.9, beta2=BETA2, eps=1e-8),
        clip=CLIP,
    )
    return build(case, mesh, optimizer=settings)[0]


def one_step(runtime: Any, batch: dict[str, torch.Tensor], lr: float) -> float:
    """Forward, backward and update; this rank's loss."""
    loss = runtime.model(batch["tokens"], labels=batch["labels"]).mean()
    loss.backward()
    runtime.step(lr, WD)
    return float(loss.detach())


def batch_at(dataset: AnyDataset, first: int, plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """This rank's samples of the step that begins with sample ``first``."""
    each = plan.samples // plan.ranks
    start = first + rank * each
    return collate([dataset[index] for index in range(start, start + each)])


def step_times(plan: Plan, budget: Budget, dataset: AnyDataset, rank: int) -> dict[str, Any]:
    """Seconds of AdamW's step and Muon's over it.  A collective.

    Both runtimes are there at once and take turns, block by block; a step takes as long as its
    slowest rank, and the ratio is the median over pairs of blocks, which drifts of the machine hit
    alike.
    """
    least = torch.tensor(bf16_gain(), dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)  # as a run agrees on it: training/ns_dtype.py
    ns_dtype = "bf16" if float(least) >= LEAST_GAIN else "fp32"
    runtimes = {
        name: runtime_of(name, plan, budget, rank, seed=0, ns_dtype=ns_dtype) for name in OPTIMIZERS
    }
    batch = batch_at(dataset, 0, plan, rank)
    for runtime in runtimes.values():
        for _ in range(WARM_UP):
            one_step(runtime, batch, 1e-4)
    blocks: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    for _ in range(plan.blocks):
        for name, runtime in runtimes.items():
            steps = []
            for _ in range(BLOCK):
                dist.barrier()
                start = time.perf_counter()
                one_step(runtime, batch, 1e-4)
                seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                steps.append(float(seconds))
            blocks[name].append(median(steps))
    for runtime in runtimes.values():
        runtime.close()
    pairs = zip(blocks["muon"], blocks["adamw"], strict=True)
    return {
        "adamw_seconds": median(blocks["adamw"]),
        "muon_over_adamw": median(ours / theirs for ours, theirs in pairs),
        "blocks": blocks,
        "ns_dtype": ns_dtype,
        "bf16_gain": float(least),
    }


def train_one(
    run: Run, plan: Plan, budget: Budget, train: AnyDataset, valid: AnyDataset, rank: int
) -> dict[str, Any]:
    """All steps of a run; its curve of (seconds, validation loss).  A collective."""
    runtime = runtime_of(run.optimizer, plan, budget, rank, seed=run.seed, ns_dtype=run.ns_dtype)
    schedule = Schedule(schedule_config(run, plan))
    first = run.seed * budget.steps * plan.samples  # every seed has samples of its own
    curve, began = [], time.perf_counter()
    points = {round(run.steps * point / POINTS) for point in range(1, POINTS + 1)}
    for step in range(run.steps):
        one_step(runtime, batch_at(train, first + step * plan.samples, plan, rank), schedule.lr())
        schedule.advance(plan.samples)
        if step + 1 in points:
            curve.append(((step + 1) * run.seconds, validate(runtime, valid, plan, rank)))
    runtime.close()
    if rank == 0:
        text = (
            f"{budget.model}, {run.optimizer} at {run.rate:g}, seed {run.seed}: {curve[-1][1]:.4f}"
        )
        print(text, f"{time.perf_counter() - began:.0f} s", sep=", ", file=sys.stderr, flush=True)
    return {**asdict(run), "curve": curve}


def schedule_config(run: Run, plan: Plan) -> ScheduleConfig:
    """A tenth of warm-up (20 steps at most), then a cosine down to ``FLOOR`` of the peak."""
    samples = run.steps * plan.samples
    return ScheduleConfig(
        max_lr=run.rate,
        min_lr=FLOOR * run.rate,
        warmup_steps=min(20, run.steps // 10) * plan.samples,
        decay_steps=samples,
        style="cosine",
        start_wd=WD,
        end_wd=WD,
        wd_steps=samples,
    )


@torch.no_grad()
def validate(runtime: Any, valid: AnyDataset, plan: Plan, rank: int) -> float:
    """Mean loss over the validation samples, all ranks' together.  A collective."""
    runtime.model.eval()
    each = plan.samples // plan.ranks
    total = torch.zeros(2, dtype=torch.float64)
    for first in range(0, plan.validation, plan.samples):
        start = first + rank * each
        batch = collate([valid[index] for index in range(start, start + each)])
        losses = runtime.model(batch["tokens"], labels=batch["labels"]).double()
        total += torch.tensor([float(losses.sum()), losses.numel()], dtype=torch.float64)
    runtime.model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])
