"""One case of the equivalence harness on its ranks: a line on a grid, compared with the reference.

Owns ``Case``, the rule of which cases exist (``not_applicable``), and ``run_cases``, the body of a
rank.  Invariants: every case starts from the initial weights and the data of its ``Training`` and
from process groups of its own, and every rank compares what it holds itself, so that replicas that
drift apart are seen.  Tested by ``tests/distributed/test_equivalence.py``.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.mesh import Mesh, MeshShape, new_group
from megamuon.models import GPT, PRESETS
from megamuon.optim import AdamWConfig
from megamuon.ownership import PlannerSettings
from megamuon.ownership.units import UNIT_THRESHOLD
from megamuon.placements import Placed
from megamuon.runtime import OptimizerSettings, RuntimeConfig, shard
from megamuon.sharding import ShardingError, apply_sharding, plan_sharding
from tools.reference_training import Result, Training, batch_of, model_config, place_of

LINES = ("A", "B", "C", "D", "M")
TRANSPORTS = {"A": "fsdp2", "B": "grouped", "C": "grouped", "D": "ready", "M": "p2p"}
PLANNERS = {"M": "role_greedy"}
FAULTS = ("learning-rate", "exception", "exit")
TIMEOUT = timedelta(seconds=120)  # of one collective
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run on ranks.  What does not apply to it is None, so that equal runs are equal
    cases.
    """

    line: str
    replicas: int = 1  # replicas; 1 is FSDP
    shards: int
    tp: int = 1
    zero_stage: int = 3
    sequence_parallel: bool = False
    publish: str | None = None  # async or sync
    collectives: str | None = None  # None: the line's own
    planner: str | None = None  # None: the line's own
    gradient_reduction: str = "micro-batch"  # or step
    unit_threshold: int | None = None  # None: the preset's
    training: Training = field(default_factory=Training)

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.shape.size

    @property
    def shape(self) -> MeshShape:
        """The axes of its ranks."""
        return MeshShape(replicas=self.replicas, shards=self.shards, tp=self.tp)

    @property
    def sharding(self) -> str:
        """One replica is plain sharding, whatever it was asked for as."""
        return "fsdp" if self.replicas == 1 else "hsdp"

    @property
    def transport(self) -> str:
        """The transport in use."""
        return self.collectives or TRANSPORTS[self.line]

    @property
    def policy(self) -> str:
        """The planner policy in use, where there are owners."""
        return self.planner or PLANNERS.get(self.line, "lpt")

    @property
    def reference(self) -> Training:
        """What its reference trains: line A has AdamW only, and places matter to experts alone."""
        training = replace(self.training, recompute=False, places=1)
        if self.line == "A":
            training = replace(training, optimizer="adam")
        if PRESETS[training.model].get("num_experts"):
            return replace(training, places=self.shape.sample_ranks)
        return training

    @property
    def name(self) -> str:
        """For messages: what distinguishes the case."""
        training = self.training
        words = [f"line {self.line} {training.model} {self.sharding} {self.replicas}x{self.shards}"]
        words += [f"zero {self.zero_stage} tp {self.tp} {self.reference.optimizer}"]
        words += [f"accumulation {training.accumulation}"] if training.accumulation > 1 else []
        words += ["recompute"] if training.recompute else []
        words += ["sequence-parallel"] if self.sequence_parallel else []
        words += [f"publish {self.publish}"] if self.publish else []
        words += [f"collectives {self.collectives}"] if self.collectives else []
        words += [f"planner {self.planner}"] if self.planner else []
        words += ["reduced once"] if self.gradient_reduction == "step" else []
        words += [f"units {self.unit_threshold}"] if self.unit_threshold is not None else []
        return " ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        training = values.pop("training")
        kept = ("model", "steps", "accumulation", "recompute", "batch", "length")
        return {
            "name": self.name,
            "line": values.pop("line"),
            "sharding": self.sharding,
            "grid": f"{self.replicas}x{self.shards}",
            "rows": values.pop("replicas"),
            "columns": values.pop("shards"),
            **values,
            "collectives": self.transport,
            "planner": self.policy if self.line in "CDM" else None,
            "optimizer": self.reference.optimizer,
            "dtype": str(training["dtype"]).removeprefix("torch."),
            **{key: training[key] for key in kept},
        }


def not_applicable(case: Case) -> str | None:
    """Why there is no such case; None where there is."""
    training, line = case.training, case.line
    if line == "M":
        wrong = {
            f"{case.replicas} replicas": case.replicas != 1,
            f"tp {case.tp}": case.tp != 1,
            f"ZeRO stage {case.zero_stage}": case.zero_stage != 3,
        }
        if any(wrong.values()):
            which = ", ".join(text for text, differs in wrong.items() if differs)
            return (
                "line M is owners on one replica at ZeRO stage 3 without tensor parallelism:"
                f" {which}"
            )
    if case.zero_stage == 1 and (line not in "CDM" or case.replicas > 1):
        return "ZeRO stage 1 is the baseline of owners (lines C and D) on one replica"
    if line == "A" and case.collectives:
        return "line A moves bytes as torch's fully_shard does"
    if line == "B" and case.transport == "ready":
        return "the ready collectives move owners' segments, and line B has even slices"
    if line in "AB" and case.planner:
        return f"line {line} has no owners to plan"
    if case.sequence_parallel and training.length % case.tp:
        return f"sequence parallelism: {training.length} tokens do not divide by tp {case.tp}"
    return _cut_problem(training.model, case.tp)


@cache
def _cut_problem(model: str, tp: int) -> str | None:
    """Why tensor parallelism cannot cut a preset."""
    try:
        with torch.device("meta"):
            plan_sharding(GPT(model_config(model)), tp=tp)
    except ShardingError as error:
        return str(error)
    return None


# --- a rank --------------------------------------------------------------------------------------


def build(case: Case, mesh: Mesh, **settings: Any) -> tuple[Any, Mapping[str, Placed] | None]:
    """The case's runtime (its model is ``.model``), and the placements of tensor parallelism.
    ``settings`` go before the case's own.
    """
    training = case.training
    config = model_config(training.model, recompute=training.recompute)
    with torch.device("meta"):
        model, template = GPT(config), GPT(config)  # whole weights are made by the second
    placements = None
    if case.tp > 1:
        plan = plan_sharding(model, tp=case.tp, sequence_parallel=case.sequence_parallel)
        placements = plan.placements
        apply_sharding(model, plan, tp_rank=mesh.tp_rank, group=new_group(mesh, "tp"))
    make = fully_shard_model if case.line == "A" else shard
    runtime = make(
        model,
        layers=GPT.layer_classes,
        config=replace(runtime_config(case), **settings),
        mesh=mesh,
        placements=placements,
        initial=template.initialise_,
    )
    return runtime, placements


def runtime_config(case: Case) -> RuntimeConfig:
    """The case in the runtime's terms."""
    training, line = case.training, case.line
    threshold = case.unit_threshold
    if threshold is None:
        threshold = PRESETS[training.model].get("owner_unit_threshold", UNIT_THRESHOLD)
    owners = line in "CDM"
    return RuntimeConfig(
        zero_stage=case.zero_stage,
        collectives=TRANSPORTS["C"] if line == "A" else case.transport,  # A has no use for it
        matrix_update="gather" if line == "B" else "owner",
        owner_layout=owners,
        publish=case.publish or "async",
        compute_dtype=training.dtype,
        reduce_dtype=training.dtype,
        master_dtype=training.dtype,
        unit_threshold=threshold,
        ns_cost="closed-form",
        planner=PlannerSettings(policy=case.policy),
        seed=training.seed,
        optimizer=OptimizerSettings(
            matrices=case.reference.optimizer,
            clip=training.clip,
            rest=AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8),
        ),
    )


def train(
    case: Case,
    rank: int,
    fault: str | None = None,
    *,
    device: torch.device = CPU,
    **settings: Any,
) -> tuple[Result, Any]:
    """Losses, norms and final weights as this rank sees them; and the placements of its pieces.
    ``settings`` of the runtime go before the case's own.
    """
    mesh = Mesh(
        world_size=case.ranks,
        rank=rank,
        local_rank=rank,
        replicas=case.replicas,
        shards=case.shards,
        tp=case.tp,
        device=device,
        backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
    )
    runtime, placements = build(case, mesh, **settings)
    training = case.training
    losses, norms = [], []
    for step in range(training.steps):
        if fault == "exception" and step == 1:
            raise RuntimeError("a fault that was asked for")
        if fault == "exit" and step == 1:
            os._exit(3)
        losses.append(_passes(runtime, case, mesh, step))
        lr = training.lr * (1.001 if fault == "learning-rate" else 1.0)
        norms.append(runtime.step(lr, training.wd).gradient_norm)
    weights = dict(runtime.full_parameters())
    _refuse_grouped_calls(runtime, case)
    runtime.close()
    return (losses, norms, weights), placements


def _refuse_grouped_calls(runtime: Any, case: Case) -> None:
    """A ready case that fell back to grouped calls says nothing about the ready ones."""
    if case.transport != "ready" or case.replicas * case.shards == 1:
        return
    if runtime.opened is None and case.training.steps >= 2:
        raise RuntimeError(f"the symmetric pool never opened: {'; '.join(runtime.notes())}")


def _passes(runtime: Any, case: Case, mesh: Mesh, step: int) -> float:
    """All forward and backward passes of a step; the mean loss over ranks and micro-batches."""
    training = case.training
    place, places = mesh.sample_rank, mesh.sample_ranks
    tokens, labels = (part.chunk(training.accumulation) for part in batch_of(step, training))
    total = torch.zeros(1, dtype=torch.float64)
    for index, parts in enumerate(zip(tokens, labels, strict=True)):
        part, target = (place_of(whole, place, places).to(mesh.device) for whole in parts)
        keep = case.gradient_reduction == "step" and index + 1 < training.accumulation
        with runtime.accumulate() if keep else contextlib.nullcontext():
            loss = runtime.model(part, labels=target).mean()
            (loss / training.accumulation).backward()
        total += loss.detach().cpu() / training.accumulation
    dist.all_reduce(total)  # tp ranks of a place have the same loss
    return float(total) / mesh.world_size


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a case is from its reference: losses relative, norms and weights absolute.  A value
    that is not finite counts as infinity.
    """

    loss: float
    norm: float
    weight: float
    weight_name: str  # where the largest difference is
    seconds: float


def compare(
    ours: Result, theirs: Result, placements: Mapping[str, Placed] | None, tp_rank: int
) -> Difference:
    """``ours`` of one rank against the reference.  ValueError where they do not have the same
    steps and parameters.
    """
    if ours[2].keys() != theirs[2].keys():
        raise ValueError(f"other parameters: {sorted(ours[2].keys() ^ theirs[2].keys())}")
    loss = _largest(abs(a - b) / abs(b) for a, b in zip(ours[0], theirs[0], strict=True))
    norm = _largest(abs(a - b) for a, b in zip(ours[1], theirs[1], strict=True))
    worst, where = 0.0, ""
    for name, whole in theirs[2].items():
        mine = ours[2][name]
        if mine.shape != whole.shape and placements is not None:
            whole = whole[placements[name].piece(tp_rank).slices]
        difference = _largest([float((mine - whole).abs().max())])
        if not where or difference > worst:
            worst, where = difference, name
    return Difference(loss=loss, norm=norm, weight=worst, weight_name=where, seconds=0.0)


def _largest(values: Any) -> float:
    return max((value if math.isfinite(value) else math.inf for value in values), default=0.0)


def run_cases(
    rank: int,
    world: int,
    cases: Sequence[Case],
    references: Mapping[Training, str],
    folder: str,
    fault: str | None = None,
    report: Callable[[int, Difference | None], None] | None = None,
) -> list[Difference]:
    """All cases on one rank, each in a default process group of its own.

    ``references``: for each ``Case.reference`` the file (``torch.save``) of its ``Result``.
    ``folder`` is for the groups' meeting points, on a file system that all ranks share. ``fault``
    breaks rank 0 in the first case on purpose, to see it noticed. ``report(index, difference)`` is
    called at the start of a case (with None) and at its end.
    """
    torch.set_num_threads(1)
    # FSDP2 warns of in-place operations on a model output that is a view; nobody does any here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    found = []
    for index, case in enumerate(cases):
        if report is not None:
            report(index, None)
        started = time.perf_counter()
        _meet(rank, world, Path(folder) / f"meeting-{index}")
        mine = fault if rank == 0 and index == 0 else None
        ours, placements = train(case, rank, mine)
        theirs = torch.load(references[case.reference], weights_only=True)
        difference = compare(ours, theirs, placements, case.shape.index_of("tp", rank))
        difference = replace(difference, seconds=time.perf_counter() - started)
        found.append(difference)
        if report is not None:
            report(index, difference)
    return found


def _meet(rank: int, world: int, place: Path) -> None:
    """A fresh default group: a case leaves no groups, connections or threads to the next."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=world, timeout=TIMEOUT
    )
