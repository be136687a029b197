"""Every matrix optimizer gives the same weights wherever its matrices lie.

The oracle is the same optimizer on one rank, where every matrix is whole; the optimizers themselves
are held to textbook formulas by ``tests/optim``.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megamuon.mesh import new_group
from megamuon.models.gpt import GPT
from megamuon.optim import NorMuonConfig, ShampooConfig, SoapConfig
from megamuon.runtime import OptimizerSettings, Runtime, shard
from megamuon.sharding import apply_sharding, plan_sharding
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks
from tests.support.reference import SEED, Case, batch_of, nano_config
from tests.support.runtime_config import plain_config

CASE = Case(steps=4, batch=8)
OPTIMIZERS = {
    "muon": OptimizerSettings(matrices="muon"),
    "normuon": OptimizerSettings(matrices="normuon", matrix=NorMuonConfig()),
    "shampoo": OptimizerSettings(matrices="shampoo", matrix=ShampooConfig(eps=1e-6)),
    "soap": OptimizerSettings(
        matrices="soap", matrix=SoapConfig(precondition_frequency=2, null_space="fixed")
    ),
}
# replicas, tp, ZeRO stage, whether every rank of a replica works on every matrix
GRIDS = ((1, 1, 3, False), (2, 1, 3, False), (1, 2, 3, False), (2, 2, 2, False), (2, 1, 2, True),
         (1, 2, 3, True))  # fmt: skip


def build(rank: int, world: int, name: str, grid: tuple[int, int, int, bool]) -> Runtime:
    replicas, tp, stage, gathered = grid
    mesh = mesh_of(rank, world, replicas=replicas, tp=tp)
    with torch.device("meta"):
        model, template = GPT(nano_config()), GPT(nano_config())
    placements = None
    if tp > 1:
        plan = plan_sharding(model, tp=tp)
        placements = plan.placements
        apply_sharding(model, plan, tp_rank=mesh.tp_rank, group=new_group(mesh, "tp"))
    wide = torch.float64
    return shard(
        model,
        layers=GPT.layer_classes,
        mesh=mesh,
        placements=placements,
        initial=template.initialise_,
        config=plain_config(
            zero_stage=stage,
            compute_dtype=wide,
            reduce_dtype=wide,
            master_dtype=wide,
            unit_threshold=2_000,
            seed=SEED,
            owner_layout=not gathered,
            matrix_update="gather" if gathered else "owner",
            optimizer=OPTIMIZERS[name],
        ),
    )


def train(runtime: Runtime, steps: range) -> list[float]:
    place, count = runtime.mesh.sample_rank, runtime.mesh.sample_ranks
    norms = []
    for step in steps:
        tokens, labels = (part.chunk(count)[place] for part in batch_of(step, CASE))
        runtime.model(tokens, labels=labels).mean().backward()
        norms.append(runtime.step(CASE.lr, CASE.wd).gradient_norm)
    return norms


def work(rank: int, world: int, name: str) -> list[tuple]:
    """Norms, whole weights, and the optimizer's tensors as a checkpoint would store them."""
    results = []
    for grid in GRIDS if world > 1 else GRIDS[:1]:
        runtime = build(rank, world, name, grid)
        norms = train(runtime, range(CASE.steps))
        weights = {n: w.clone() for n, w in runtime.full_parameters()}
        pieces = [dataclasses.replace(p, data=p.data.clone()) for p in runtime.state()]
        runtime.close()
        results.append((norms, weights if rank == 0 else None, pieces))
    return results


def tiled(pieces: list) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' pieces; every element is there exactly once."""
    wholes: dict[str, torch.Tensor] = {}
    count: dict[str, torch.Tensor] = {}
    for piece in pieces:
        whole = wholes.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.float64))
        seen = count.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.int64))
        place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.data.shape, strict=True))
        whole[place] += piece.data
        seen[place] += 1
    for name, seen in count.items():
        assert bool((seen == 1).all()), name
    return wholes


@pytest.fixture(scope="module", params=list(OPTIMIZERS))
def runs(request: pytest.FixtureRequest) -> tuple[list, list]:
    alone = run_ranks(work, 1, request.param, timeout=120.0)
    return alone, run_ranks(work, 4, request.param, timeout=240.0)


def test_weights_do_not_depend_on_the_grid(runs: tuple[list, list]) -> None:
    alone, everyone = runs
    norms, weights, _ = alone[0][0]
    for place, grid in enumerate(GRIDS):
        ours = everyone[0][place]
        assert ours[0] == pytest.approx(norms, rel=0, abs=1e-9), grid
        for name, whole in weights.items():
            assert (ours[1][name] - whole).abs().max() < 1e-8, (grid, name)


def test_stored_state_is_whole_and_the_same_on_every_grid(runs: tuple[list, list]) -> None:
    alone, everyone = runs
    wanted = tiled(alone[0][0][2])
    for place, grid in enumerate(GRIDS):
        found = tiled([piece for rank in everyone for piece in rank[place][2]])
        assert found.keys() == wanted.keys(), grid
        for name, whole in wanted.items():
            assert found[name].shape == whole.shape, (grid, name)
            if not name.endswith(".weight") or "basis" in name or "eigen" in name:
                continue  # a basis may turn within a repeated eigenvalue
            worst = (found[name] - whole).abs().max() if whole.numel() else 0.0
            assert worst <= 1e-7 * max(1.0, float(whole.abs().max())), (grid, name)
