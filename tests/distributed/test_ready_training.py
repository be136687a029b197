"""Line D against line C: the same numbers, bit for bit, whatever the grid and the pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from megamuon.mesh import Mesh
from megamuon.models import GPT
from megamuon.runtime import RuntimeConfig, shard
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks
from tools.reference_training import Training, batch_of, model_config, place_of
from tools.sharded_training import Case, runtime_config

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
    "fsdp": Run(case=Case(line="C", columns=4, training=training())),
    "fsdp, small chunks": Run(case=Case(line="C", columns=4, training=training()), settings=SMALL),
    "fsdp zero 2": Run(case=Case(line="C", columns=4, zero_stage=2, training=training())),
    "fsdp zero 1": Run(case=Case(line="C", columns=4, zero_stage=1, training=training())),
    "fsdp narrow": Run(case=Case(line="C", columns=4, training=training()), settings=NARROW),
    "hsdp 2x2": Run(case=Case(line="C", rows=2, columns=2, training=training())),
    "hsdp 2x2, small chunks": Run(
        case=Case(line="C", rows=2, columns=2, training=training()), settings=SMALL
    ),
    "hsdp 4x1 zero 2": Run(
        case=Case(line="C", rows=4, columns=1, zero_stage=2, training=training())
    ),
    "hsdp 4x1 narrow": Run(
        case=Case(line="C", rows=4, columns=1, training=training()), settings=NARROW | SMALL
    ),
    "hsdp 2x2 narrow": Run(
        case=Case(line="C", rows=2, columns=2, training=training()), settings=NARROW
    ),
    "tp 2": Run(case=Case(line="C", rows=2, columns=1, tp=2, training=training())),
    "moe": Run(case=Case(line="C", columns=4, training=training("nano-moe"))),
    "moe hsdp": Run(case=Case(line="C", rows=2, columns=2, training=training("nano-moe"))),
    "recompute": Run(case=Case(line="C", rows=2, columns=2, training=training(recompute=True))),
    "accumulation": Run(case=Case(line="C", rows=2, columns=2, training=training(accumulation=2))),
    "reduced once": Run(
        case=Case(line="C", columns=4, gradient_reduction="step", training=training(accumulation=2))
    ),
    "reduced once in bf16": Run(
        case=Case(
            line="C",
            columns=4,
            gradient_reduction="step",
            training=training(accumulation=3, batch=24),
        ),
        settings={"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    ),
    "branch skipped": Run(case=Case(line="C", rows=2, columns=2, training=training()), skip=True),
    "frozen layer": Run(case=Case(line="C", columns=4, training=training()), frozen=True),
}


def train(run: Run, mesh: Mesh, collectives: str) -> dict[str, Any]:
    """Losses, norms, weights; and what became of the pool."""
    case = run.case
    told = case.training
    if case.tp > 1:
        from tools.sharded_training import build

        runtime, _ = build(replace(case, line={"grouped": "C", "ready": "D"}[collectives]), mesh)
    else:
        with torch.device("meta"):
            model = GPT(model_config(told.model, recompute=told.recompute))
            template = GPT(model_config(told.model))
        if run.frozen:
            for parameter in model.model.layers[1].parameters():
                parameter.requires_grad_(False)
        config: RuntimeConfig = replace(
            runtime_config(case), collectives=collectives, **run.settings
        )
        runtime = shard(
            model, layers=GPT.layer_classes, config=config, mesh=mesh, initial=template.initialise_
        )
    losses, norms = [], []
    place, places = mesh.data_parallel_rank, mesh.data_parallel_size
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


def work(rank: int, world: int) -> dict[str, Any]:
    """What differs between the lines, by run."""
    found: dict[str, Any] = {}
    for name, run in RUNS.items():
        mesh = mesh_of(rank, world, rows=run.case.rows, tp=run.case.tp)
        c, d = (train(run, mesh, collectives) for collectives in ("grouped", "ready"))
        other = [key for key in ("losses", "norms", "copied") if c[key] != d[key]]
        other += [
            key
            for key, weight in c["weights"].items()
            if not torch.equal(weight, d["weights"][key])
        ]
        found[name] = {
            "other": other,
            **{k: d[k] for k in ("opened", "left_out", "notes")},
            "traffic": [c["traffic"], d["traffic"]],
        }
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(work, RANKS, timeout=400)


@pytest.mark.parametrize("name", RUNS)
def test_line_d_is_line_c_bit_for_bit(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        assert result[name]["other"] == []
        assert result[name]["opened"]
        assert result[name]["left_out"] == {}
