"""What a step sends for its matrices is what the compiled moves say, wherever matrices lie.

The second half gives slices an update that no line has yet: each matrix comes together on one rank
of each replica, or of all, and goes back. Nothing but the placements changes. Its oracles are the
single-process reference and, bit for bit, line B, where everybody puts everything together.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from megamuon.matrices import Route
from megamuon.mesh import Mesh
from megamuon.ownership.plan import OwnershipPlan
from megamuon.ownership.planner import build_plan
from megamuon.ownership.update_plan import Move, MoveKind, compile_update, matrices_of
from megamuon.placements import Axis, Owned, Placement, Shard
from tests.distributed.test_matrix_update import tiled
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks
from tools.reference_training import Training, batch_of, place_of, reference_run
from tools.sharded_training import Case, build

WORLD = 4
NARROW = Training(steps=1, dtype=torch.float32)
COUNTED = [
    Case(line=line, replicas=replicas, shards=WORLD // (replicas * tp), tp=tp, training=NARROW)
    for line in "ABCD"
    for replicas, tp in ((1, 1), (2, 1), (1, 2))
]
COUNTED.append(Case(line="M", shards=WORLD, training=NARROW))
EXPERTS = dataclasses.replace(NARROW, model="nano-moe")
COUNTED += [Case(line=line, shards=2, tp=2, training=EXPERTS) for line in "BC"]

Sent = dict[tuple[str, str], int]  # bytes by operation and axis


def one_step(case: Case, mesh: Mesh, runtime: Any, step: int = 0) -> Any:
    place, places = mesh.sample_rank, mesh.sample_ranks
    tokens, labels = (place_of(part, place, places) for part in batch_of(step, case.training))
    runtime.model(tokens, labels=labels).mean().backward()
    runtime.traffic.reset()
    return runtime.step(case.training.lr, case.training.wd)


def sent_for_matrices(runtime: Any) -> Sent:
    return {
        (operation, axis): count["bytes"]
        for operation, axes in runtime.traffic.as_dict().items()
        for axis, count in axes.items()
        if operation.startswith("matrix_")
    }


def planned(moves: Sequence[Move]) -> Sent:
    found: Sent = {}
    for move in moves:
        there = move.kind in (MoveKind.GATHER, MoveKind.TO_OWNER)
        key = ("matrix_gather" if there else "matrix_scatter", str(move.axis))
        found[key] = found.get(key, 0) + move.nbytes
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def total(ranks: Sequence[Sent]) -> Sent:
    return {key: sum(sent.get(key, 0) for sent in ranks) for sent in ranks for key in sent}


# --- every line ----------------------------------------------------------------------------------


def counted(rank: int, world: int) -> list[tuple[Sent, Sent]]:
    """Counted by this rank, and planned for all, of each case."""
    results = []
    for case in COUNTED:
        mesh = mesh_of(rank, world, replicas=case.replicas, tp=case.tp)
        runtime, _ = build(case, mesh)
        result = one_step(case, mesh, runtime)
        # An expert that saw no token is left alone, and moves nowhere.
        used = [p for p in runtime.plan.parameters if p.name not in result.untouched]
        update = compile_update(matrices_of(used), runtime.plan.topology.sizes, torch.float32)
        results.append((sent_for_matrices(runtime), planned(update.moves)))
        runtime.close()
    return results


@pytest.fixture(scope="module")
def counts() -> list[list[tuple[Sent, Sent]]]:
    return run_ranks(counted, WORLD, timeout=240.0)


@pytest.mark.parametrize("index", range(len(COUNTED)), ids=[case.name for case in COUNTED])
def test_a_step_sends_what_the_moves_say(index: int, counts: list) -> None:
    case = COUNTED[index]
    everyone = [ranks[index] for ranks in counts]
    wanted = everyone[0][1]
    assert total([sent for sent, _ in everyone]) == wanted
    axes = {"shard"} if case.line == "B" else set()
    axes |= {"tp"} if case.tp > 1 and case.line != "A" else set()
    assert {axis for _, axis in wanted} == axes


# --- slices that come together on one rank -------------------------------------------------------

WIDE = Training(steps=3)
OPTIMIZERS = ("muon", "shampoo")
# replicas, shards, tp, and whether one rank of all replicas works on a matrix
GRIDS = ((1, 4, 1, False), (2, 2, 1, False), (1, 2, 2, False), (2, 2, 1, True), (2, 2, 2, False))


def on_one_rank(plan: OwnershipPlan, of_all: bool) -> OwnershipPlan:
    """Each matrix, which lies in slices, is updated on the shard with the fewest elements so far,
    largest first.
    """
    held = [0] * plan.topology.shards
    found = {}
    matrices = [p for p in plan.parameters if p.route is Route.MATRIX]
    for number, p in enumerate(sorted(matrices, key=lambda p: (-p.numel, p.name))):
        shard = held.index(min(held))
        held[shard] += p.numel
        axes: dict[Axis, Any] = {Axis.SHARD: Owned(shard)}
        if isinstance(p.compute.on(Axis.TP), Shard):
            axes[Axis.TP] = Owned(number % plan.topology.tp)
        if of_all:
            axes[Axis.REPLICATE] = Owned(number % plan.topology.replicas)
        assert isinstance(p.storage.on(Axis.SHARD), Shard)
        found[p.name] = dataclasses.replace(p, update=Placement.of(axes))
    placed = tuple(found.get(p.name, p) for p in plan.parameters)
    return dataclasses.replace(plan, parameters=placed)


def trained(case: Case, mesh: Mesh) -> dict[str, Any]:
    runtime, _ = build(case, mesh)
    norms = [one_step(case, mesh, runtime, s).gradient_norm for s in range(case.training.steps)]
    sent = sent_for_matrices(runtime)
    matrices = runtime._step.matrices
    result = {
        "norms": norms,
        "weights": {name: whole.clone() for name, whole in runtime.full_parameters()},
        "state": [dataclasses.replace(p, data=p.data.clone()) for p in runtime.state()],
        "works on": set(matrices.wholes),
        "sent": sent,
        "planned": planned([move for plan in matrices.plans for move in plan.moves]),
    }
    runtime.close()
    return result


def together(rank: int, world: int, grids: Sequence[tuple[int, int, int, bool]]) -> list[tuple]:
    """Line B's run and that of matrices on one rank, for each optimizer and grid."""
    results = []
    module: Any = importlib.import_module("megamuon.runtime.shard")
    for optimizer in OPTIMIZERS:
        for replicas, shards, tp, of_all in grids:
            training = dataclasses.replace(WIDE, optimizer=optimizer)
            case = Case(line="B", replicas=replicas, shards=shards, tp=tp, training=training)
            mesh = mesh_of(rank, world, replicas=replicas, tp=tp)
            gathered = trained(case, mesh)

            def owned(*arguments: Any, all_: bool = of_all, **settings: Any) -> OwnershipPlan:
                return on_one_rank(build_plan(*arguments, **settings), all_)

            module.build_plan = owned
            results.append((gathered, trained(case, mesh)))
            module.build_plan = build_plan
    return results


@pytest.fixture(scope="module")
def runs() -> Mapping[tuple[str, tuple[int, int, int, bool]], list[tuple[dict, dict]]]:
    """By optimizer and grid, what each rank has of both runs."""
    found = {}
    for world in (4, 8):
        grids = [grid for grid in GRIDS if grid[0] * grid[1] * grid[2] == world]
        everyone = run_ranks(together, world, grids, timeout=300.0)
        keys = [(optimizer, grid) for optimizer in OPTIMIZERS for grid in grids]
        found |= {key: [rank[i] for rank in everyone] for i, key in enumerate(keys)}
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_slices_that_one_rank_puts_together(optimizer: str, grid: tuple, runs: Mapping) -> None:
    replicas, shards, tp, of_all = grid
    everyone = runs[optimizer, grid]
    gathered, ours = everyone[0]
    assert ours["norms"] == gathered["norms"]
    for name, whole in gathered["weights"].items():
        assert torch.equal(ours["weights"][name], whole), name
    _, norms, weights = reference_run(dataclasses.replace(WIDE, optimizer=optimizer))
    assert ours["norms"] == pytest.approx(norms, rel=0, abs=1e-9)
    for name, whole in weights.items():
        assert (ours["weights"][name] - whole).abs().max() < 1e-9, name

    assert total([own["sent"] for _, own in everyone]) == ours["planned"]
    axes = {axis for _, axis in ours["planned"]}
    assert axes == {"shard"} | ({"tp"} if tp > 1 else set()) | ({"replicate"} if of_all else set())

    # The state of the whole is where the whole is worked on, and a checkpoint has it once.
    working = 1 if of_all else replicas
    for name in set().union(*(own["works on"] for _, own in everyone)):
        workers = sum(name in own["works on"] for _, own in everyone)
        assert workers in (working, working * tp), name
    assert sum(len(own["works on"]) for _, own in everyone) < sum(
        len(all_["works on"]) for all_, _ in everyone
    )
    stored, wanted = (
        tiled([piece for rank in everyone for piece in rank[which]["state"]]) for which in (1, 0)
    )
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[name], wanted[name]) for name in wanted)
