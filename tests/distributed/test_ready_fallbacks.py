"""Where the fabric or its pool cannot be had, or the ranks would tell it different things."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamuon.agreement import PlanMismatchError
from megamuon.collectives import CollectiveError, symmetric
from megamuon.collectives.host_library import LibraryMissing, library
from megamuon.mesh import MeshError
from megamuon.runtime import Runtime, shard
from megamuon.runtime.pool_opener import PoolOpener
from tests.support.grids import mesh_of
from tests.support.ranks import Outcome, run_ranks_outcomes
from tests.support.runtime_config import plain_config
from tests.support.scenarios import SCENARIOS, Block, build

RANKS = 4
REPLICAS = 2
STEPS = 4  # the pool opens after the second
ODD = 1  # the rank on which something is wrong
LARGE = 2**50  # bytes that no machine has


def sharded(rank: int, collectives: str = "ready", **settings: Any) -> Runtime:
    torch.manual_seed(0)
    return shard(
        build(SCENARIOS["plain"]).float(),
        layers=(Block,),
        config=plain_config(unit_threshold=50, collectives=collectives, **settings),
        mesh=mesh_of(rank, RANKS, replicas=REPLICAS),
    )


def train(runtime: Runtime, rank: int) -> dict[str, Any]:
    """Losses, weights and what the user is told."""
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * rank + step)
        loss = runtime.model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        losses.append(float(loss))
        runtime.step(0.05)
    weights = {name: weight.clone() for name, weight in runtime.full_parameters()}
    result = {
        "losses": losses,
        "weights": weights,
        "notes": runtime.notes(),
        "opened": runtime.opened is not None,
    }
    runtime.close()
    return result


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (CollectiveError, MeshError, PlanMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- what is wrong on one rank -------------------------------------------------------------------


@contextmanager
def no_library(rank: int) -> Iterator[None]:
    def missing() -> None:
        raise LibraryMissing("the host library is not there: build it")

    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr(symmetric, "library", missing)
        yield


@contextmanager
def no_room_for(label: str, rank: int) -> Iterator[None]:
    """The system refuses this rank's segment of the memory ``label``."""
    create = library().create_segment

    def refused(name: str, nbytes: int) -> int:
        return create(name, LARGE if f"-{label}-" in name else nbytes)

    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr(library(), "create_segment", refused)
        yield


def other_table(rank: int) -> str:
    """A rank would tell its operators another table than the others do theirs."""
    runtime = sharded(rank)
    pool = runtime.pool
    assert isinstance(pool, PoolOpener)
    compare, group = pool._compare, runtime.groups[1]

    def altered(plan: Any) -> None:
        table = group.gather_table
        if rank == ODD:
            group.gather_table = replace(table, segments=table.segments[:-1])
        compare(plan)

    pool._compare = altered  # type: ignore[method-assign]
    return f"{group.name}\n" + error_of(lambda: train(runtime, rank))


def cases(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "line C": train(sharded(rank, "grouped"), rank),
        "line D": train(sharded(rank), rank),
    }
    for fabric in ("auto", "host"):
        for name, wrong in (
            ("library", no_library(rank)),
            ("control", no_room_for("control", rank)),
            ("pool", no_room_for("pool", rank)),
        ):
            with wrong:
                if fabric == "auto":
                    found[name] = train(sharded(rank), rank)
                else:
                    found[f"{name} required"] = error_of(
                        lambda: train(sharded(rank, fabric="host"), rank)
                    )
    slots = 4 if rank == ODD else 8
    found["ring_slots"] = error_of(lambda: sharded(rank, ring_slots=slots))
    found["table"] = other_table(rank)
    return found


def work(rank: int, world: int) -> dict[str, Any]:
    found = cases(rank)
    runtime = sharded(rank)
    for _ in range(STEPS):
        runtime.model(torch.ones(4, 6)).square().mean().backward()
        runtime.step(0.05)
    assert runtime.opened is not None
    dist.barrier()
    if rank == RANKS - 1:
        os._exit(9)
    found["killed"] = error_of(
        lambda: [
            (runtime.model(torch.ones(4, 6)).square().mean().backward(), runtime.step(0.05))
            for _ in range(STEPS)
        ]
    )
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    outcomes = run_ranks_outcomes(work, RANKS, timeout=150.0, grace=30.0)
    assert outcomes[-1].exit_code == 9, outcomes[-1]
    for outcome in outcomes[:-1]:
        assert outcome.finished, outcome
    return outcomes[:-1]


def same_training(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["losses"] == other["losses"] and all(
        torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items()
    )


def test_the_pool_opens_where_nothing_is_wrong(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        found = outcome.value
        assert found["line D"]["opened"]
        assert same_training(found["line D"], found["line C"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "library",
            "collectives: grouped calls instead of the ready fabric: symmetric memory 'probe': rank"
            f" {ODD}: the host library is not there: build it",
        ),
        (
            "control",
            "collectives: grouped calls instead of the ready fabric: symmetric memory 'control'"
            f" cannot be made\nrank {ODD}: shared segment ",
        ),
        (
            "pool",
            "collectives: grouped calls, the symmetric pool cannot be had: symmetric memory 'pool'"
            f" cannot be made\nrank {ODD}: shared segment ",
        ),
    ],
)
def test_training_goes_on_with_grouped_calls_and_says_why(
    outcomes: list[Outcome], name: str, said: str
) -> None:
    for outcome in outcomes:
        found = outcome.value
        assert not found[name]["opened"]
        assert same_training(found[name], found["line C"])
        (reason,) = [line for line in found[name]["notes"] if line.startswith(said)]
        assert name == "library" or f"/dev/shm cannot give {LARGE} bytes" in reason
        required = found[f"{name} required"]
        assert required.startswith("MeshError: --fabric host: symmetric memory "), required
        assert f"rank {ODD}: " in required


def test_ranks_that_differ_are_refused_by_all(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        slots = outcome.value["ring_slots"]
        assert slots.startswith("PlanMismatchError: the settings of the ranks differ: "), slots
        assert "ring_slots=8 on rank 0, ring_slots=4 here" in slots
        name, table = outcome.value["table"].split("\n")
        assert table.startswith("PlanMismatchError: the symmetric pools of the ranks differ: ")
        assert f"rank {ODD}: pool tables of {name!r}=" in table


def test_a_rank_that_dies_in_the_open_pool_is_named_with_the_group(
    outcomes: list[Outcome],
) -> None:
    for outcome in outcomes:
        text = outcome.value["killed"]
        assert text.startswith("CollectiveError: "), text
        at = r"(gather|reduce) of group '(blocks\.\d|loose parameters)', call \d+"
        assert re.search(rf"rank {RANKS - 1} died while rank \d stood at ({at}|publish of )", text)
