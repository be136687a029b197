"""tools/bench/footprint.py and systems.py: what is counted is what is there, and what runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megamuon.matrices import Route
from megamuon.models import GPT
from megamuon.optim.newton_schulz import NewtonSchulzConfig, orthogonalize
from megamuon.ownership.estimate import LineShape, resident, resident_formula
from megamuon.runtime import OptimizerSettings, shard
from tests.support.runtime_config import plain_config
from tools.bench.footprint import peak_growth, reachable_tensors, storage_bytes
from tools.bench.systems import newton_schulz_flops
from tools.reference_training import model_config


@pytest.mark.parametrize("form", ["standard", "gram", "auto"])
@pytest.mark.parametrize("shape", [(32, 32), (32, 80), (80, 32)])
def test_newton_schulz_flops_are_those_that_run(form: str, shape: tuple[int, int]) -> None:
    config = NewtonSchulzConfig(form=form, symmetric_kernel=False)  # type: ignore[arg-type]
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), config)
    assert newton_schulz_flops(*shape, config) == counter.get_total_flops()


@pytest.mark.parametrize("matrices", ["muon", "adam"])
def test_one_rank_holds_what_its_plan_says_and_a_leak_is_seen(matrices: str) -> None:
    with torch.device("meta"):
        config = model_config("nano")
    model = GPT(config)
    settings = plain_config(optimizer=OptimizerSettings(matrices=matrices))
    runtime = shard(model, layers=GPT.layer_classes, config=settings)
    tokens = torch.randint(0, 256, (2, 17))
    runtime.model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
    runtime.step(1e-3)
    held = storage_bytes(reachable_tensors(runtime))
    shape = LineShape(line="C", zero_stage=3, compute=4, reduce=4)
    planned = sum(int(of_kind[0, 0]) for of_kind in resident(runtime.plan, shape).values())
    counters = 4 * sum(p.route is not Route.MATRIX for p in runtime.plan.parameters)
    assert held == planned + counters  # AdamW counts the steps of each parameter
    formula = sum(resident_formula(runtime.plan, shape).values())
    assert held == pytest.approx(formula, rel=0.01)
    runtime.groups[1].weights.revive()
    assert storage_bytes(reachable_tensors(runtime)) > held


@dataclass
class Holder:
    """Holds tensors in several ways; two are views of one storage."""

    tensor: Tensor
    nested: dict[str, list[tuple[Tensor, ...]]]
    module: nn.Module
    others: list[object] = field(default_factory=list)


def test_distinct_storages_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "__module__", "megamuon.somewhere")
    base = torch.zeros(100)
    linear = nn.Linear(4, 5, bias=False)
    linear.weight.grad = torch.zeros(5, 4)
    holder = Holder(base[:10], {"a": [(base[50:], torch.zeros(7))]}, linear)
    holder.others.append(holder)  # a cycle ends
    assert storage_bytes(reachable_tensors(holder)) == 4 * (100 + 7 + 20 + 20)
    base.untyped_storage().resize_(0)
    assert storage_bytes(reachable_tensors(holder)) == 4 * (7 + 20 + 20)


def test_the_peak_is_above_the_start_and_counts_storages_that_come_back() -> None:
    kept = torch.zeros(1 << 18)
    storage = kept.untyped_storage()
    storage.resize_(0)

    def action() -> None:
        short_lived = torch.ones(1 << 17)
        storage.resize_(1 << 20)
        del short_lived
        storage.resize_(0)
        torch.ones(1 << 17)

    assert peak_growth(action) == (1 << 20) + (1 << 19)
