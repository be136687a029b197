"""Saved on one grid, taken up on another: any line, replicas, shards, tensor parallelism, ZeRO
stage, planner policy and optimizer.

Every run starts from the same weights and sees the same data, saves after two steps and goes on for
two more. The oracle of a load is what was saved, bit for bit, and then the steps of the run that
saved, which nobody interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.checkpoint import Ranks, StoredTensor, load, read_index, save
from megamuon.mesh import new_group
from megamuon.models import GPT
from megamuon.optim import AdamWConfig, ShampooConfig, SoapConfig
from megamuon.ownership import PlannerSettings
from megamuon.runtime import OptimizerSettings, shard
from megamuon.sharding import apply_sharding, plan_sharding
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks
from tests.support.reference import SEED, Case, batch_of
from tests.support.runtime_config import plain_config
from tests.support.training import stored_tensors
from tools.reference_training import model_config

SAVED, END = 2, 4  # steps
CASE = Case(batch=24, length=8)
MERGED = 5_000_000  # all of a layer on one owner: three units for eight ranks


MATRIX_SETTINGS = {
    "shampoo": ShampooConfig(eps=1e-6),
    "soap": SoapConfig(precondition_frequency=2, null_space="fixed"),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies on ranks."""

    line: str = "C"  # D opens its pool after two steps; E is the owners' runtime on even slices
    replicas: int = 1
    shards: int = 1
    tp: int = 1
    stage: int = 3
    optimizer: str = "muon"
    model: str = "nano"
    planner: str = "lpt"
    threshold: int = 2_000

    @property
    def world(self) -> int:
        return self.replicas * self.shards * self.tp


L = Layout
ADAM: dict[str, Any] = {"optimizer": "adam"}
MOE: dict[str, Any] = {"model": "nano-moe"}
SOAP: dict[str, Any] = {"optimizer": "soap"}
SHAMPOO: dict[str, Any] = {"optimizer": "shampoo"}
NORMUON: dict[str, Any] = {"optimizer": "normuon"}

LAYOUTS: dict[str, Layout] = {
    "C alone": L(),
    "C 1x2": L(shards=2, stage=2, planner="round_robin"),
    "C tp": L(tp=2, stage=2),
    "C 2x1": L(replicas=2),
    "C 1x3": L(shards=3, stage=1, planner="numel"),
    "M 1x3": L(line="M", shards=3, planner="cost_aware"),
    "C 2x2": L(replicas=2, shards=2),
    "C 4x1": L(replicas=4, stage=2),
    "C 1x4": L(shards=4, stage=1),
    "C 1x2 tp": L(shards=2, tp=2),
    "C 2x1 tp": L(replicas=2, tp=2, stage=2),
    "B 1x4": L(line="B", shards=4),
    "B 2x2": L(line="B", replicas=2, shards=2, stage=2),
    "B 2x1 tp": L(line="B", replicas=2, tp=2),
    "M 1x4": L(line="M", shards=4, planner="role_greedy"),
    "M 1x4 scope": L(line="M", shards=4, planner="scope_greedy"),
    "D 1x4": L(line="D", shards=4, stage=1),
    "D 2x2": L(line="D", replicas=2, shards=2),
    "D 2x1 tp": L(line="D", replicas=2, tp=2, stage=2),
    "C 1x8 merged": L(shards=8, threshold=MERGED),
    "C 2x2 tp": L(replicas=2, shards=2, tp=2),
    "B 4x2": L(line="B", replicas=4, shards=2, stage=2),
    "adam A 1x4": L(line="A", shards=4, **ADAM),
    "adam A 2x2": L(line="A", replicas=2, shards=2, stage=2, **ADAM),
    "adam A 1x2 tp": L(line="A", shards=2, tp=2, **ADAM),
    "adam A 1x3": L(line="A", shards=3, **ADAM),
    "adam C 2x2": L(replicas=2, shards=2, **ADAM),
    "adam C 2x1 tp": L(replicas=2, tp=2, stage=2, **ADAM),
    "adam E 1x2": L(line="E", shards=2, **ADAM),
    "moe C 2x2": L(replicas=2, shards=2, **MOE),
    "moe C 1x2 tp": L(shards=2, tp=2, stage=2, **MOE),
    "moe B 1x4": L(line="B", shards=4, **MOE),
    "moe M 1x3": L(line="M", shards=3, planner="role_greedy", **MOE),
    "moe C 1x8 merged": L(shards=8, threshold=MERGED, **MOE),
    "soap C tp": L(tp=2, **SOAP),
    "soap C 2x2": L(replicas=2, shards=2, **SOAP),
    "soap B 2x1 tp": L(line="B", replicas=2, tp=2, **SOAP),
    "shampoo B 1x2": L(line="B", shards=2, **SHAMPOO),
    "shampoo C 1x2 tp": L(shards=2, tp=2, **SHAMPOO),
    "shampoo C 4x1": L(replicas=4, **SHAMPOO),
    "normuon C 2x1 tp": L(replicas=2, tp=2, **NORMUON),
    "normuon B 2x2": L(line="B", replicas=2, shards=2, **NORMUON),
    "normuon C 1x3": L(shards=3, **NORMUON),
}  # fmt: skip

# Who takes up what each of them has saved.
LOADS: dict[str, tuple[str, ...]] = {
    "C alone": ("C 1x2", "C 2x2", "C 1x8 merged", "B 2x1 tp"),
    "C tp": ("C alone", "M 1x3", "C 4x1", "B 1x4"),
    "C 2x2": ("C 1x3", "C 2x2 tp", "C 1x2 tp", "M 1x4"),
    "C 4x1": ("C tp", "C 1x4", "B 2x2"),
    "C 1x4": ("C 2x1", "C 2x1 tp", "D 2x2", "M 1x4 scope"),
    "D 2x2": ("C 1x2 tp", "D 1x4", "D 2x1 tp"),
    "D 2x1 tp": ("C alone", "D 2x2"),
    "C 2x1 tp": ("C 1x3", "C 2x2", "B 4x2"),
    "B 2x2": ("C 1x4", "C 1x2 tp", "M 1x3"),
    "B 2x1 tp": ("C 2x1", "C 1x8 merged", "M 1x4"),
    "M 1x4": ("C alone", "C 2x2 tp", "B 1x4", "M 1x4 scope"),
    "C 1x8 merged": ("C 1x2", "C 2x1 tp", "B 2x2"),
    "C 2x2 tp": ("C tp", "C 4x1", "B 4x2"),
    "adam A 2x2": ("adam A 1x2 tp", "adam C 2x1 tp", "adam E 1x2"),
    "adam A 1x2 tp": ("adam A 1x3", "adam A 1x4", "adam C 2x2"),
    "adam C 2x2": ("adam A 1x4", "adam A 1x3", "adam E 1x2"),
    "moe C 2x2": ("moe C 1x2 tp", "moe B 1x4", "moe C 1x8 merged"),
    "moe C 1x2 tp": ("moe C 2x2", "moe M 1x3", "moe B 1x4"),
    "soap C tp": ("soap C 2x2", "soap B 2x1 tp"),
    "soap B 2x1 tp": ("soap C tp", "soap C 2x2"),
    "shampoo B 1x2": ("shampoo C 1x2 tp", "shampoo C 4x1"),
    "shampoo C 1x2 tp": ("shampoo B 1x2", "shampoo C 4x1"),
    "normuon C 2x1 tp": ("normuon B 2x2", "normuon C 1x3"),
    "normuon B 2x2": ("normuon C 2x1 tp", "normuon C 1x3"),
}
PAIRS = [(source, target) for source, targets in LOADS.items() for target in targets]


def build(rank: int, layout: Layout, seed: int = SEED) -> Any:
    """The layout's runtime; ``seed`` is that of its initial weights."""
    mesh = mesh_of(rank, layout.world, replicas=layout.replicas, tp=layout.tp)
    # Expert balance is a mean over what a rank sees, which no other number of ranks repeats.
    config = replace(model_config(layout.model), aux_loss_coefficient=0.0)
    with torch.device("meta"):
        model, template = GPT(config), GPT(config)
    placements = None
    if layout.tp > 1:
        plan = plan_sharding(model, tp=layout.tp)
        placements = plan.placements
        apply_sharding(model, plan, tp_rank=mesh.tp_rank, group=new_group(mesh, "tp"))
    wide = torch.float64
    return (fully_shard_model if layout.line == "A" else shard)(
        model,
        layers=GPT.layer_classes,
        mesh=mesh,
        placements=placements,
        initial=template.initialise_,
        config=plain_config(
            zero_stage=layout.stage,
            collectives={"D": "ready", "M": "p2p"}.get(layout.line, "grouped"),
            matrix_update="gather" if layout.line == "B" else "owner",
            owner_layout=layout.line not in "BE",
            compute_dtype=wide,
            reduce_dtype=wide,
            master_dtype=wide,
            unit_threshold=layout.threshold,
            planner=PlannerSettings(policy=layout.planner),
            seed=seed,
            optimizer=OptimizerSettings(
                matrices=layout.optimizer,
                matrix=MATRIX_SETTINGS.get(layout.optimizer),
                rest=AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8),
            ),
        ),
    )


def advance(runtime: Any, steps: range) -> None:
    place, places = runtime.mesh.sample_rank, runtime.mesh.sample_ranks
    for step in steps:
        tokens, labels = (part.chunk(places)[place] for part in batch_of(step, CASE))
        runtime.model(tokens, labels=labels).mean().backward()
        runtime.step(CASE.lr, CASE.wd)


def weights_of(runtime: Any) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in runtime.full_parameters()}


def probe(runtime: Any) -> float:
    """The loss of the same samples on every rank."""
    tokens, labels = (part[:4] for part in batch_of(99, CASE))
    with torch.no_grad():
        return float(runtime.model(tokens, labels=labels).mean())


def wrong_pieces(pieces: Sequence[StoredTensor], wholes: Mapping[str, Tensor]) -> list[str]:
    """Names of the pieces that are not, bit for bit, their part of the whole."""
    found = []
    for piece in pieces:
        sizes = zip(piece.offset, piece.data.shape, strict=True)
        place = tuple(slice(start, start + size) for start, size in sizes)
        if not torch.equal(piece.data, wholes[piece.name][place]):
            found.append(piece.name)
    return found


# --- on ranks ------------------------------------------------------------------------------------


def all_saves(rank: int, world: int, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Train, save in the background while training goes on, and keep the end of the run."""
    ranks, found = Ranks.create(), {}
    for name in names:
        runtime = build(rank, LAYOUTS[name])
        advance(runtime, range(SAVED))
        loss = probe(runtime)
        held = [replace(p, data=p.data.clone()) for p in runtime.state(everywhere=True)]
        state = runtime.state()
        listed = [(piece.name, piece.data.numel()) for piece in state]
        handle = save(folder / name, SAVED, state, documents={}, ranks=ranks, asynchronous=True)
        advance(runtime, range(SAVED, END))
        after = weights_of(runtime)
        stale = wrong_pieces([p for p in runtime.state() if p.name in after], after)
        handle.wait()
        runtime.close()
        wholes = stored_tensors(folder / name, SAVED)
        if rank == 0:
            torch.save({"wholes": wholes, "after": after, "loss": loss}, folder / f"{name}.pt")
        found[name] = {"listed": listed, "wrong": wrong_pieces(held, wholes), "stale": stale}
    return found


def all_loads(rank: int, world: int, folder: Path, pairs: Sequence[tuple[str, str]]) -> list[Any]:
    ranks = Ranks.create()
    return [take_up(rank, folder, source, LAYOUTS[target], ranks) for source, target in pairs]


def take_up(rank: int, folder: Path, source: str, layout: Layout, ranks: Ranks) -> dict[str, Any]:
    """Load what ``source`` saved, compare every piece and weight, and go on."""
    runtime = build(rank, layout, seed=SEED + 1)
    if layout.replicas > 1:
        advance(runtime, range(1))  # its weights are still on their way to the leaders
    pieces = runtime.state(everywhere=True)
    for piece in pieces:
        piece.data.fill_(77.0)
    load(folder / source, SAVED, pieces, ranks=ranks)
    runtime.loaded()
    end = torch.load(folder / f"{source}.pt", weights_only=True)
    wholes, weights = end["wholes"], weights_of(runtime)
    wrong = wrong_pieces(pieces, wholes)
    wrong += [name for name, weight in weights.items() if not torch.equal(weight, wholes[name])]
    loss = probe(runtime)
    advance(runtime, range(SAVED, END))
    after = weights_of(runtime)
    runtime.close()
    differences = [(after[name] - whole).abs().max() for name, whole in end["after"].items()]
    return {
        "wrong": wrong,
        "loss": loss,
        "expected": end["loss"],
        "worst": float(torch.stack(differences).max()),  # NaN if one is
    }


# --- tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grids")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each source, what each rank listed and found."""
    found = {}
    for world in sorted({LAYOUTS[name].world for name in LOADS}):
        names = [name for name in LOADS if LAYOUTS[name].world == world]
        results = run_ranks(all_saves, world, folder, names, timeout=400.0)
        found |= {name: [of_rank[name] for of_rank in results] for name in names}
    return found


@pytest.fixture(scope="module")
def loaded(folder: Path, saved: Any) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Of each pair, what each rank found."""
    found = {}
    for world in sorted({LAYOUTS[target].world for _, target in PAIRS}):
        pairs = [pair for pair in PAIRS if LAYOUTS[pair[1]].world == world]
        results = run_ranks(all_loads, world, folder, pairs, timeout=400.0)
        found |= {pair: list(of_pair) for pair, *of_pair in zip(pairs, *results, strict=True)}
    return found


@pytest.mark.parametrize("name", LOADS)
def test_each_element_is_saved_by_one_rank(name: str, folder: Path, saved: Any) -> None:
    index = read_index(folder / name, SAVED)
    sizes = dict.fromkeys(index, 0)
    for rank in saved[name]:
        for tensor, size in rank["listed"]:
            sizes[tensor] += size
    assert sizes == {tensor: torch.Size(entry.shape).numel() for tensor, entry in index.items()}
    assert "lm_head.weight" not in index  # tied: one name for one storage


@pytest.mark.parametrize("name", LOADS)
def test_a_save_is_of_its_instant_and_every_replica_agrees_with_it(name: str, saved: Any) -> None:
    """Training went on while it was written. State is not cached either: what a later call lists
    has moved on.
    """
    assert [(rank["wrong"], rank["stale"]) for rank in saved[name]] == [([], [])] * len(saved[name])


def test_an_owner_writes_the_whole_momentum_under_its_matrix(folder: Path, saved: Any) -> None:
    index = read_index(folder / "C 2x2", SAVED)
    momenta = {n: e for n, e in index.items() if n.startswith("optimizer.momentum_buffer.")}
    assert len(momenta) == 21
    for name, entry in momenta.items():
        assert entry.shape == index[name.removeprefix("optimizer.momentum_buffer.")].shape
        assert [piece.chunk.shape for piece in entry.pieces] == [entry.shape]
    files = {piece.file for entry in momenta.values() for piece in entry.pieces}
    assert len(files) == 4  # all ranks write


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}, then {pair[1]}")
def test_what_was_saved_is_there_and_the_run_goes_on(
    pair: tuple[str, str], loaded: dict[tuple[str, str], list[dict[str, Any]]]
) -> None:
    ranks = loaded[pair]
    assert [rank["wrong"] for rank in ranks] == [[] for _ in ranks]
    assert len({rank["loss"] for rank in ranks}) == 1  # leaders of all replicas have the weights
    assert ranks[0]["loss"] == pytest.approx(ranks[0]["expected"], rel=1e-12)
    for rank in ranks:
        assert rank["worst"] < 1e-12, rank["worst"]


@pytest.mark.parametrize("name", ["adam A 2x2", "B 2x2", "C 2x2", "D 2x2"])
def test_rows_share_what_they_hold_alike(name: str, saved: Any) -> None:
    sizes = [sum(size for _, size in rank["listed"]) for rank in saved[name]]
    assert max(sizes) < 1.15 * sum(sizes) / len(sizes), sizes


def test_some_ranks_hold_no_matrix(saved: Any) -> None:
    without = [
        rank
        for rank in saved["C 1x8 merged"]
        if not any(name.startswith("optimizer.momentum") for name, _ in rank["listed"])
    ]
    assert len(without) == 5
