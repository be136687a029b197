"""The symmetric pool on several ranks: one plan for all, and passes that differ from rank to rank.

Every scenario of ``tests/support/scenarios.py`` trains twice, inside a pool that opens after the
second step and on the heap; windows, losses and weights must agree bit for bit. The memory is a
stand-in: nothing is shared between the ranks, transfers go over the grouped transport.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.agreement import PlanMismatchError
from megamuon.runtime import Runtime, shard
from megamuon.runtime.pool import PoolPlan
from megamuon.runtime.pool_opening import PoolRecording
from tests.support.grids import mesh_of
from tests.support.pool import Opening
from tests.support.ranks import run_ranks
from tests.support.runtime_config import plain_config
from tests.support.scenarios import SCENARIOS, Block, Scenario, build

STEPS = 6
F64 = torch.float64


def sharded(scenario: Scenario, zero_stage: int, replicas: int) -> Runtime:
    config = plain_config(
        zero_stage=zero_stage,
        collectives="grouped",
        compute_dtype=F64,
        reduce_dtype=F64,
        master_dtype=F64,
        unit_threshold=50,
    )
    mesh = mesh_of(dist.get_rank(), dist.get_world_size(), replicas=replicas)
    return shard(build(scenario), layers=(Block,), config=config, mesh=mesh)


def trained(
    scenario: Scenario, stage: int, rank: int, replicas: int, *, pooled: bool
) -> tuple[list[Tensor], Runtime]:
    """Losses and windows of all steps, and the weights at the end."""
    runtime = sharded(scenario, stage, replicas)
    if pooled:
        Opening(runtime, dist.group.WORLD)
    found: list[Tensor] = []
    for step in range(STEPS):
        if step in (1, 3):
            with torch.no_grad():
                found.append(scenario.loss(runtime.model, rank, 99))
        loss = scenario.loss(runtime.model, rank, step)
        loss.backward()
        runtime.step(0.01)
        found += [loss.detach(), *(group.sharded_gradient.clone() for group in runtime.groups)]
    found += [whole.clone() for _, whole in runtime.full_parameters()]
    runtime.close()
    return found, runtime


def run_scenarios(rank: int, world: int, replicas: int) -> dict[tuple[str, int], dict[str, object]]:
    """Every scenario at its stages (on replicas: at the last), in the pool and on the heap."""
    found = {}
    for name, scenario in SCENARIOS.items():
        for stage in scenario.stages if replicas == 1 else scenario.stages[-1:]:
            wanted, _ = trained(scenario, stage, rank, replicas, pooled=False)
            got, runtime = trained(scenario, stage, rank, replicas, pooled=True)
            pool = runtime.opened
            assert pool is not None
            found[name, stage] = {
                "same": len(got) == len(wanted) and all(map(torch.equal, got, wanted)),
                "digest": pool.plan.digest,
                "windows": pool.plan.sharded,
                "window bytes": {g.index: g.sharded_gradient.nbytes for g in runtime.groups},
                "pooled": len(pool.plan.sizes),
                "left out": runtime.left_out_of_pool(),
                "set aside": pool.bytes_set_aside,
            }
    return found


@pytest.fixture(scope="module", params=[(2, 1), (4, 2)], ids=str)
def results(request: pytest.FixtureRequest) -> list[dict]:
    world, replicas = request.param
    return run_ranks(run_scenarios, world, replicas, timeout=300.0)


def test_all_scenarios_train_to_the_same_bits_in_the_pool(results: list[dict]) -> None:
    wrong = [
        (rank, case)
        for rank, found in enumerate(results)
        for case, values in found.items()
        if not values["same"]
    ]
    assert wrong == []


def test_all_ranks_have_one_plan(results: list[dict]) -> None:
    for case, values in results[0].items():
        assert len({found[case]["digest"] for found in results}) == 1, case
        assert values["pooled"] > 2, case
        ends = sorted(values["windows"].values())
        for group, start in values["windows"].items():
            following = min((end for end in ends if end > start), default=None)
            most = max(found[case]["window bytes"][group] for found in results)
            assert following is None or start + most <= following, case


def test_ranks_that_differ_make_room_and_others_need_not(results: list[dict]) -> None:
    apart = {name for name in SCENARIOS if "on one rank" in name}
    for found in results:
        assert all(not v["set aside"] for (name, _), v in found.items() if name not in apart)
    moved = sum(values["set aside"] for found in results for values in found.values())
    assert moved > 0


def test_a_layer_that_nobody_uses_is_left_out(results: list[dict]) -> None:
    for found in results:
        reasons = found["layer that nobody uses", 3]["left out"]
        assert list(reasons) == ["blocks.1"]
        assert "received no gradient" in reasons["blocks.1"]


def disagree(rank: int, world: int) -> str:
    """One rank computes another plan than the others."""
    scenario = SCENARIOS["plain"]
    runtime = sharded(scenario, 3, 1)
    recording = PoolRecording(runtime.engine, dist.group.WORLD)
    runtime.use_pool(recording)
    for step in range(2):
        scenario.loss(runtime.model, rank, step).backward()
        runtime.step(0.0)
    assert recording.complete
    texts = PoolPlan.texts
    if rank == 1:
        PoolPlan.texts = lambda plan: texts(plan) | {"bytes": "7"}
    try:
        recording.plan()
    except PlanMismatchError as error:
        return str(error)
    finally:
        PoolPlan.texts = texts
        runtime.close()
    return ""


def test_another_plan_is_an_error_on_all_ranks() -> None:
    messages = run_ranks(disagree, 3, timeout=120.0)
    assert len(set(messages)) == 1
    assert "rank 1: pool bytes=" in messages[0] and "bytes=7 here" in messages[0]
    assert "rank 2" not in messages[0]
