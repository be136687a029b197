"""State beside the plan: what ranks start from, and the buffers of a model.

Ranks that start from other values than their peers stop and say where; buffers are placed, saved
and loaded on every line, as weights are. All checks share one start of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.agreement import PlanMismatchError
from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.checkpoint import CheckpointError, load, save
from megamuon.checkpoint.ranks import Ranks
from megamuon.runtime import OptimizerSettings, Runtime, shard
from megamuon.runtime.replicas import ReplicaMismatchError
from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks
from tests.support.runtime_config import plain_config
from tests.support.scenarios import Block, Stack, inputs

F64 = torch.float64


class Normed(Stack):
    """Running statistics, a counter, and a table that is computed, not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def reset_buffers(self) -> None:
        self.seen.zero_()
        self.table.copy_(torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.training:
            self.seen += 1
        return super().forward(self.norm(x) + self.table)


class Unfillable(Stack):
    """A buffer that no method can fill."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lost", torch.ones(3))


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.normal_(generator=generator)


def make(line: str, model: nn.Module, replicas: int = 1, **more: object) -> Runtime:
    config = plain_config(
        zero_stage=3,
        compute_dtype=F64,
        reduce_dtype=F64,
        master_dtype=F64,
        unit_threshold=50,
        optimizer=OptimizerSettings(matrices="adam"),
    )
    mesh = mesh_of(dist.get_rank(), dist.get_world_size(), replicas=replicas)
    build = fully_shard_model if line == "A" else shard
    return build(model, layers=(Block,), config=config, mesh=mesh, **more)  # type: ignore


def seeded(seed: int, kind: type[nn.Module] = Normed) -> nn.Module:
    torch.manual_seed(seed)
    return kind().to(F64)


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (ReplicaMismatchError, PlanMismatchError, ValueError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def drawn_apart(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(dist.get_rank() if "stem" in name else 1.0)


def differing(rank: int, line: str) -> dict[str, str]:
    other = seeded(3)
    other.norm.running_var += rank
    meta = rank == 1
    with torch.device("meta" if meta else "cpu"):
        half = Stack().to(F64)
    more = seeded(3)
    if rank == 1:
        more.register_buffer("extra", torch.ones(1))
    with torch.device("meta"):
        unfillable = Unfillable()
    return {
        "seeds": error_of(lambda: make(line, seeded(rank), replicas=2)),
        "buffers": error_of(lambda: make(line, other)),
        "names": error_of(lambda: make(line, more)),
        "initial": error_of(lambda: make(line, seeded(3), replicas=2, initial=drawn_apart)),
        "meta on one rank": error_of(lambda: make(line, half)),
        "unfillable": error_of(lambda: make(line, unfillable, initial=fill)),
    }


def work(rank: int, world: int, folder: str) -> dict[str, object]:
    found: dict[str, object] = {line: differing(rank, line) for line in "AC"}
    with torch.device("meta"):
        model = Normed().to(F64)
    runtime = make("C", model, initial=fill)
    found["filled"] = (
        bool((model.norm.running_var == 1).all()),
        int(model.seen),
        model.table.tolist(),
    )
    for step in range(2):
        model(inputs(rank, step)).square().sum().backward()
        runtime.step(0.01)
    path, ranks = Path(folder), Ranks.create()
    save(path, 1, runtime.state(), documents={}, ranks=ranks)
    first = model.norm.running_mean.clone()
    dist.broadcast(first, 0)  # the first rank's statistics are what is saved
    runtime.close()
    for line, replicas in (("A", 1), ("C", 2)):
        again = make(line, seeded(5), replicas=replicas)
        load(path, 1, again.state(everywhere=True), ranks=ranks)
        again.loaded()
        model = again.model
        found[f"loaded {line}"] = (int(model.seen), torch.equal(model.norm.running_mean, first))
        found[f"table {line}"] = model.table.tolist()
        again.close()
    plain = make("C", seeded(5, Stack))
    found["unexpected"] = error_of(lambda: load(path, 1, plain.state(everywhere=True), ranks=ranks))
    save(path, 2, plain.state(), documents={}, ranks=ranks)
    plain.close()
    again = make("C", seeded(5))
    found["missing"] = error_of(lambda: load(path, 2, again.state(everywhere=True), ranks=ranks))
    again.close()
    plain = make("A", seeded(6, Stack))
    load(path, 2, plain.state(everywhere=True), ranks=ranks)  # as before there were buffers
    plain.close()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_ranks(work, 2, str(tmp_path_factory.mktemp("saved")), timeout=200.0)


@pytest.mark.parametrize("line", "AC")
def test_ranks_that_start_apart_stop_and_say_where(line: str, results: list[dict]) -> None:
    for found in (result[line] for result in results):
        assert found["seeds"].startswith("ReplicaMismatchError")
        assert "stem.weight on rank 1 is not that of rank 0" in found["seeds"]
        assert "norm.running_var on rank 1" in found["buffers"]
        assert found["names"].startswith("PlanMismatchError")
        assert "buffers" in found["names"]
        assert "initial weights differ" in found["initial"] and "stem" in found["initial"]
        assert "weights=the model on rank 0, weights=the meta device" in found["meta on one rank"]
        assert "the buffer lost is on the meta device" in found["unfillable"]


def test_buffers_are_filled_saved_and_loaded_on_every_line(results: list[dict]) -> None:
    for found in results:
        assert found["filled"] == (True, 0, list(range(6)))
        for line in "AC":
            assert found[f"loaded {line}"] == (2, True)
            assert found[f"table {line}"] == list(range(6))


def test_buffer_names_that_do_not_fit_are_errors(results: list[dict]) -> None:
    for found in results:
        assert "norm.running_mean" in found["unexpected"]
        assert "norm.running_mean" in found["missing"]
