"""The rules of the runtime on order, triggers, touched parameters and released views.

Each scenario uses a model in a way that breaks one rule if it is not kept; its reduced gradients
must equal plain autograd's. ``test_life_of_buffers`` looks at the buffers themselves.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megamuon.runtime import Runtime, RuntimeConfig, shard
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks
from tests.support.runtime_config import plain_config
from tests.support.scenarios import SCENARIOS, Block, Scenario, Stack, build, expected, inputs

STEPS = 3
F64 = torch.float64


def config(zero_stage: int, collectives: str = "grouped") -> RuntimeConfig:
    """FP64 everywhere, units small enough that every block has several owners."""
    return plain_config(
        zero_stage=zero_stage,
        collectives=collectives,
        compute_dtype=F64,
        reduce_dtype=F64,
        master_dtype=F64,
        unit_threshold=50,
    )


def sharded(
    scenario: Scenario, zero_stage: int, collectives: str = "grouped", replicas: int = 1
) -> Runtime:
    return shard(
        build(scenario),
        layers=(Block,),
        config=config(zero_stage, collectives),
        mesh=mesh_of(dist.get_rank(), dist.get_world_size(), replicas=replicas),
    )


def reduced(runtime: Runtime) -> dict[str, Tensor]:
    """Whole reduced gradients, those that came late included, from all ranks' windows."""
    runtime.finish_reductions()
    runtime.engine.settle(1, False)
    mine = [
        (s.parameter.name, s.start, s.sharded_gradient.clone())
        for group in runtime.groups
        for s in group.local
        if s.sharded_gradient is not None
    ]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {p.name: torch.zeros(p.numel, dtype=F64) for p in runtime.plan.parameters}
    for name, start, part in (piece for pieces in everyone for piece in pieces):
        whole[name][start : start + len(part)] = part
    shapes = {p.name: p.shape for p in runtime.plan.parameters}
    return {name: flat.view(shapes[name]) for name, flat in whole.items()}


def run_scenarios(
    rank: int, world: int, replicas: int
) -> dict[tuple[str, int], list[tuple[dict, set[str]]]]:
    """Reduced gradients and touched names of all scenarios at both stages; weights never change."""
    found = {}
    for number, (name, scenario) in enumerate(SCENARIOS.items()):
        for stage in scenario.stages:
            runtime = sharded(scenario, stage, ("grouped", "per_owner")[number % 2], replicas)
            steps = []
            for step in range(STEPS):
                if step == 1:  # an evaluation in between must disturb nothing
                    with torch.no_grad():
                        scenario.loss(runtime.model, rank, 99)
                scenario.loss(runtime.model, rank, step).backward()
                gradients = reduced(runtime)
                result = runtime.step(0.0)
                trainable = {p.name for p in runtime.plan.parameters if p.trainable}
                steps.append((gradients, trainable - set(result.untouched)))
                assert not any(g.weights.alive and g.weights.layout.numel for g in runtime.groups)
                assert not any(g.gradients.alive and g.trainable for g in runtime.groups)
            runtime.close()
            found[name, stage] = steps
    return found if rank == 0 else {}


@pytest.fixture(scope="module", params=[(2, 1), (3, 1), (4, 2)], ids=str)
def results(request: pytest.FixtureRequest) -> tuple[int, dict]:
    world, replicas = request.param
    return world, run_ranks(run_scenarios, world, replicas, timeout=300.0)[0]


@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_those_of_plain_autograd(name: str, results: tuple[int, dict]) -> None:
    world, found = results
    for stage in SCENARIOS[name].stages:
        for step, (gradients, touched) in enumerate(found[name, stage]):
            wanted, used = expected(SCENARIOS[name], world, step)
            assert touched == used, (name, stage, step)
            for parameter, gradient in wanted.items():
                worst = (gradients[parameter] - gradient).abs().max()
                assert worst < 1e-12, (name, stage, step, parameter, float(worst))


def untouched_parameters(rank: int, world: int) -> dict[str, bool]:
    """A parameter that no rank uses keeps its weight (no decay) and its optimizer state (no
    momentum).
    """
    scenario = SCENARIOS["layer that nobody uses"]
    runtime = sharded(scenario, 3)
    before = {n: t.clone() for n, t in runtime.full_parameters()}
    for step in range(2):
        scenario.loss(runtime.model, rank, step).backward()
        runtime.step(0.1, 0.5)
    after = dict(runtime.full_parameters())
    state = {
        t.name: bool(t.data.any())
        for t in runtime.state()
        if t.name.startswith("optimizer.") and "blocks.1." in t.name
    }
    return {
        "still": all(torch.equal(before[n], after[n]) for n in before if "blocks.1." in n),
        "others moved": not any(
            torch.equal(before[n], after[n]) for n in before if "blocks.0." in n
        ),
        "state is zero": not any(state.values()),
    }


def life_of_buffers(rank: int, world: int) -> dict[str, object]:
    """What is alive when, and what a view's version counter says."""
    scenario = SCENARIOS["plain"]
    seen: dict[str, object] = {}
    for stage in (2, 3):
        runtime = sharded(scenario, stage)
        blocks = [g for g in runtime.groups if g.name.startswith("blocks.")]
        weight = runtime.model.blocks[0].up.weight
        version = weight._version
        loss = scenario.loss(runtime.model, rank, 0)
        seen[f"alive after forward, stage {stage}"] = [g.weights.alive for g in blocks]
        alive: list[list[bool]] = []
        runtime.model.blocks[0].up.weight.register_post_accumulate_grad_hook(
            lambda _, alive=alive, blocks=blocks: alive.append([g.weights.alive for g in blocks])
        )
        loss.backward()
        # When the first block's gradient is born, the last block's weights are gone already.
        seen[f"alive late in backward, stage {stage}"] = alive[0]
        seen[f"version unchanged, stage {stage}"] = weight._version == version
        seen[f"alive at the end, stage {stage}"] = [g.weights.alive for g in blocks]
        with torch.no_grad():
            scenario.loss(runtime.model, rank, 0)
        seen[f"alive after evaluation, stage {stage}"] = [g.weights.alive for g in blocks]
        seen[f"copied, stage {stage}"] = runtime.engine.copied_bytes
        seen[f"born, stage {stage}"] = runtime.engine.born_bytes
    try:
        runtime.model.state_dict()
    except RuntimeError as error:
        seen["state_dict"] = str(error)
    try:
        runtime.model.blocks[0].state_dict()
    except RuntimeError as error:
        seen["state_dict of a layer"] = str(error)
    frozen = sharded(SCENARIOS["frozen layer"], 3)
    loss = SCENARIOS["frozen layer"].loss(frozen.model, rank, 0)
    group = next(g for g in frozen.groups if g.name == "blocks.1")
    first: list[bool] = []
    frozen.model.stem.weight.register_post_accumulate_grad_hook(
        lambda _: first.append(group.weights.alive)
    )
    loss.backward()
    seen["frozen layer alive at the stem"] = first
    seen["frozen window"] = group.sharded_gradient.numel()
    return seen


# Groups gathered in one forward and in the backward at ZeRO-3; nothing more at ZeRO-2.  Group 0 is
# the root's loose parameters, or the tied table: both are kept.
GATHERED = {
    "plain": ([0, 1, 2, 3], [3, 2, 1]),
    "recompute": ([0, 1, 2, 3], [3, 2, 1]),
    "recompute to the end": ([0, 1, 2, 3], [3, 2, 1]),
    "frozen matrices and norms below a trained one": ([0, 1, 2, 3], [3, 2, 1]),
    "opaque outputs of foreign operations": ([0, 1, 2, 3], []),
    "tied table": ([0, 1, 2], [2, 1]),
}


def gathers(rank: int, world: int) -> dict[tuple[int, str], list[int]]:
    """Which groups are gathered, in order, in one forward and backward."""
    counted = {}
    for name in GATHERED:
        for stage in SCENARIOS[name].stages:
            runtime = sharded(SCENARIOS[name], stage)
            SCENARIOS[name].loss(runtime.model, rank, 0).backward()  # freezes the order
            runtime.step(0.0)
            calls: list[int] = []
            original = runtime.engine.transport.all_gather_v
            tables = {id(g.gather_table): g.index for g in runtime.groups}

            def count(buffer, table, calls=calls, original=original, tables=tables):  # noqa: ANN001, ANN202
                calls.append(tables[id(table)])
                return original(buffer, table)

            runtime.engine.transport.all_gather_v = count
            SCENARIOS[name].loss(runtime.model, rank, 1).backward()
            counted[stage, name] = calls
    return counted


def reentrant(rank: int, world: int) -> str:
    runtime = sharded(SCENARIOS["plain"], 3)
    x = inputs(rank, 0).requires_grad_()
    out = runtime.model(x)
    second = checkpoint(runtime.model.blocks[0], x, use_reentrant=True)
    try:
        (out.sum() + second.sum()).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def failed_backward(rank: int, world: int) -> bool:
    """After a backward that raised, the next one works and gives the right gradients."""
    runtime = sharded(SCENARIOS["plain"], 3)
    out = runtime.model(inputs(rank, 0))

    def explode(_: Tensor) -> None:
        raise ArithmeticError("on purpose")

    handle = runtime.model.stem.register_forward_hook(
        lambda m, a, o: o.register_hook(explode) and None
    )
    out = runtime.model(inputs(rank, 0))
    with pytest.raises(ArithmeticError):
        out.square().sum().backward()
    handle.remove()
    runtime.clear_gradients()
    runtime.model(inputs(rank, 0)).square().sum().backward()
    got = reduced(runtime)
    wanted, _ = expected(SCENARIOS["plain"], world, 0)
    return all((got[n] - g).abs().max() < 1e-12 for n, g in wanted.items())


def frozen_order(rank: int, world: int) -> tuple[int, ...]:
    """Ranks that used the layers in different orders in the first pass take rank 0's."""
    runtime = sharded(SCENARIOS["plain"], 3)
    runtime.model(inputs(rank, 0), order=(2, 0, 1) if rank == 0 else (0, 1, 2)).sum().backward()
    return runtime.engine.forward_order.order


def work(rank: int, world: int) -> dict[str, object]:
    return {
        "untouched": untouched_parameters(rank, world),
        "life": life_of_buffers(rank, world),
        "gathers": gathers(rank, world),
        "order": frozen_order(rank, world),
        "failed": failed_backward(rank, world),
        "reentrant": reentrant(rank, world),
    }


@pytest.fixture(scope="module")
def rules() -> list[dict]:
    return run_ranks(work, 2, timeout=200.0)


def test_untouched_parameters_are_left_alone(rules: list[dict]) -> None:
    for result in rules:
        assert result["untouched"] == {
            "still": True,
            "others moved": True,
            "state is zero": True,
        }


def test_life_of_buffers(rules: list[dict]) -> None:
    for result in rules:
        life = result["life"]
        assert life["alive after forward, stage 2"] == [True] * 3
        assert life["alive after forward, stage 3"] == [False] * 3
        for stage in (2, 3):
            assert life[f"alive late in backward, stage {stage}"][2] is False
            assert life[f"alive at the end, stage {stage}"] == [False] * 3
            assert life[f"alive after evaluation, stage {stage}"] == [False] * 3
            assert life[f"version unchanged, stage {stage}"] is True
            # Norm gains and biases of norms are copied; all matrices are born in their slots.
            assert life[f"born, stage {stage}"] > 5 * life[f"copied, stage {stage}"] > 0
        assert "runtime.state()" in life["state_dict"]
        assert "runtime.state()" in life["state_dict of a layer"]
        assert life["frozen layer alive at the stem"] == [False]
        assert life["frozen window"] == 0


def test_each_group_is_gathered_once_or_twice(rules: list[dict]) -> None:
    for result in rules:
        for (stage, name), calls in result["gathers"].items():
            forward, backward = GATHERED[name]
            assert calls == forward + (backward if stage == 3 else []), (stage, name)


def test_the_order_is_rank_zeros(rules: list[dict]) -> None:
    assert rules[0]["order"] == rules[1]["order"]
    names = Stack.__name__  # groups: loose root parameters, then blocks 0, 1, 2
    assert rules[0]["order"] == (0, 3, 1, 2), names


def test_a_backward_that_raised_leaves_nothing_behind(rules: list[dict]) -> None:
    assert all(result["failed"] for result in rules)


def test_reentrant_checkpointing_is_refused(rules: list[dict]) -> None:
    assert all("use_reentrant=False" in result["reentrant"] for result in rules)
