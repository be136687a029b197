"""Short trainings that must not depend on who moves the bytes.

Owns the runs (``RUNS``), how one is made (``train``) and what two of them differ in
(``difference``): every grid, sharding and way through a layer that the operators of line D meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megamuon.mesh import Mesh
from megamuon.models import GPT
from megamuon.runtime import RuntimeConfig, shard
from tools.reference_training import Training, batch_of, model_config, place_of
from tools.sharded_training import Case, build, runtime_config

RANKS = 4
STEPS = 5  # the pool opens after the second


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run, to be made with line C and with line D."""

    case: Case
    settings: dict[str, Any] = field(default_factory=dict)  # of the runtime
    skip: bool = False  # rank 1 leaves a layer out of every second pass
    frozen: bool = False  # the second layer is not trained


def training(model: str = "nano", **settings: Any) -> Training:
    return Training(model=model, steps=STEPS, dtype=torch.float32, **settings)


NARROW = {"gather_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
SMALL = {"chunk_bytes": 1024, "ring_slots": 2, "publish_tile_bytes": 1024}
RUNS = {
    "fsdp": Run(case=Case(line="C", shards=4, training=training())),
    "fsdp, small chunks": Run(case=Case(line="C", shards=4, training=training()), settings=SMALL),
    "fsdp zero 2": Run(case=Case(line="C", shards=4, zero_stage=2, training=training())),
    "fsdp zero 1": Run(case=Case(line="C", shards=4, zero_stage=1, training=training())),
    "fsdp narrow": Run(case=Case(line="C", shards=4, training=training()), settings=NARROW),
    "hsdp 2x2": Run(case=Case(line="C", replicas=2, shards=2, training=training())),
    "hsdp 2x2, small chunks": Run(
        case=Case(line="C", replicas=2, shards=2, training=training()), settings=SMALL
    ),
    "hsdp 4x1 zero 2": Run(
        case=Case(line="C", replicas=4, shards=1, zero_stage=2, training=training())
    ),
    "hsdp 4x1 narrow": Run(
        case=Case(line="C", replicas=4, shards=1, training=training()), settings=NARROW | SMALL
    ),
    "hsdp 2x2 narrow": Run(
        case=Case(line="C", replicas=2, shards=2, training=training()), settings=NARROW
    ),
    "tp 2": Run(case=Case(line="C", replicas=2, shards=1, tp=2, training=training())),
    "moe": Run(case=Case(line="C", shards=4, training=training("nano-moe"))),
    "moe hsdp": Run(case=Case(line="C", replicas=2, shards=2, training=training("nano-moe"))),
    "recompute": Run(case=Case(line="C", replicas=2, shards=2, training=training(recompute=True))),
    "accumulation": Run(
        case=Case(line="C", replicas=2, shards=2, training=training(accumulation=2))
    ),
    "reduced once": Run(
        case=Case(line="C", shards=4, gradient_reduction="step", training=training(accumulation=2))
    ),
    "reduced once in bf16": Run(
        case=Case(
            line="C",
            shards=4,
            gradient_reduction="step",
            training=training(accumulation=3, batch=24),
        ),
        settings={"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    ),
    "branch skipped": Run(
        case=Case(line="C", replicas=2, shards=2, training=training()), skip=True
    ),
    "frozen layer": Run(case=Case(line="C", shards=4, training=training()), frozen=True),
}


def train(run: Run, mesh: Mesh, collectives: str, **settings: Any) -> dict[str, Any]:
    """Losses, norms, weights; and what became of the pool. ``settings``: more of the runtime's."""
    case = run.case
    told = case.training
    if case.tp > 1:
        runtime, _ = build(case, mesh, collectives=collectives, **run.settings, **settings)
    else:
        with torch.device("meta"):
            model = GPT(model_config(told.model, recompute=told.recompute))
            template = GPT(model_config(told.model))
        if run.frozen:
            for parameter in model.model.layers[1].parameters():
                parameter.requires_grad_(False)
        config: RuntimeConfig = replace(
            runtime_config(case), collectives=collectives, **run.settings, **settings
        )
        runtime = shard(
            model, layers=GPT.layer_classes, config=config, mesh=mesh, initial=template.initialise_
        )
    losses, norms = [], []
    place, places = mesh.sample_rank, mesh.sample_ranks
    whole = runtime.model.model.layers
    for step in range(told.steps):
        parts = [part.chunk(told.accumulation) for part in batch_of(step, told)]
        for index, (tokens, labels) in enumerate(zip(*parts, strict=True)):
            if run.skip and mesh.rank == 1 and step % 2:
                runtime.model.model.layers = torch.nn.ModuleList([*whole[:1], *whole[2:]])
            keep = case.gradient_reduction == "step" and index + 1 < told.accumulation
            runtime.engine.accumulate_only = keep
            loss = runtime.model(
                place_of(tokens, place, places), labels=place_of(labels, place, places)
            ).mean()
            (loss / told.accumulation).backward()
            runtime.engine.accumulate_only = False
            runtime.model.model.layers = whole
            losses.append(float(loss))
        if step == 3:  # an evaluation between two steps
            with torch.no_grad():
                losses.append(
                    float(
                        runtime.model(
                            place_of(parts[0][0], place, places),
                            labels=place_of(parts[1][0], place, places),
                        ).mean()
                    )
                )
        norms.append(runtime.step(told.lr, told.wd).gradient_norm)
    result = {
        "losses": losses,
        "norms": norms,
        "weights": {name: weight.clone() for name, weight in runtime.full_parameters()},
        "copied": runtime.copied_share(),
        "traffic": runtime.traffic.as_dict(),
        "opened": runtime.opened is not None,
        "left_out": runtime.left_out_of_pool(),
        "notes": runtime.notes(),
    }
    runtime.close()
    return result


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of the losses, norms and weights in which two results of ``train`` are not equal, bit
    for bit.
    """
    found = [key for key in ("losses", "norms", "copied") if one[key] != other[key]]
    return found + [
        name
        for name, weight in one["weights"].items()
        if not torch.equal(weight, other["weights"][name])
    ]
