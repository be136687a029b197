"""Plans of whole models: every parameter placed, cuts that fit together, errors with names."""

from __future__ import annotations

import dataclasses
import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megamuon.matrices import collect
from megamuon.models import GPT, PRESETS, GPTConfig, gpt_config_from_flags
from megamuon.placements import Axis, Partial, Placed, Placement, Shard
from megamuon.sharding import BoundaryType, Flow, Role, ShardingError, ShardingPlan, plan_sharding
from tests.support.models import GPT2, small_config

FLAGS: dict[str, Any] = {
    "kv_channels": None,
    "group_query_attention": False,
    "num_query_groups": 1,
    "rotary_base": 10000,
    "swiglu": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "init_method_std": 0.02,
}
RECOMPUTE: Any = SimpleNamespace(
    recompute_granularity=None,
    recompute_method=None,
    recompute_num_layers=None,
    recompute_modules=None,
)


def preset(name: str) -> GPTConfig:
    flags = {**FLAGS, **PRESETS[name]}
    multiple, vocabulary = flags["make_vocab_size_divisible_by"], flags["vocab_size"]
    return gpt_config_from_flags(
        SimpleNamespace(**flags),  # type: ignore[arg-type]
        padded_vocab_size=-(-vocabulary // multiple) * multiple,
        recompute=RECOMPUTE,
    )


def meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


@functools.cache
def preset_model(name: str) -> GPT:
    """Two layers of a preset, shared by tests: planning changes nothing."""
    return meta(dataclasses.replace(preset(name), num_layers=2))


def bounds(plan: ShardingPlan, name: str) -> tuple[int, tuple[int, ...]]:
    placed = plan.placements[name]
    cut = placed.compute.on(Axis.TP)
    assert isinstance(cut, Shard), name
    assert cut.bounds is not None
    assert placed.gradient == placed.compute == Placement.of({Axis.TP: cut})
    return cut.dim, cut.bounds


def partial(plan: ShardingPlan) -> set[str]:
    summed = Placement.of({Axis.TP: Partial()})
    return {name for name, placed in plan.placements.items() if placed.gradient == summed}


def test_nano_by_whole_groups_and_uneven() -> None:
    plan = plan_sharding(meta(preset("nano")), tp=2)
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    assert bounds(plan, attention + "q_proj.weight") == (0, (0, 40, 60))
    assert bounds(plan, attention + "q_proj.bias") == (0, (0, 40, 60))
    assert bounds(plan, attention + "k_proj.weight") == (0, (0, 20, 30))
    assert bounds(plan, attention + "v_proj.bias") == (0, (0, 20, 30))
    assert bounds(plan, attention + "o_proj.weight") == (1, (0, 40, 60))
    assert bounds(plan, mlp + "gate_proj.weight") == (0, (0, 44, 87))
    assert bounds(plan, mlp + "up_proj.weight") == (0, (0, 44, 87))
    assert bounds(plan, mlp + "down_proj.weight") == (1, (0, 44, 87))
    assert bounds(plan, "model.embed_tokens.weight") == (0, (0, 129, 257))
    assert plan.placements["lm_head.weight"] == plan.placements["model.embed_tokens.weight"]
    assert plan.placements["model.norm.weight"] == Placed(shape=(50,))
    assert partial(plan) == set()


def test_biases_and_learned_positions() -> None:
    model = meta(small_config(**GPT2))
    whole, cut = (plan_sharding(model, tp=2, sequence_parallel=s) for s in (False, True))
    layer = "model.layers.0."
    for plan in (whole, cut):
        assert bounds(plan, layer + "mlp.up_proj.bias") == (0, (0, 40, 80))
        assert plan.placements[layer + "mlp.down_proj.bias"].compute == Placement()
        assert plan.placements["model.position_embeddings.weight"].compute == Placement()
    assert partial(whole) == set()
    replicated = {name for name, p in cut.placements.items() if p.compute == Placement()}
    assert partial(cut) == replicated
    assert {
        layer + "mlp.down_proj.bias",
        layer + "self_attn.o_proj.bias",
        layer + "input_layernorm.bias",
        "model.position_embeddings.weight",
        "model.norm.weight",
    } <= replicated


def test_head_norms_are_partial_wherever_heads_are_cut() -> None:
    plan = plan_sharding(meta(small_config(qk_layernorm=True, tied_embeddings=False)), tp=2)
    layers = [f"model.layers.{n}.self_attn.{c}_norm.weight" for n in (0, 1) for c in "qk"]
    assert partial(plan) == set(layers)
    assert plan.placements["lm_head.weight"].compute != Placement()


def test_experts() -> None:
    model = meta(preset("nano-moe"))
    plan, sequence = (plan_sharding(model, tp=2, sequence_parallel=s) for s in (False, True))
    block = "model.layers.0.mlp."
    assert bounds(plan, block + "experts.4.up_proj.weight") == (0, (0, 15, 29))
    assert bounds(plan, block + "experts.4.down_proj.weight") == (1, (0, 15, 29))
    assert bounds(plan, block + "shared_expert.down_proj.weight") == (1, (0, 22, 43))
    routers = {block + "gate.weight", block + "shared_expert_gate.weight"}
    assert not routers & partial(plan)
    assert routers <= partial(sequence)
    types = {b.path: b.type for b in plan.boundaries}
    assert types[block + "experts"] is BoundaryType.EXPERTS
    assert types[block + "shared_expert"] is BoundaryType.MLP


def test_a_router_with_a_capacity_does_all_of_its_work_on_every_rank() -> None:
    config = dataclasses.replace(preset("nano-moe"), capacity_factor=1.0)
    plan = plan_sharding(meta(config), tp=2, sequence_parallel=True)
    assert "model.layers.0.mlp.gate.weight" not in partial(plan)
    assert "model.layers.0.mlp.shared_expert_gate.weight" in partial(plan)
    contracts = {b.path: b.contract for b in plan.boundaries}
    assert contracts["model.layers.0.mlp.gate"].computed is Flow.WHOLE


def test_neighbouring_contracts_meet() -> None:
    for sequence in (False, True):
        plan = plan_sharding(meta(preset("nano")), tp=2, sequence_parallel=sequence)
        by_path = {b.path: b.contract for b in plan.boundaries}
        stream = Flow.SEQUENCE if sequence else Flow.WHOLE
        layer = "model.layers.0."
        assert by_path["model.embed_tokens"].returned is stream
        assert by_path[layer + "input_layernorm"].given is stream
        assert by_path[layer + "self_attn"].given is by_path[layer + "mlp"].returned is stream
        assert by_path["model.norm"].returned is by_path["lm_head"].given is stream
        assert by_path["lm_head"].returned is by_path["loss"].given is Flow.VOCABULARY


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_plan_or_a_clear_error(name: str, tp: int) -> None:
    model = preset_model(name)
    groups = preset(name).num_query_groups
    try:
        plan = plan_sharding(model, tp=tp, sequence_parallel=True)
    except ShardingError as error:
        assert -(-groups // -(-groups // tp)) < tp
        assert "k_proj" in str(error) or "q_proj" in str(error)
        assert f"{groups} key/value groups over {tp} tensor-parallel ranks" in str(error)
        return
    parameters = collect(model, layers=GPT.layer_classes, placements=plan.placements)
    names = {name for p in parameters for name in (p.name, *p.aliases)}
    assert names == set(plan.placements)
    for parameter in parameters:
        pieces = [parameter.piece_numel(rank) for rank in range(tp)]
        if parameter.compute != Placement():
            assert sum(pieces) == parameter.numel
            assert min(pieces) > 0
        if parameter.kind == "matrix":
            assert parameter.compute != Placement()


def test_digest_and_json_follow_the_plan() -> None:
    first = plan_sharding(meta(preset("nano")), tp=2)
    again = plan_sharding(GPT(preset("nano")), tp=2)
    assert (first, first.digest) == (again, again.digest)
    others = [
        plan_sharding(meta(preset("nano")), tp=3),
        plan_sharding(meta(preset("nano")), tp=2, sequence_parallel=True),
    ]
    assert len({first.digest, *(plan.digest for plan in others)}) == 3
    body = json.loads(first.to_json())
    assert body["parameters"][0]["name"] == "model.embed_tokens.weight"
    assert body["parameters"][0]["placement"]["compute"] == {
        "axes": [["tp", {"bounds": [0, 129, 257], "dim": 0}]]
    }


def test_one_rank_needs_no_rules() -> None:
    plan = plan_sharding(nn.Sequential(nn.Linear(2, 3)), tp=1, sequence_parallel=True)
    assert not plan.sequence_parallel
    assert plan.placements["0.weight"] == Placed(shape=(3, 2))
    assert {entry.role for entry in plan.parameters} == {Role.REPLICATED}


def test_an_unknown_parameter_is_named() -> None:
    model = meta(preset("nano"))
    model.extra = nn.Linear(2, 3, bias=False)
    with pytest.raises(ShardingError, match=r"extra\.weight \[3, 2\] in Linear"):
        plan_sharding(model, tp=2)


def test_problems_are_named() -> None:
    with pytest.raises(ShardingError, match=r"q_proj\.weight .* 3 key/value groups over 4 .*\[1, "):
        plan_sharding(meta(preset("nano")), tp=4)
    with pytest.raises(ShardingError, match="0 tensor-parallel ranks"):
        plan_sharding(meta(preset("nano")), tp=0)
    model = meta(preset("nano"))
    del model.model.layers[0].mlp.down_proj
    with pytest.raises(ShardingError, match=r"model\.layers\.0\.mlp looks like .* the role row"):
        plan_sharding(model, tp=2)
    model = meta(preset("nano"))
    del model.loss
    with pytest.raises(ShardingError, match="no child called 'loss'"):
        plan_sharding(model, tp=2)
    model = meta(preset("nano"))
    for module in model.modules():
        module.config = None
    with pytest.raises(ShardingError, match="how many channels a head has"):
        plan_sharding(model, tp=2)
