"""What becomes of a training run when its ranks disagree or one of them dies.

In every case each surviving rank must end by itself, in seconds, with an error that names the
operation; no rank may hang or train on wrong numbers.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megamuon.collectives import two_stage
from megamuon.collectives.p2p import ScheduleMismatchError
from megamuon.mesh import new_group
from megamuon.models import GPT
from megamuon.ownership import OwnershipPlan, PlannerSettings
from megamuon.runtime import Runtime, shard
from megamuon.sharding import apply_sharding, plan_sharding
from tests.support.grids import mesh_of
from tests.support.ownership import other_owners as moved_owners
from tests.support.ranks import Outcome, run_ranks_outcomes
from tests.support.reference import nano_config
from tests.support.runtime_config import plain_config
from tests.support.scenarios import SCENARIOS, Block, build

WORLD = 4
VICTIM = 3
SECONDS = 30.0
STEPS = 3
NAMED = re.compile(
    r"CollectiveError: "
    r"(gather|reduction|gradient norm|matrix_\w+ along tp|two-stage reduction, stage \d"
    r"|publish of [\w.]+)\b"
)


def sharded(rank: int, world: int, *, replicas: int = 2, **settings: Any) -> Runtime:
    return shard(
        build(SCENARIOS["plain"]).float(),
        layers=(Block,),
        config=plain_config(**{"unit_threshold": 50, **settings}),
        mesh=mesh_of(rank, world, replicas=replicas),
    )


def backward(runtime: Runtime, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * rank + step)
    runtime.model(torch.randn(4, 6, generator=generator)).square().mean().backward()


def train(runtime: Runtime, rank: int, between: Callable[[int], None] | None = None) -> None:
    """``between(step)`` is called after the backward pass and before the step."""
    for step in range(STEPS):
        backward(runtime, rank, step)
        if between is not None:
            between(step)
        runtime.step(0.05)
    runtime.close()


def die_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, but the process ends at its ``call``-th call, as if it were killed."""
    calls: list[None] = []

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            os._exit(9)
        return function(*arguments, **keywords)

    return replaced


def outcomes_of(function: Callable[..., None], *arguments: Any) -> list[Outcome]:
    """What becomes of all ranks; after the first end, the others have ``SECONDS`` for theirs."""
    outcomes = run_ranks_outcomes(function, WORLD, *arguments, timeout=200.0, grace=SECONDS)
    for outcome in outcomes:
        assert not outcome.finished, outcome
        assert outcome.error, f"rank {outcome.rank} hung\n{outcome.output}"
    return outcomes


# --- ranks that do not run the same plan (line M) ------------------------------------------------


def other_owners(rank: int, world: int, how: str) -> None:
    """Rank 1 comes to another plan, and the comparison of plans does not see it."""
    module: Any = importlib.import_module("megamuon.runtime.shard")
    settings: dict[str, Any] = {"planner": PlannerSettings(policy="role_greedy")}
    if how == "changed after the plans were compared":
        build_groups = module._build_groups  # the first thing that is made of the plan

        def change_then_build(plan: OwnershipPlan, *arguments: Any) -> Any:
            owners = tuple((owner + (rank == 1)) % world for owner in plan.owners)
            return build_groups(moved_owners(plan, owners), *arguments)

        module._build_groups = change_then_build
    else:
        module.exchange_plan = module.exchange_settings = lambda value, group: None
        settings = {"unit_threshold": 10**9 if rank == 1 else 50}
    began = time.monotonic()
    try:
        sharded(rank, world, replicas=1, collectives="p2p", **settings)
    except ScheduleMismatchError:
        assert time.monotonic() - began < SECONDS
        raise


@pytest.mark.parametrize("how", ["changed after the plans were compared", "never compared"])
def test_other_owners_on_one_rank_are_refused_by_all_before_a_byte_is_sent(how: str) -> None:
    for outcome in outcomes_of(other_owners, how):
        assert outcome.error.startswith("ScheduleMismatchError: "), outcome.error
        assert "ranks 0, 2, 3 have" in outcome.error and "rank 1 has" in outcome.error


# --- a leader that missed an update --------------------------------------------------------------


def stale_copy(rank: int, world: int) -> None:
    runtime = sharded(rank, world)
    publication = runtime.engine.publication
    for step in range(STEPS):
        backward(runtime, rank, step)
        runtime.step(0.05)
        if step == 1 and rank == VICTIM:
            publisher = publication.publisher
            received = [
                i for i, replica in publisher.owner_replicas.items() if replica != publisher.replica
            ]
            publisher.wait(received, publication.expected)  # the update has arrived
            publication.copies.stamp(received[-1], 1)  # and is undone
            print("undone:", publisher.names[received[-1]], flush=True)


def test_a_stale_copy_ends_the_run_before_anybody_computes_with_it() -> None:
    outcomes = outcomes_of(stale_copy)
    victim = outcomes[VICTIM]
    name = victim.output.split("undone: ")[1].splitlines()[0]
    assert victim.error.startswith(f"StaleCopyError: {name} ("), victim.error
    assert "holds version 1, wanted version 2" in victim.error, victim.error
    for outcome in outcomes:
        if outcome.rank != VICTIM:
            assert NAMED.match(outcome.error), outcome.error


# --- a rank that dies ----------------------------------------------------------------------------


def dies(rank: int, world: int, when: str) -> None:
    """Rank 3 dies in its second step."""
    runtime = sharded(rank, world)
    between = None
    last = 2 * len(runtime.groups)  # reduction of that step: no gather is under way any more
    if rank == VICTIM and when == "between backward and step":
        between = die_at(2, lambda step: None)
    elif rank == VICTIM and when == "inside the replica":
        transport = runtime.engine.transport
        transport.reduce_scatter_v = die_at(last, transport.reduce_scatter_v)
    elif rank == VICTIM and when == "along the rail":
        shard = two_stage._GlooRail
        shard.exchange = die_at(last, shard.exchange)
    elif rank == VICTIM:
        runtime._step._norm = die_at(2, runtime._step._norm)
    train(runtime, rank, between)


@pytest.mark.parametrize(
    "when", ["between backward and step", "inside the replica", "along the rail", "before the norm"]
)
def test_the_others_name_the_operation_in_which_they_lost_a_peer(when: str) -> None:
    outcomes = outcomes_of(dies, when)
    assert outcomes[VICTIM].exit_code == 9
    for outcome in outcomes[:VICTIM]:
        assert NAMED.match(outcome.error), outcome.error
    if when in ("inside the replica", "along the rail"):
        # In which stage a rank notices it first, and whether through a rank that gave up before it,
        # is a matter of time; tests/collectives/test_staged_work.py has the stages by name.
        assert any("two-stage reduction" in outcome.error for outcome in outcomes)


def dies_in_a_tp_exchange(rank: int, world: int) -> None:
    mesh = mesh_of(rank, world, tp=2)
    with torch.device("meta"):
        model, template = GPT(nano_config()), GPT(nano_config())
    plan = plan_sharding(model, tp=2)
    apply_sharding(model, plan, tp_rank=mesh.tp_rank, group=new_group(mesh, "tp"))
    runtime = shard(
        model,
        layers=GPT.layer_classes,
        config=plain_config(unit_threshold=2000),
        mesh=mesh,
        placements=plan.placements,
        initial=template.initialise_,
    )
    if rank == VICTIM:
        runtime.exchange.run = die_at(3, runtime.exchange.run)  # there, for the second group
    for _ in range(STEPS):
        tokens = torch.arange(17)[None]
        model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
        runtime.step(0.01)


def test_the_others_name_a_tp_exchange_in_which_they_lost_a_peer() -> None:
    outcomes = outcomes_of(dies_in_a_tp_exchange)
    assert outcomes[VICTIM].exit_code == 9
    for outcome in outcomes[:VICTIM]:
        assert NAMED.match(outcome.error), outcome.error
    assert "matrix_gather along tp" in outcomes[VICTIM - 1].error  # its tp partner
