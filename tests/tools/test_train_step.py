"""tools/bench/train_step.py: its figures mean what they say."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megamuon.models import DecoderLayer
from megamuon.optim.newton_schulz import NewtonSchulzConfig, orthogonalize
from megamuon.runtime import OptimizerSettings, shard
from tests.support.runtime_config import plain_config
from tools.bench import train_step
from tools.bench.footprint import (
    formula_bytes,
    peak_growth,
    plan_bytes,
    reachable_tensors,
    storage_bytes,
)
from tools.bench.systems import Setting, build_model, newton_schulz_flops, step_flops

TINY = Setting(layers=2, hidden=64, ffn=96, sequences=2, positions=16)
KEYS = [
    "step_ratio_muon_vs_adamw",
    "step_ratio_vs_fsdp2_adamw",
    "resident_bytes_over_formula",
    "resident_bytes_over_plan",
]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on two ranks with tiny settings."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "QUICK", {"communication_heavy": TINY, "compute_heavy": TINY})
        arguments = ["--quick", "--ranks", "2", "--repeats", "2", "--json", str(path)]
        assert train_step.main(arguments) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_figures_are_numbers_of_the_stated_settings(document: dict[str, Any]) -> None:
    assert (document["ranks"], document["repeats"]) == (2, 2)
    assert all(isinstance(document[key], float) and document[key] > 0 for key in KEYS)
    for key in KEYS[:2]:
        assert document[key] == document["settings"]["compute_heavy"][key]
    for key in ("d_over_c", "d_over_a", "c_over_a"):
        assert set(document[key]) == set(document["settings"])
        for name, entry in document["settings"].items():
            assert document[key][name] == entry[key] > 0
    for entry in document["settings"].values():
        for seconds in entry["seconds"].values():
            parts = seconds["forward"] + seconds["backward"] + seconds["optimizer"]
            assert 0 < seconds["total"] <= 2 * parts


def test_both_adamw_systems_train_alike_and_losses_fall(document: dict[str, Any]) -> None:
    for entry in document["settings"].values():
        assert entry["largest_loss_difference_adamw"] < 1e-4
        for losses in entry["losses"].values():
            assert losses[-1] < losses[0] - 0.01
        assert entry["largest_loss_difference_d_and_c"] == 0  # bit for bit


def test_resident_bytes_follow_formula_and_plan(document: dict[str, Any]) -> None:
    assert document["resident_bytes_over_formula"] == pytest.approx(1, abs=0.02)
    assert document["resident_bytes_over_plan"] == pytest.approx(1, abs=0.001)
    assert document["line_d_resident_bytes_over_plan"] == pytest.approx(1, abs=0.001)
    for entry in document["settings"].values():
        memory = entry["memory"]
        for system in ("owner_muon", "owner_adamw"):
            resident = max(memory[system]["resident_bytes_of_ranks"])
            # Gathered layers and their gradients come on top while it trains, then activations.
            assert memory[system]["peak_runtime_bytes_worst_rank"] > 1.2 * resident
            assert (
                memory[system]["peak_bytes_worst_rank"]
                > memory[system]["peak_runtime_bytes_worst_rank"]
            )
        assert (
            memory["owner_muon"]["resident_bytes_mean"]
            < memory["owner_adamw"]["resident_bytes_mean"]
        )
        # Line D keeps its pool, and so has less to make in a step.
        assert memory["ready_muon"]["resident_bytes_over_formula"] > 1.1
        assert memory["ready_muon"]["peak_runtime_bytes_worst_rank"] > 0


def test_compute_heavy_has_under_five_percent_newton_schulz() -> None:
    runtime = shard(build_model(TINY.model), layers=(DecoderLayer,), config=plain_config())
    model, newton_schulz = step_flops(TINY, 2, runtime.plan)
    assert newton_schulz > model  # few tokens
    for name, most in (("compute_heavy", 0.05), ("communication_heavy", 1.0)):
        setting = train_step.SETTINGS[name]
        plan = shard(build_model(setting.model), layers=(DecoderLayer,)).plan
        model, newton_schulz = step_flops(setting, 4, plan)
        assert newton_schulz / (model + newton_schulz) < most


@pytest.mark.parametrize("form", ["standard", "gram", "auto"])
@pytest.mark.parametrize("shape", [(32, 32), (32, 80), (80, 32)])
def test_newton_schulz_flops_are_those_that_run(form: str, shape: tuple[int, int]) -> None:
    config = NewtonSchulzConfig(form=form, symmetric_kernel=False)  # type: ignore[arg-type]
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), config)
    assert newton_schulz_flops(*shape, config) == counter.get_total_flops()


@pytest.mark.parametrize("matrices", ["muon", "adam"])
def test_one_rank_holds_all_that_the_formula_says(matrices: str) -> None:
    config = plain_config(optimizer=OptimizerSettings(matrices=matrices))
    runtime = shard(build_model(TINY.model), layers=(DecoderLayer,), config=config)
    tokens = TINY.tokens(0, 0)
    runtime.model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
    runtime.step(1e-3)
    resident = storage_bytes(reachable_tensors(runtime))
    assert resident == plan_bytes(runtime.plan, 0)
    assert resident == pytest.approx(formula_bytes(runtime.plan.parameters, 1), rel=0.01)
    runtime.groups[1].weights.revive()  # a leak of a gathered layer is seen
    assert storage_bytes(reachable_tensors(runtime)) > plan_bytes(runtime.plan, 0)


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
