"""The owner step: the norm counts each element once, non-finite gradients skip alike, one
collective, bf16.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamuon.matrices import Route
from megamuon.runtime import OptimizerSettings, Runtime, shard
from tests.support.ranks import run_ranks
from tests.support.runtime_config import plain_config
from tests.support.scenarios import SCENARIOS, Block, Tied, build, expected, tokens

F64 = torch.float64


def make(model: nn.Module, stage: int = 3, **settings: object) -> Runtime:
    defaults = {"compute_dtype": F64, "reduce_dtype": F64, "master_dtype": F64}
    config = plain_config(zero_stage=stage, unit_threshold=50, **{**defaults, **settings})  # type: ignore[arg-type]
    return shard(model, layers=(Block,), config=config)


def norms_and_clipping(rank: int, world: int) -> dict[str, float]:
    """The norm of a tied model with uneven slices, and what clipping does to the windows."""
    scenario = SCENARIOS["tied table"]
    runtime = make(build(scenario), optimizer=OptimizerSettings(clip=0.5))
    scenario.loss(runtime.model, rank, 0).backward()
    runtime.finish_reductions()
    norm = runtime._step._norm().norm
    runtime._step._clip(norm)
    clipped = runtime._step._norm().norm
    runtime.clear_gradients()
    return {"norm": norm, "clipped": clipped, "parameters": runtime.parameter_norm()}


def nonfinite(rank: int, world: int) -> dict[str, object]:
    """One rank's gradient of one matrix is infinite: all ranks skip and name it; nothing moves."""
    scenario = SCENARIOS["tied table"]
    runtime = make(build(scenario))
    before = {n: t.clone() for n, t in runtime.full_parameters()}
    handle = None
    if rank == world - 1:
        handle = runtime.model.blocks[1].down.register_forward_hook(
            lambda m, a, out: out * torch.tensor(1e300, dtype=F64) * 1e300
        )
    out = scenario.loss(runtime.model, rank, 0)
    if handle is not None:
        handle.remove()
    # The loss may overflow; what counts is that every rank takes part in the backward.
    out.backward()
    result = runtime.step(0.1, 0.1)
    after = dict(runtime.full_parameters())
    scenario.loss(runtime.model, rank, 1).backward()
    again = runtime.step(0.1, 0.1)
    return {
        "skipped": result.skipped,
        "named": result.nonfinite,
        "still": all(torch.equal(before[n], after[n]) for n in before),
        "recovered": not again.skipped,
    }


def collectives_of_a_step(rank: int, world: int) -> list[str]:
    """Names of the collectives that a step calls, counted by wrapping them."""
    scenario = SCENARIOS["tied table"]
    runtime = make(build(scenario))
    scenario.loss(runtime.model, rank, 0).backward()
    runtime.finish_reductions()
    called: list[str] = []
    originals = {}
    for name in ("all_reduce", "broadcast", "all_to_all_single", "reduce", "gather", "all_gather"):
        originals[name] = getattr(dist, name)

        def counted(*args: object, _name: str = name, **kwargs: object) -> object:
            called.append(_name)
            return originals[_name](*args, **kwargs)

        setattr(dist, name, counted)
    try:
        runtime.step(0.1, 0.1)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return called


def reduction_dtypes(rank: int, world: int) -> dict[str, float]:
    """BF16 compute: FP32 reduction upcasts at send; BF16 reduction still adds in FP32 on the
    owner.
    """
    errors = {}
    for name in ("grouped", "per_owner"):
        for reduce_dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(3)
            runtime = make(
                Tied(),
                stage=2,
                collectives=name,
                compute_dtype=torch.bfloat16,
                reduce_dtype=reduce_dtype,
                master_dtype=torch.float32,
            )
            slots: dict[str, torch.Tensor] = {}
            original = runtime.engine.reductions._gradients_to_send

            def keep(group, slots=slots, original=original):  # noqa: ANN001, ANN202
                sent = original(group)
                slots[group.name] = sent.clone()
                return sent

            runtime.engine.reductions._gradients_to_send = keep
            runtime.model(tokens(rank, 0)).logsumexp(-1).sum().backward()
            runtime.finish_reductions()
            worst = torch.zeros(())
            for group in runtime.groups:
                everyone = [torch.empty_like(slots[group.name]) for _ in range(world)]
                dist.all_gather(everyone, slots[group.name])
                total = sum(part.float() for part in everyone) / world
                held = group.reduce_table.shards.of(rank)
                mine = [total[s.offset : s.offset + s.numel] for s in held]
                if mine:
                    difference = (torch.cat(mine) - group.sharded_gradient).abs().max()
                    worst = torch.maximum(worst, difference)  # NaN stays
            errors[f"{name} {reduce_dtype}"] = float(worst)
            runtime.clear_gradients()
    return errors


def bf16_accumulation(rank: int, world: int) -> dict[str, object]:
    """Micro-batches kept on the rank in BF16 compute add up in an FP32 buffer that is reported."""
    torch.manual_seed(3)
    runtime = make(
        Tied(), compute_dtype=torch.bfloat16, reduce_dtype=torch.float32, master_dtype=torch.float32
    )
    with runtime.accumulate():
        runtime.model(tokens(rank, 0)).logsumexp(-1).sum().backward()
    kept = runtime.memory()["accumulators"]
    runtime.model(tokens(rank, 1)).logsumexp(-1).sum().backward()
    runtime.finish_reductions()
    once = {g.name: g.sharded_gradient.clone() for g in runtime.groups}
    after = runtime.memory()["accumulators"]
    runtime.clear_gradients()
    for step in (0, 1):
        runtime.model(tokens(rank, step)).logsumexp(-1).sum().backward()
    runtime.finish_reductions()
    worst = torch.stack(
        [
            (g.sharded_gradient - once[g.name]).abs().max()
            for g in runtime.groups
            if g.sharded_gradient.numel()
        ]
    ).max()
    return {"kept": kept, "after": after, "difference": float(worst)}


def forgotten_reduction(rank: int, world: int) -> float:
    """A step after micro-batches that were all kept reduces them first."""
    scenario = SCENARIOS["plain"]
    runtime = make(build(scenario), optimizer=OptimizerSettings(clip=0.0))
    with runtime.accumulate():
        scenario.loss(runtime.model, rank, 0).backward()
    return runtime.step(0.0).gradient_norm


def routes(rank: int, world: int) -> dict[str, str]:
    """A route function decides; its choices appear in the plan."""

    def route(name: str, parameter: nn.Parameter, module: nn.Module) -> Route | None:
        return Route.ADAMW_SHARDED if name.endswith("stem.weight") else None

    runtime = shard(
        build(SCENARIOS["plain"]),
        layers=(Block,),
        route=route,
        config=plain_config(
            compute_dtype=F64, reduce_dtype=F64, master_dtype=F64, unit_threshold=50
        ),
    )
    SCENARIOS["plain"].loss(runtime.model, rank, 0).backward()
    runtime.step(0.1)
    return {p.name: p.route.value for p in runtime.plan.parameters}


def work(rank: int, world: int) -> dict[str, object]:
    return {
        "norms": norms_and_clipping(rank, world),
        "nonfinite": nonfinite(rank, world),
        "collectives": collectives_of_a_step(rank, world),
        "dtypes": reduction_dtypes(rank, world),
        "accumulation": bf16_accumulation(rank, world),
        "forgotten": forgotten_reduction(rank, world),
        "routes": routes(rank, world),
    }


@pytest.fixture(scope="module", params=[1, 3])
def results(request: pytest.FixtureRequest) -> list[dict]:
    return run_ranks(work, request.param, timeout=200.0)


def test_each_element_counts_once_in_the_norm(results: list[dict]) -> None:
    gradients, _ = expected(SCENARIOS["tied table"], len(results), 0)
    wanted = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
    model = build(SCENARIOS["tied table"])
    weights = float(
        torch.stack([p.detach().square().sum() for p in model.parameters()]).sum().sqrt()
    )
    for result in results:
        assert result["norms"]["norm"] == pytest.approx(wanted, rel=1e-12)
        assert result["norms"]["clipped"] == pytest.approx(0.5, rel=1e-5)
        assert result["norms"]["parameters"] == pytest.approx(weights, rel=1e-12)


def test_a_nonfinite_gradient_skips_everywhere_and_is_named(results: list[dict]) -> None:
    for result in results:
        found = result["nonfinite"]
        assert found["skipped"] and found["still"] and found["recovered"]
        assert "blocks.0.up.weight" in found["named"]


def test_the_only_collective_of_a_step_is_the_norm(results: list[dict]) -> None:
    for result in results:
        assert result["collectives"] == (["all_reduce"] if len(results) > 1 else [])


def test_reductions_add_in_float32_on_the_owner(results: list[dict]) -> None:
    for result in results:
        for name, error in result["dtypes"].items():
            # per_owner in FP32 lets Gloo choose the order of additions; everything else is exact.
            limit = 1e-6 if name == "per_owner torch.float32" else 0.0
            assert error <= limit, name


def test_accumulation_on_the_rank_is_in_float32_and_reported(results: list[dict]) -> None:
    for result in results:
        found = result["accumulation"]
        assert found["kept"] > 0 and found["after"] == 0
        assert found["difference"] < 1e-5


def test_a_step_reduces_what_was_only_kept(results: list[dict]) -> None:
    gradients, _ = expected(SCENARIOS["plain"], len(results), 0)
    wanted = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
    for result in results:
        assert result["forgotten"] == pytest.approx(wanted, rel=1e-12)


def test_the_route_function_wins(results: list[dict]) -> None:
    for result in results:
        assert result["routes"]["stem.weight"] == "adamw_sharded"
        assert result["routes"]["head.weight"] == "matrix"


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="zero_stage=4: choose 1, 2 or 3"):
        plain_config(zero_stage=4)
    with pytest.raises(ValueError, match="float64 replaces every dtype or none"):
        plain_config(compute_dtype=F64)
    with pytest.raises(ValueError, match="whole matrices"):
        plain_config(owner_layout=False)
    dataclasses.replace(
        plain_config(), owner_layout=False, optimizer=OptimizerSettings(matrices="adam")
    )
