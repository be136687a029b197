"""Groups that do not train, or not whole: what is gathered again, what is kept of them, and what
waits for a member without a gradient. The oracle is plain autograd in one process.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamuon.runtime import Runtime, RuntimeConfig, shard
from megamuon.runtime.config import OptimizerSettings
from tests.support.call_order import record
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks
from tests.support.scenarios import WIDTH, Block

F64 = torch.float64
LR, STEPS = 0.05, 3


class Towers(nn.Module):
    """A frozen tower of three blocks, and three that train, above it or with adapters beside."""

    def __init__(self, idle: int = -1) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block() for _ in range(3))
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 1)
        if idle >= 0:
            self.blocks[idle].idle = nn.Parameter(torch.ones(WIDTH))  # in no computation
        for parameter in self.tower.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor, region: bool = False) -> Tensor:
        def lower(x: Tensor) -> Tensor:
            for block in self.tower:
                x = block(x)
            return self.blocks[0](x)

        x = checkpoint(lower, x, use_reentrant=False) if region else lower(x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


def build(idle: int = -1) -> Towers:
    torch.manual_seed(3)
    return Towers(idle).to(F64)


def sharded(stage: int, idle: int = -1, collectives: str = "grouped") -> Runtime:
    config = RuntimeConfig(
        zero_stage=stage,
        collectives=collectives,
        compute_dtype=F64,
        reduce_dtype=F64,
        master_dtype=F64,
        unit_threshold=50,
        optimizer=OptimizerSettings(matrices="sgd", clip=0.0),
        check_collective_order=True,
    )
    return shard(build(idle), layers=(Block,), config=config)


def inputs(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(4, WIDTH, generator=generator, dtype=F64)


def trained(world: int) -> dict[str, Tensor]:
    """The weights after all steps, of one process."""
    model = build()
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=LR, momentum=0.9)
    for step in range(STEPS):
        for rank in range(world):
            (model(inputs(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def run_tower(rank: int, world: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for stage in (2, 3):
        for collectives in ("grouped", "ready"):
            runtime = sharded(stage, collectives=collectives)
            said, gathers = record(runtime), []
            tower = [g.index for g in runtime.groups if g.name.startswith("tower.")]
            with torch.no_grad():  # an evaluation first decides nothing
                runtime.model(inputs(rank, 0))
            for step in range(STEPS):
                said.clear()
                loss = runtime.model(inputs(rank, step)).square().mean()
                alive = [runtime.groups[index].weights.alive for index in tower]
                loss.backward()
                gathers.append([said.count(f"g{index}") for index in tower])
                runtime.step(LR)
            name = f"{collectives}, ZeRO-{stage}"
            found[name] = (dict(runtime.full_parameters()), gathers, alive)
            found[f"memory of {name}"] = runtime.memory()
            runtime.close()
    return found


def run_needs(rank: int, world: int) -> dict[str, object]:
    """Gradients that come through the tower: from the first pass on, or later and on one rank."""
    found: dict[str, object] = {}
    for name, options in (("region", {"region": True}), ("inputs", {})):
        runtime, counts = sharded(3), []
        said = record(runtime)
        for step in range(2):
            said.clear()
            x = inputs(rank, step).requires_grad_(name == "inputs" and rank == 0)
            runtime.model(x, **options).square().mean().backward()
            counts.append([said.count(f"g{g.index}") for g in runtime.groups if not g.trainable])
            runtime.step(LR)
        found[name] = counts
        runtime.close()
    runtime = sharded(3)
    runtime.model(inputs(rank, 0)).square().mean().backward()
    runtime.step(LR)
    x = inputs(rank, 1).requires_grad_(rank == 1)
    try:
        runtime.model(x).square().mean().backward()
        found["error"] = ""
    except RuntimeError as error:
        found["error"] = str(error)
    runtime.clear_gradients()
    runtime.model(inputs(rank, 2)).square().mean().backward()
    found["norm after it"] = runtime.step(LR).gradient_norm
    runtime.close()
    return found


def run_idle(rank: int, world: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Groups whose slots are alive at the same time, at most, and reductions before the end of the
    pass, where a member of block 0 or 5 is in no computation, on rank 1 with a layer left out.
    """
    found = {}
    for stage in (2, 3):
        for idle in (-1, 0, 5):
            runtime = sharded(stage, idle)
            model = runtime.model
            for _ in range(2):
                alive: set[int] = set()
                most = 0

                def seen(lives: bool, index: int, alive: set[int] = alive) -> None:
                    nonlocal most
                    (alive.add if lives else alive.discard)(index)
                    most = max(most, len(alive))

                for group in runtime.groups:
                    group.gradients.watch = lambda lives, index=group.index: seen(lives, index)
                model(inputs(rank, 0)).square().mean().backward()
                runtime.step(LR)
            # Ranks that differ: the last block is left out on one.
            if rank == 1:
                kept, model.blocks = model.blocks, model.blocks[:5]
            model(inputs(rank, 1)).square().mean().backward()
            if rank == 1:
                model.blocks = kept
            runtime.step(LR)
            found[stage, idle] = most
            runtime.close()
    return found


def work(rank: int, world: int) -> dict[str, object]:
    return {
        "tower": run_tower(rank, world),
        "needs": run_needs(rank, world),
        "idle": run_idle(rank, world),
    }


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run_ranks(work, 2, timeout=240.0)


@pytest.mark.parametrize("name", [f"{c}, ZeRO-{s}" for c in ("grouped", "ready") for s in (2, 3)])
def test_a_frozen_tower_is_gathered_once(name: str, results: list[dict]) -> None:
    wanted = trained(2)
    for result in results:
        weights, gathers, alive = result["tower"][name]
        assert gathers == [[1, 1, 1]] * STEPS
        assert alive == [False] * 3  # when the backward pass begins
        for parameter, value in wanted.items():
            assert (weights[parameter] - value).abs().max() < 1e-9, parameter


@pytest.mark.parametrize("name", [f"{c}, ZeRO-{s}" for c in ("grouped", "ready") for s in (2, 3)])
def test_what_does_not_train_is_kept_once(name: str, results: list[dict]) -> None:
    frozen = sum(p.numel() for p in build().parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in build().parameters() if p.requires_grad)
    held = [result["tower"][f"memory of {name}"] for result in results]
    assert sum(memory["masters"] for memory in held) == 8 * trained
    assert sum(memory["frozen_weights"] for memory in held) == 8 * frozen


def run_narrow(rank: int, world: int, replicas: int) -> dict[str, object]:
    """BF16 with FP32 masters: what a frozen tower keeps, and what comes back from its state."""
    config = RuntimeConfig(compute_dtype=torch.bfloat16, unit_threshold=50)
    mesh = mesh_of(rank, world, replicas=replicas)
    options = {"layers": (Block,), "config": config, "mesh": mesh}
    runtime = shard(build().float(), **options)
    again = shard(build().float(), plan=runtime.plan, **options)
    whole = {n: p.detach() for n, p in build().float().named_parameters()}
    runtime.load_parameters(whole)
    pieces = {(t.name, t.offset): t.data for t in runtime.state(everywhere=True)}
    for piece in again.state(everywhere=True):
        piece.data.copy_(pieces[piece.name, piece.offset])
    again.loaded()
    found = {
        "notes": runtime.notes(),
        "memory": runtime.memory(),
        "dtypes": {t.name: t.data.dtype for t in runtime.state(optimizer=False)},
        "same": all(
            torch.equal(a, b) and torch.equal(a, whole[n].bfloat16())
            for (n, a), (_, b) in zip(
                runtime.full_parameters(), again.full_parameters(), strict=True
            )
        ),
        "held": sum(
            s.master.numel() for g in runtime.groups for s in g.local if s.sharded_gradient is None
        ),
    }
    with runtime.swapped([torch.zeros_like(master) for master in runtime.masters()]):
        found["swapped"] = [
            n for n, p in runtime.full_parameters() if torch.equal(p, whole[n].bfloat16())
        ]
    runtime.close()
    again.close()
    return found


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2)])
def test_frozen_weights_have_no_masters(ranks: int, replicas: int) -> None:
    results = run_ranks(run_narrow, ranks, replicas, timeout=120.0)
    frozen = {n: p.numel() for n, p in build().named_parameters() if not p.requires_grad}
    for result in results:
        assert result["same"]
        assert result["notes"][0].startswith(f"frozen weights: {sum(frozen.values()):,} elements")
        assert {result["dtypes"][n] for n in frozen if n in result["dtypes"]} <= {torch.bfloat16}
        assert set(frozen) <= set(result["swapped"])  # an average is of what trains
        assert "blocks.0.up.weight" not in result["swapped"]
    kept = sum(result["memory"]["frozen_weights"] for result in results)
    assert kept == (2 * sum(frozen.values()) if replicas == 1 else 0)  # else in leaders' copies
    assert sum(result["held"] for result in results) == sum(frozen.values())


def test_gradients_through_a_tower_gather_it_again(results: list[dict]) -> None:
    for result in results:
        # A recomputation reads the weights; so does the pass of rank 0 whose inputs want gradients.
        assert result["needs"]["region"] == [[2, 2, 2]] * 2
        assert result["needs"]["inputs"] == [[2, 2, 2]] * 2


def test_a_later_need_is_an_error_that_names_the_group(results: list[dict]) -> None:
    first, second = (result["needs"] for result in results)
    assert first["error"] == ""
    assert "'tower.2'" in second["error"] and "detach its inputs" in second["error"]
    assert first["norm after it"] == second["norm after it"] > 0


def test_a_silent_member_holds_nothing_back(results: list[dict]) -> None:
    for result in results:
        for (stage, idle), most in result["idle"].items():
            assert most == result["idle"][stage, -1] <= 4, (stage, idle, most)
