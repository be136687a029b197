"""Line A on models that are cut, odd or mixed: tensor parallelism, ranks without replicas, experts,
BF16, and the bytes that FSDP2 sends.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.matrices import Kind
from megamuon.mesh import new_group
from megamuon.models.gpt import GPT
from megamuon.optim import SgdConfig
from megamuon.placements import Axis, Partial, Placed, Placement, Shard
from megamuon.runtime import OptimizerSettings
from megamuon.runtime.shard import parameter_seed
from megamuon.sharding import apply_sharding, plan_sharding
from tests.support.fully_sharded import (
    Setting,
    advance,
    config,
    described,
    grid,
    pasted,
    worst,
)
from tests.support.ranks import run_ranks
from tests.support.reference import SEED, Case, batch_of, nano_config
from tests.support.runtime_config import plain_config

# --- tensor parallelism -------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    """Into a tensor-parallel region: gradients of the input are summed over the tp ranks."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    """Out of it: outputs are summed over the tp ranks."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Any) -> Tensor:
        inputs = inputs.clone()
        dist.all_reduce(inputs, group=group)
        return inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Block(nn.Module):
    """A cut MLP of odd sizes with a replicated gain inside the region (a partial gradient) and one
    outside.
    """

    logical_kinds = {"inner": Kind.VECTOR, "outer": Kind.VECTOR}  # noqa: RUF012

    def __init__(self, width: int, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.inner = nn.Parameter(torch.ones(5))
        self.outer = nn.Parameter(torch.ones(5))
        self.up = nn.Linear(5, width, bias=False)
        self.down = nn.Linear(width, 5, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        inside = hidden if self.group is None else _Enter.apply(hidden, self.group)
        out = self.down(torch.tanh(self.up(inside * self.inner)))
        out = out if self.group is None else _Leave.apply(out, self.group)
        return hidden + out * self.outer


class Stack(nn.Module):
    """Two blocks."""

    def __init__(self, width: int, group: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, group) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


WIDTH, BOUNDS = 7, (0, 4, 7)


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)


def stack_inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def stack_placements() -> dict[str, Placed]:
    places = {}
    rows, columns = (Placement.of({Axis.TP: Shard(dim, BOUNDS)}) for dim in (0, 1))
    for index in range(2):
        prefix = f"blocks.{index}"
        places[f"{prefix}.inner"] = Placed(shape=(5,), gradient=Placement.of({Axis.TP: Partial()}))
        places[f"{prefix}.up.weight"] = Placed(shape=(WIDTH, 5), compute=rows, gradient=rows)
        places[f"{prefix}.down.weight"] = Placed(
            shape=(5, WIDTH), compute=columns, gradient=columns
        )
    return places


def run_stack(rank: int, tp: int) -> dict[str, Any]:
    """Six steps on one replica of four ranks: with 2 tensor-parallel ranks behind each of 2, or
    none (then five replicas over four ranks leave the last without any).
    """
    mesh = grid(rank, 1, 4 // tp, tp=tp)
    width, group, placements = WIDTH, None, None
    if tp > 1:
        groups = [dist.new_group(list(ranks)) for ranks in mesh.groups_along("tp")]
        width = BOUNDS[mesh.tp_rank + 1] - BOUNDS[mesh.tp_rank]
        group, placements = groups[mesh.place], stack_placements()
    with torch.device("meta"):
        model = Stack(width, group)
    runtime = fully_shard_model(
        model, layers=(Block,), config=config(), mesh=mesh, placements=placements, initial=fill
    )
    norms = []
    for step in range(6):
        mine = stack_inputs(step).chunk(mesh.shards)[mesh.sample_rank]
        model(mine).square().mean().backward()
        norms.append(runtime.step(1e-2, 0.1).gradient_norm)
    return {
        "norms": norms,
        "state": described(runtime.state()),
        "norm": runtime.parameter_norm(),
        "whole": dict(runtime.full_parameters()),
    }


def stack_reference() -> tuple[list[float], dict[str, Tensor]]:
    model = Stack(WIDTH).to(torch.float64)
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(parameter_seed(SEED, name))
        fill(name, parameter.data, generator)
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    norms = []
    for step in range(6):
        model(stack_inputs(step)).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 1.0)))
        adamw.step()
        adamw.zero_grad()
    return norms, {n: p.detach() for n, p in model.named_parameters()}


# --- other decoders -----------------------------------------------------------------------------

DECODERS = {
    "untied": replace(nano_config(), tied_embeddings=False),
    "cut": nano_config(),  # by tensor parallelism
    "experts": replace(
        nano_config(),
        num_layers=1,
        num_experts=40,
        router_top_k=1,
        moe_ffn_hidden_size=5,
        moe_shared_expert_size=43,
    ),
}


def run_decoder(rank: int, name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps on 2 x 2 ranks, or 2 tensor-parallel ranks in each of 2: norms and whole
    weights.
    """
    tp = 2 if name == "cut" else 1
    mesh = grid(rank, 2, 2 // tp, tp)
    with torch.device("meta"):
        model, whole = GPT(DECODERS[name]), GPT(DECODERS[name])
    placements = None
    if tp > 1:
        plan = plan_sharding(model, tp=tp, sequence_parallel=True)
        apply_sharding(model, plan, tp_rank=mesh.tp_rank, group=new_group(mesh, "tp"))
        placements = plan.placements
    runtime = fully_shard_model(
        model,
        layers=GPT.layer_classes,
        config=config(),
        mesh=mesh,
        placements=placements,
        initial=whole.initialise_,
    )
    _, norms = advance(runtime, runtime.rank, mesh.sample_ranks, range(3), Setting(), wd=0.0)
    return norms, dict(runtime.full_parameters())


def mixed_precision(rank: int) -> dict[str, Any]:
    """BF16 compute and FP32 reductions on 2 x 2 ranks: dtypes, a loss that falls, bytes sent."""
    with torch.device("meta"):
        model = GPT(nano_config())
    runtime = fully_shard_model(
        model,
        layers=GPT.layer_classes,
        config=plain_config(
            compute_dtype=torch.bfloat16,
            seed=SEED,
            optimizer=OptimizerSettings(matrices="sgd", rest=SgdConfig(momentum=0.9)),
        ),
        mesh=grid(rank, 2, 2),
        initial=model.initialise_,
    )
    tokens, labels = (part[:, :4] for part in batch_of(0, Case()))
    losses = []
    for _ in range(3):
        loss = model(tokens[rank : rank + 1], labels=labels[rank : rank + 1]).mean()
        loss.backward()
        losses.append(float(loss))
        sent = runtime.traffic.as_dict()
        runtime.traffic.reset()
        runtime.step(0.1)
    padded = {
        part: sum(
            (p.shape[0] + p.shape[0] % 2) * p.numel // p.shape[0]
            for p in runtime.plan.parameters
            if bool(p.layer) == (part == "layers")
        )
        for part in ("layers", "rest")
    }
    whole = dict(runtime.full_parameters())
    return {
        "losses": losses,
        "sent": sent,
        "padded": padded,
        "masters": {p.data.dtype for p in runtime.state(optimizer=False, everywhere=True)},
        "gathered": {tensor.dtype for tensor in whole.values()},
    }


def work(rank: int, world: int) -> dict[str, Any]:
    """All that needs four ranks."""
    return {
        "stack": {tp: run_stack(rank, tp) for tp in (1, 2)},
        "decoders": {name: run_decoder(rank, name) for name in DECODERS},
        "bf16": mixed_precision(rank),
    }


@pytest.fixture(scope="module")
def everyone() -> list[dict[str, Any]]:
    return run_ranks(work, 4, timeout=240.0)


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_pieces_and_ranks_without_rows(everyone: list, tp: int) -> None:
    norms, weights = stack_reference()
    for values in everyone:
        ours = values["stack"][tp]["norms"]
        assert ours == pytest.approx(norms, rel=0, abs=1e-9)
    wholes = pasted([piece for values in everyone for piece in values["stack"][tp]["state"]])
    assert worst({name: wholes[name] for name in weights}, weights) < 1e-9
    assert all(wholes[f"optimizer.step.{name}"] == 6 for name in weights)
    norm = math.sqrt(sum(float(whole.square().sum()) for whole in weights.values()))
    assert everyone[0]["stack"][tp]["norm"] == pytest.approx(norm, rel=1e-9)
    assert worst(everyone[3]["stack"][tp]["whole"], weights) < 1e-9


@pytest.mark.parametrize("name", DECODERS)
def test_other_decoders(everyone: list, name: str) -> None:
    """Groups of their own for a table and a head; layers that tensor parallelism cuts; experts that
    some ranks give no token.
    """
    model = GPT(DECODERS[name]).to(torch.float64)
    for parameter, tensor in model.named_parameters():
        generator = torch.Generator().manual_seed(parameter_seed(SEED, parameter))
        model.initialise_(parameter, tensor.data, generator)
    named = dict(model.named_parameters())
    adamw = torch.optim.AdamW(named.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for step in range(3):
        tokens, labels = batch_of(step, Case())
        for part, target in zip(tokens.chunk(4), labels.chunk(4), strict=True):
            (model(part, labels=target).mean() / 4).backward()
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), 1.0)))
        adamw.step()
        adamw.zero_grad()
    for values in everyone:
        ours, weights = values["decoders"][name]
        assert ours == pytest.approx(norms, rel=0, abs=1e-9)
        assert worst(weights, {n: p.detach() for n, p in named.items()}) < 1e-9


def test_mixed_precision_and_sgd(everyone: list) -> None:
    for values in everyone:
        seen = values["bf16"]
        assert seen["losses"][-1] < seen["losses"][0]
        assert seen["masters"] == {torch.float32} and seen["gathered"] == {torch.bfloat16}


def test_bytes_are_counted(everyone: list) -> None:
    """Half of all to the other shard: layers gathered twice in BF16, the rest once, all reduced
    once in FP32; then each half once there and back between the replicas.
    """
    for values in everyone:
        seen, padded = values["bf16"], values["bf16"]["padded"]
        total = padded["layers"] + padded["rest"]
        sent = seen["sent"]
        assert sent["gather"]["shard"]["bytes"] == padded["layers"] * 2 + padded["rest"]
        assert sent["reduce"]["shard"]["bytes"] == total // 2 * 4
        assert sent["reduce"]["replicate"]["bytes"] == total // 2 * 4
        assert sent["norm"]["world"]["calls"] == 1
