"""What users do to a sharded model beside training: read, write, copy, load, average.

Each idiom of torch works or raises an error that says what to call; none ends the process, none
passes in silence. All checks of one layout share one start of the ranks.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.runtime import OptimizerSettings, Runtime, shard
from megamuon.runtime.released import ReleasedWeightError
from megamuon.runtime.replicas import ReplicaMismatchError
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks
from tests.support.runtime_config import plain_config
from tests.support.scenarios import Block, Stack, inputs

F64 = torch.float64
# (line, ZeRO stage, replicas); D trains until its pool is open.
LAYOUTS = [("C", 3, 1), ("C", 2, 2), ("C", 1, 1), ("D", 3, 1), ("A", 3, 1), ("A", 2, 2)]


class Counting(Stack):
    """A model with state beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.training:
            self.seen = self.seen + 1
        return super().forward(self.norm(x) + self.table)


def build(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return Counting().to(F64)


def make(line: str, stage: int, replicas: int, model: nn.Module | None = None) -> Runtime:
    mesh = mesh_of(dist.get_rank(), dist.get_world_size(), replicas=replicas)
    config = plain_config(
        zero_stage=stage,
        collectives="ready" if line == "D" else "grouped",
        compute_dtype=F64,
        reduce_dtype=F64,
        master_dtype=F64,
        unit_threshold=50,
        optimizer=OptimizerSettings(matrices="adam" if line == "A" else "muon"),
    )
    make = fully_shard_model if line == "A" else shard
    return make(model or build(), layers=(Block,), config=config, mesh=mesh)  # type: ignore[return-value]


def train(runtime: Runtime, steps: int = 1) -> None:
    for step in range(steps):
        runtime.model(inputs(runtime.rank, step)).square().sum().backward()
        runtime.step(0.01)


def whole(runtime: Runtime) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in runtime.full_parameters()}


def idioms(model: nn.Module) -> dict[str, Callable[[], object]]:
    """Each would read released memory, or write what nobody would ever train on."""
    p = model.blocks[0].up.weight
    parameters = list(model.parameters())

    def add() -> None:
        with torch.no_grad():
            p.add_(1)

    return {
        "norm": p.norm,
        "tolist": p.tolist,
        "numpy": lambda: p.detach().numpy(),
        "item": lambda: model.head.bias.item(),
        "compare": lambda: p == p,
        "index": lambda: p[0],
        "arithmetic": lambda: [q * 2 for q in parameters],
        "stack": lambda: torch.stack([p, p]),
        "list norm": lambda: torch._foreach_norm(parameters),
        "vector": lambda: nn.utils.parameters_to_vector(parameters),
        "a layer's part alone": lambda: model.blocks[0].up(torch.ones(1, 6, dtype=F64)),
        "data": lambda: p.data.copy_(torch.zeros(p.shape)),
        "add": add,
        "initialise": lambda: nn.init.normal_(p),
        "set item": lambda: p.__setitem__(0, 1.0),
        "list multiply": lambda: torch._foreach_mul_(parameters, 0.5),
        "out": lambda: torch.ones(p.shape, dtype=F64, out=p),
        "broadcast": lambda: dist.broadcast(p, 0),
        "from vector": lambda: nn.utils.vector_to_parameters(torch.zeros(999), parameters),
        "load": lambda: model.load_state_dict(Stack().state_dict(), strict=False),
        "load a child": lambda: model.blocks.load_state_dict(Stack().blocks.state_dict()),
        "state dict": model.state_dict,
        "state dict of a child": model.blocks.state_dict,
        "deepcopy": lambda: copy.deepcopy(model),
        "deepcopy of a child": lambda: copy.deepcopy(model.blocks),
        "deepcopy of a weight": lambda: copy.deepcopy(p),
        "average": lambda: torch.optim.swa_utils.AveragedModel(model),
        "save": lambda: torch.save(model, io.BytesIO()),
        "pickle of a weight": lambda: pickle.dumps(p),
        "to": lambda: model.to(torch.bfloat16),
        "half": model.half,
        "cpu": model.cpu,
        "share": model.share_memory,
        "freeze": lambda: model.requires_grad_(False),
        "freeze one": lambda: setattr(p, "requires_grad", False),
        "gradient": lambda: p.grad,
        "clip": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        "torch's optimizer": lambda: torch.optim.SGD(parameters, lr=0.1).step(),
        "zero_grad of a child": model.blocks[0].norm.zero_grad,
        "hook": lambda: p.register_hook(print),
        "autograd": lambda: torch.autograd.grad(model(inputs(0, 0)).sum(), parameters),
    }


def refusals(runtime: Runtime, line: str, stage: int) -> list[str]:
    """Idioms that did not raise what they should have."""
    wrong = []
    reading = {"norm", "tolist", "item", "compare", "index", "arithmetic", "stack", "list norm"}
    reading |= {"vector", "a layer's part alone", "numpy"}
    for name, idiom in idioms(runtime.model).items():
        try:
            idiom()
        except ReleasedWeightError as error:
            if "runtime." not in str(error) and "shard" not in str(error):
                wrong.append(f"{name}: no advice in {error}")
        else:
            if not (stage == 1 and name in reading):  # resident and current: it may be read
                wrong.append(f"{name}: passed")
        if name in ("autograd",):
            runtime.clear_gradients()
    text = f"{runtime.model.head.weight!r} {runtime.model.head.weight}"
    if "sharded" not in text:
        wrong.append(f"print: {text}")
    p = runtime.model.head.weight
    if (p.shape, p.dtype, p.numel(), hash(p)) != (torch.Size([1, 6]), F64, 6, id(p)):
        wrong.append("questions about shape and kind")
    runtime.model.zero_grad()  # clears
    if runtime.model.requires_grad_(True) is not runtime.model:
        wrong.append("requires_grad_ that changes nothing")
    return wrong


def refusals_of_fsdp2(runtime: Runtime) -> list[str]:
    """DTensors are read and written as such; what would be lost or misread is refused."""
    model, wrong = runtime.model, []
    for name in ("load", "load a child", "deepcopy", "average", "save", "to", "half", "share"):
        try:
            idioms(model)[name]()
        except ReleasedWeightError:
            continue
        wrong.append(name)
    before = whole(runtime)
    with torch.no_grad():
        model.head.weight.add_(1)  # the shard itself
    after = whole(runtime)
    if not torch.equal(after["head.weight"], before["head.weight"] + 1):
        wrong.append("add_ on a DTensor")
    with torch.no_grad():
        model.head.weight.sub_(1)
    model.head.weight.requires_grad_(False)
    try:
        runtime.step(0.0)
        wrong.append("freeze")
    except ReleasedWeightError:
        model.head.weight.requires_grad_(True)
    return wrong


def weights_in_hands(runtime: Runtime) -> dict[str, object]:
    """load_parameters, gathered and swapped."""
    seen: dict[str, object] = {}
    model, before = runtime.model, whole(runtime)
    with runtime.gathered():
        seen["read"] = all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        seen["vector"] = nn.utils.parameters_to_vector(model.parameters()).numel()
    with runtime.gathered(model.blocks[1], write=True), torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
        nn.init.ones_(model.blocks[1].norm.bias)
    after = whole(runtime)
    seen["written"] = torch.equal(
        after["blocks.1.up.weight"], 2 * before["blocks.1.up.weight"]
    ) and bool((after["blocks.1.norm.bias"] == 1).all())
    seen["others stay"] = all(torch.equal(after[n], before[n]) for n in before if "ks.1." not in n)
    for write in (False, True):
        try:
            with runtime.gathered(write=write), torch.no_grad():
                model.head.weight.add_(dist.get_rank() if write else 1)
            seen[f"lost {write}"] = "passed"
        except ReleasedWeightError as error:
            seen[f"lost {write}"] = str(error)
    average = [torch.zeros_like(master) for master in runtime.masters()]
    with runtime.swapped(average), torch.no_grad():
        seen["swapped"] = bool((model(inputs(0, 0)) == 0).all())
    seen["swapped back"] = all(torch.equal(after[n], t) for n, t in whole(runtime).items())
    values = {
        n: torch.randn(t.shape, generator=torch.Generator().manual_seed(1))
        for n, t in build().state_dict().items()
    }
    values["seen"] = torch.tensor(7)
    runtime.load_parameters(values)
    loaded = whole(runtime)
    seen["loaded"] = all(torch.equal(loaded[n], values[n].to(F64)) for n in loaded)
    seen["buffers loaded"] = int(model.seen) == 7 and torch.equal(
        model.norm.running_mean, values["norm.running_mean"].to(F64)
    )
    values = {n: t + 1 for n, t in values.items()}
    runtime.load_parameters(values if dist.get_rank() == 1 else None, source_rank=1)
    loaded = whole(runtime)
    seen["sent"] = all(torch.equal(loaded[n], values[n].to(F64)) for n in loaded)
    for wrong in ("missing", "unexpected", "shape", "ranks"):
        given = dict(values)
        if wrong == "missing":
            del given["head.weight"]
        elif wrong == "unexpected":
            given["tail"] = torch.ones(1)
        elif wrong == "shape":
            given["head.weight"] = torch.ones(3, 6)
        else:
            given["head.weight"] = given["head.weight"] + dist.get_rank()
        try:
            runtime.load_parameters(given)
            seen[wrong] = "passed"
        except (ValueError, ReplicaMismatchError) as error:
            seen[wrong] = str(error)
    train(runtime)
    return seen


def printed_recipe() -> str:
    """README's lines about weights in a user's hands."""
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    return next(t for t in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "swapped" in t)


def recipe(runtime: Runtime) -> dict[str, object]:
    """Runs it as printed."""
    names: dict[str, object] = {
        "torch": torch,
        "runtime": runtime,
        "model": runtime.model,
        "state_dict": build(7).state_dict(),
        "evaluate": lambda model: model(inputs(0, 0)).sum().item(),
    }
    exec(printed_recipe(), names)
    return {"norms": len(names["norms"]), "loss": names["loss"]}  # type: ignore[arg-type]


def work(rank: int, world: int, layouts: list) -> list[dict[str, object]]:
    results = []
    for line, stage, replicas in layouts:
        runtime = make(line, stage, replicas)
        train(runtime, 4 if line == "D" else 1)
        found: dict[str, object] = {"pool": getattr(runtime, "opened", None) is not None}
        with torch.no_grad():
            runtime.model(inputs(rank, 9))  # resident weights are current
        found["refusals"] = (
            refusals_of_fsdp2(runtime) if line == "A" else refusals(runtime, line, stage)
        )
        found |= weights_in_hands(runtime)
        found["recipe"] = recipe(runtime)
        runtime.close()
        results.append(found)
    return results


@pytest.fixture(scope="module")
def results() -> list[list[dict[str, object]]]:
    return run_ranks(work, 2, LAYOUTS, timeout=280.0)


@pytest.mark.parametrize("place", range(len(LAYOUTS)), ids=[str(each) for each in LAYOUTS])
def test_weights_in_a_users_hands(place: int, results: list) -> None:
    for rank, ranks in enumerate(results):
        found = ranks[place]
        assert found["pool"] == (LAYOUTS[place][0] == "D")
        assert found["refusals"] == []
        for name in (
            "read",
            "written",
            "others stay",
            "swapped",
            "swapped back",
            "loaded",
            "buffers loaded",
            "sent",
        ):
            assert found[name] is True, (name, rank)
        assert found["vector"] == sum(p.numel() for p in build().parameters())
        assert found["recipe"]["norms"] == len(list(build().parameters()))
        assert found["recipe"]["loss"] == pytest.approx(build(7)(inputs(0, 0)).sum().item())
        assert "write=True" in found["lost False"] and "rank 1" in found["lost True"]
        assert "missing: head.weight" in found["missing"]
        assert "unexpected: tail" in found["unexpected"]
        assert "head.weight is (3, 6)" in found["shape"]
        assert "head.weight on rank 1" in found["ranks"]
