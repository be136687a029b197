"""Modules that compute in FP32 inside a BF16 model: every line against one process.

The oracle keeps FP32 masters, rounds what is no island to BF16 for each forward pass, adds the
gradients of the ranks in FP32 and takes SGD's step with momentum.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.matrices import RoutingError, collect
from megamuon.ownership.estimate import LineShape, resident_formula, traffic_formula
from megamuon.runtime import OptimizerSettings, RuntimeConfig, TrainableRuntime, shard
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks

WIDTH, LR, STEPS, RANKS = 24, 0.05, 3, 4
BF16, FP32 = torch.bfloat16, torch.float32


class Island(nn.Module):
    """A map in FP32, whatever comes in."""

    logical_dtype = FP32

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, out)

    def forward(self, x: Tensor) -> Tensor:
        assert self.map.weight.dtype is self.map.bias.dtype is FP32
        return self.map(x.float()).tanh()


class Layer(nn.Module):
    """Two maps, one of them an island."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), Island()

    def forward(self, x: Tensor) -> Tensor:
        assert self.inner.weight.dtype is x.dtype is BF16
        return x + self.inner(x).tanh() * self.gate(x).to(BF16)


class Model(nn.Module):
    """Six layers with islands, the first frozen, and a head that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = Island(4)
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(5)
    return Model()


def inputs(place: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * place + step)
    return torch.randn(4, WIDTH, generator=generator).to(BF16)


def is_island(name: str) -> bool:
    return ".gate." in name or name.startswith("head.")


def oracle() -> dict[str, Tensor]:
    """The masters after all steps."""
    model = build()
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(master) for name, master in masters.items()}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data if is_island(name) else parameter.data.to(BF16)
    for step in range(STEPS):
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for place in range(RANKS):
            model(inputs(place, step)).square().mean().backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] += parameter.grad.float()
                    parameter.grad = None
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                momentum[name] = 0.9 * momentum[name] + sums[name] / RANKS
                masters[name] -= LR * momentum[name]
            parameter.data.copy_(masters[name])
    return masters


# name: (replicas, line of the estimate, settings)
RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp, grouped": (1, "C", {}),
    "fsdp, ready": (1, "D", {"collectives": "ready"}),
    "fsdp, ZeRO-2, p2p": (1, "C", {"collectives": "p2p", "zero_stage": 2}),
    "hsdp, grouped": (2, "C", {}),
    "hsdp, ready, ZeRO-2": (2, "D", {"collectives": "ready", "zero_stage": 2}),
    "hsdp, ZeRO-1": (2, "C", {"zero_stage": 1}),
    "slices": (1, "B", {"owner_layout": False}),
    "FSDP2": (1, "A", {"owner_layout": False}),
    "FSDP2 of two replicas": (2, "A", {"owner_layout": False, "zero_stage": 2}),
}


def built(rank: int, name: str) -> TrainableRuntime:
    replicas, line, settings = RUNS[name]
    config = RuntimeConfig(
        **{"collectives": "grouped", **settings},
        compute_dtype=BF16,
        unit_threshold=50,
        optimizer=OptimizerSettings(matrices="sgd", clip=0.0),
    )
    mesh = mesh_of(rank, RANKS, replicas=replicas)
    make = fully_shard_model if line == "A" else shard
    return make(build(), layers=(Layer,), config=config, mesh=mesh)


def forms(runtime: TrainableRuntime, name: str) -> dict[str, Any]:
    """What the estimate says of a step and of what stays."""
    _, line, settings = RUNS[name]
    stage = settings.get("zero_stage", 3)
    shape = LineShape(line=line, zero_stage=stage, compute=2)
    return {
        "traffic formula": traffic_formula(runtime.plan, shape),
        "resident formula": resident_formula(runtime.plan, shape),
    }


def run(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in RUNS:
        runtime = built(rank, name)
        place = runtime.mesh.place
        for step in range(STEPS):
            runtime.model(inputs(place, step)).square().mean().backward()
            runtime.finish_reductions()
            if step < STEPS - 1:
                runtime.step(LR)
        memory = runtime.memory()
        runtime.traffic.reset()
        runtime.step(LR)
        runtime.model(inputs(place, 0)).square().mean().backward()
        runtime.finish_reductions()
        sent = runtime.traffic.as_dict()
        shown = dict(runtime.full_parameters())
        masters = {
            stored.name: (stored.offset, stored.data.clone())
            for stored in runtime.state(everywhere=True)
            if stored.name in shown
        }
        found[name] = {
            "masters": masters,
            "dtypes": {key: value.dtype for key, value in shown.items()},
            "sent": sent,
            "memory": memory,
            **forms(runtime, name),
        }
        runtime.close()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run, RANKS)


@pytest.mark.parametrize("name", RUNS)
def test_every_line_equals_one_process(results: list[dict[str, Any]], name: str) -> None:
    wanted, seen = oracle(), set()
    for rank in results:
        for key, (offset, data) in rank[name]["masters"].items():
            first = offset[0] if offset else 0
            part = wanted[key][first : first + len(data)]
            if not key.startswith("layers.0."):  # frozen ones are kept as they are gathered
                torch.testing.assert_close(data, part, rtol=0, atol=2e-6)
            seen.add(key)
        for key, dtype in rank[name]["dtypes"].items():
            assert dtype is (FP32 if is_island(key) else BF16)
    assert seen == wanted.keys()


@pytest.mark.parametrize("name", RUNS)
def test_bytes_are_those_of_the_estimate(results: list[dict[str, Any]], name: str) -> None:
    replicas, line, settings = RUNS[name]
    sent: dict[tuple[str, str], int] = {}
    for rank in results:
        for operation, axes in rank[name]["sent"].items():
            for axis, counted in axes.items():
                sent[operation, axis] = sent.get((operation, axis), 0) + counted["bytes"]
    wanted = dict(results[0][name]["traffic formula"])
    if settings.get("zero_stage", 3) == 3:  # the frozen layer is gathered once; the forms say twice
        frozen = WIDTH * WIDTH + WIDTH
        wanted["gather", "shard"] -= replicas * (RANKS // replicas - 1) * frozen * (2 + 4)
    if name == "FSDP2":  # it prefetches the frozen layer, and gathers the head's bias twice
        wanted["gather", "shard"] += (RANKS - 1) * (frozen * 2 + 4 * 4)
    headers = 16 * 22 if line == "C" and replicas > 1 else 0  # of published parameters
    for key, nbytes in wanted.items():
        more = headers if key[0] == "publish" else 0
        assert sent[key] == nbytes + more, key
    held = [rank[name]["memory"] for rank in results]
    kinds = ("masters", "frozen_weights", "leader_copies")
    kept = sum(memory.get(kind, 0) for memory in held for kind in kinds)
    if settings.get("zero_stage") != 1:  # whole weights for life come on top, aligned
        formula = results[0][name]["resident formula"]["parameters"] * RANKS
        copies = sum(bool(memory["leader_copies"]) for memory in held)
        assert 0 <= kept - formula <= copies * 26 * 32  # headers and alignment


def test_islands_are_groups_of_their_own() -> None:
    runtime = shard(build(), layers=(Layer,), config=RuntimeConfig(compute_dtype=BF16))
    names = [group.name for group in runtime.groups]
    expected = [f"layers.{i}{dtype}" for i in range(6) for dtype in ("", "@float32")]
    assert sorted(names) == sorted(["@float32", *expected])
    for group in runtime.groups:
        wide = group.name.endswith("@float32")
        assert group.weights.raw.dtype is group.gradients.raw.dtype is (FP32 if wide else BF16)


def test_another_dtype_is_refused_by_name() -> None:
    model = build()
    model.layers[2].gate.logical_dtype = torch.float16
    with pytest.raises(RoutingError, match=r"layers.2.gate declares logical_dtype = torch.float16"):
        collect(model, layers=(Layer,))
