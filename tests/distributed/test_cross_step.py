"""The cross-step publish in a training run: late messages, evaluations, skipped and loaded steps.

Every run is compared with one that publishes synchronously, bit for bit.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.leader_copies import StaleCopyError
from megamuon.runtime import Runtime, shard
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks, run_ranks_outcomes
from tests.support.runtime_config import plain_config
from tests.support.scenarios import SCENARIOS, Block, build

STEPS = 6
REPLICAS = 2


def sharded(rank: int, world: int, *, publish: str, name: str = "plain", stage: int = 3) -> Runtime:
    config = plain_config(zero_stage=stage, unit_threshold=50, publish=publish)
    return shard(
        build(SCENARIOS[name]).float(),
        layers=(Block,),
        config=config,
        mesh=mesh_of(rank, world, replicas=REPLICAS),
    )


def numbers(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 6, generator=generator)


def delay_sends(runtime: Runtime, rank: int) -> None:
    """Owners send late, by different times on different ranks and parameters."""
    publisher = runtime.engine.publication.publisher
    send, pause = publisher.publish, random.Random(rank)

    def late(index: int) -> None:
        time.sleep(pause.choice((0.0, 0.0, 0.01, 0.04)))
        send(index)

    publisher.publish = late


def losses_of(runtime: Runtime, rank: int, *, spoil: int | None = None) -> list[float]:
    """Losses of training and of an evaluation after each step; ``spoil``: a step whose gradient is
    not finite on one rank, so that all skip it.
    """
    seen = []
    for step in range(STEPS):
        loss = runtime.model(numbers(rank, step)).square().mean()
        (loss * float("nan") if step == spoil and rank == 1 else loss).backward()
        result = runtime.step(0.05, 0.1)
        assert result.skipped == (step == spoil)
        with torch.no_grad():
            seen += [loss.item(), runtime.model(numbers(rank, 99)).sum().item()]
    return seen


def untouched_layers(rank: int, world: int) -> bool:
    """A layer that no rank uses is not published; used again later, it is where it was."""
    runtime = sharded(rank, world, publish="async")
    for step in range(3):
        runtime.model(numbers(rank, step), order=(0, 2)).square().mean().backward()
        runtime.step(0.05)
    publication = runtime.engine.publication
    names = [p.name for p in runtime.plan.parameters]
    held = {names[i]: version for i, version in publication.expected.items()}
    still = all(version == 0 for name, version in held.items() if "blocks.1." in name)
    moved = all(version == 3 for name, version in held.items() if "blocks.0." in name)
    runtime.model(numbers(rank, 9)).square().mean().backward()
    runtime.step(0.05)
    runtime.close()
    return still and moved


def loading(rank: int, world: int) -> bool:
    """Masters written from outside reach the leaders of all replicas before the next forward."""
    runtime = sharded(rank, world, publish="async")
    runtime.model(numbers(rank, 0)).square().mean().backward()
    runtime.step(0.05)
    for piece in runtime.state(optimizer=False, everywhere=True):
        piece.data.fill_(0.125)
    runtime.loaded()
    same = all(bool((whole == 0.125).all()) for _, whole in runtime.full_parameters())
    runtime.close()
    return same


def stale_copy(rank: int, world: int) -> str:
    """A leader whose copy has gone back by one update says so by number."""
    runtime = sharded(rank, world, publish="sync")
    for step in range(2):
        runtime.model(numbers(rank, step)).square().mean().backward()
        runtime.step(0.05)
    publication = runtime.engine.publication
    victim = next(iter(publication.expected))
    dist.barrier()
    publication.copies.stamp(victim, 1)
    group = next(g for g in runtime.groups if victim in publication._of_group[g.index])
    try:
        publication.wait(group)
    except StaleCopyError as error:
        return str(error)
    return ""


def work(rank: int, world: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for stage in (2, 3):
        for spoil in (None, 2):
            runs = []
            for publish, late in (("sync", False), ("async", False), ("async", True)):
                runtime = sharded(rank, world, publish=publish, stage=stage)
                if late:
                    delay_sends(runtime, rank)
                losses = losses_of(runtime, rank, spoil=spoil)
                pending = runtime.engine.publication.publisher.pending()
                runtime.close()
                weights = dict(runtime.full_parameters())
                runs.append((losses, weights, pending))
            found[f"stage {stage}, spoil {spoil}"] = all(
                run[0] == runs[0][0]
                and all(torch.equal(run[1][n], w) for n, w in runs[0][1].items())
                for run in runs
            )
            found[f"sync leaves nothing in flight, {stage}, {spoil}"] = runs[0][2] == 0
    found["untouched"] = untouched_layers(rank, world)
    found["loading"] = loading(rank, world)
    found["stale"] = stale_copy(rank, world)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run_ranks(work, 4, timeout=200.0)


def test_late_messages_change_no_bit(results: list[dict]) -> None:
    for result in results:
        for name, value in result.items():
            if name != "stale":
                assert value is True, name


def test_a_stale_copy_is_found_by_its_number(results: list[dict]) -> None:
    for result in results:
        assert "holds version 1, wanted version 2" in result["stale"]


def killed_during_publish(rank: int, world: int) -> None:
    """The owner of something dies before it sends."""
    runtime = sharded(rank, world, publish="async")
    publisher = runtime.engine.publication.publisher
    if rank == 0:
        send, calls = publisher.publish, []

        def die(index: int) -> None:
            calls.append(index)
            if len(calls) == 2:
                os._exit(9)
            send(index)

        publisher.publish = die
    for step in range(2):
        runtime.model(numbers(rank, step)).square().mean().backward()
        runtime.step(0.05)


def test_the_others_name_a_peer_that_died_while_publishing() -> None:
    started = time.monotonic()
    outcomes = run_ranks_outcomes(killed_during_publish, 4, timeout=60.0, grace=20.0)
    assert not outcomes[0].finished
    assert time.monotonic() - started < 30
    shard = outcomes[2].error  # rank 2 leads what rank 0 owns
    assert "publish of " in shard and "replica 0" in shard, shard
