"""Shape tables: agreement with the published inventories, and a user's own table."""

from __future__ import annotations

import json

import pytest

from megamuon.matrices import Kind, Route
from megamuon.ownership.inventory import (
    ShapeTableError,
    UnknownModelError,
    cut_by_name,
    inventory,
    inventory_names,
    parameters_from_table,
)
from megamuon.placements import Axis, Placement, Shard
from tests.support.ownership import DATA

SHAPES = json.loads((DATA / "model_shapes.json").read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize(("name", "title"), list(zip(inventory_names(), SHAPES, strict=True)))
def test_totals_agree_with_the_published_tables(name: str, title: str) -> None:
    totals, parameters = SHAPES[title]["totals"], inventory(name, routers=Kind.MATRIX)
    muon = [p for p in parameters if p.route is Route.MATRIX]
    assert len(parameters) == totals["tensors"]
    assert len({p.name for p in parameters}) == totals["tensors"]
    assert sum(p.numel for p in parameters) == totals["numel"]
    assert len(muon) == totals["muon_matrices"]
    assert sum(p.numel for p in muon) == totals["muon_numel"]


def test_embedding_and_head_are_even_and_the_rest_is_owned() -> None:
    even = [p for p in inventory("qwen2.5-7b") if not p.owned]
    assert [(p.name, p.kind) for p in even] == [
        ("model.embed_tokens.weight", Kind.EMBEDDING),
        ("lm_head.weight", Kind.HEAD),
    ]


def test_routers_are_updated_by_adamw_on_their_owner_unless_asked_for() -> None:
    routers = [p for p in inventory("qwen1.5-moe-a2.7b") if p.kind is Kind.ROUTER]
    assert len(routers) == 48
    assert {(p.route, p.owned) for p in routers} == {(Route.ADAMW_OWNER, True)}
    counted = inventory("qwen1.5-moe-a2.7b", routers=Kind.MATRIX)
    assert sum(p.route is Route.MATRIX for p in counted) == 4536
    assert not any(p.kind is Kind.ROUTER for p in counted)


def test_cuts_by_name() -> None:
    parameters = {p.name: p for p in cut_by_name(inventory("qwen1.5-moe-a2.7b"), 2)}
    layer = "model.layers.3"
    dims = {
        "model.embed_tokens.weight": 0,
        "lm_head.weight": 0,
        f"{layer}.self_attn.k_proj.weight": 0,
        f"{layer}.self_attn.k_proj.bias": 0,
        f"{layer}.self_attn.o_proj.weight": 1,
        f"{layer}.mlp.experts.7.down_proj.weight": 1,
        f"{layer}.mlp.shared_expert.gate_proj.weight": 0,
        f"{layer}.mlp.gate.weight": None,
        f"{layer}.mlp.shared_expert_gate.weight": None,
        f"{layer}.input_layernorm.weight": None,
    }
    for name, dim in dims.items():
        on_tp = parameters[name].compute.on(Axis.TP)
        assert (on_tp.dim if isinstance(on_tp, Shard) else None) == dim, name
    down = parameters[f"{layer}.mlp.experts.7.down_proj.weight"]
    assert down.compute == Placement.of({Axis.TP: Shard(1, (0, 704, 1408))})
    uneven = cut_by_name(parameters_from_table([{"name": "a.q_proj.bias", "shape": [7]}]), 3)
    assert uneven[0].compute == Placement.of({Axis.TP: Shard(0, (0, 3, 6, 7))})
    assert cut_by_name(inventory("qwen3-0.6b"), 1) == inventory("qwen3-0.6b")


def test_parameters_come_layer_by_layer() -> None:
    layers = [p.layer for p in inventory("qwen2.5-1.5b") if p.layer]
    assert layers == sorted(layers, key=lambda layer: int(layer.rpartition(".")[2]))
    assert len(set(layers)) == 28


def test_expert_flags() -> None:
    experts = [p for p in inventory("qwen1.5-moe-a2.7b") if p.expert]
    assert len(experts) == 4320
    assert not any(p.expert for p in inventory("wall-oss-0.5"))


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("qwen2.5-1b", "qwen2.5-1.5b"), ("Qwen3-0.6B", "qwen3-0.6b"), ("pi", "pi0.5")],
)
def test_an_unknown_model_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(UnknownModelError, match=f"did you mean {near}\\?") as error:
        inventory(wrong)
    assert all(name in str(error.value) for name in inventory_names())


def test_a_user_table() -> None:
    found = parameters_from_table(
        [
            {"name": "embed", "shape": [10, 4], "kind": "embedding"},
            {"name": "m.layers.2.w", "shape": [4, 4], "kind": "matrix", "expert": True},
            {"name": "m.layers.2.b", "shape": [4]},
            {"name": "f", "shape": [4, 4], "kind": "matrix", "frozen": True, "layer": "own"},
        ]
    )
    assert [p.route.value for p in found] == ["adamw_sharded", "matrix", "adamw_owner", "frozen"]
    assert [p.layer for p in found] == ["", "m.layers.2", "m.layers.2", "own"]
    assert [p.expert for p in found] == [False, True, False, False]


def test_a_user_table_fails_closed_and_names_every_problem() -> None:
    entries = [
        {"name": "no kind", "shape": [4, 4]},
        {"shape": [4]},
        {"name": "conv", "shape": [4, 3, 3], "kind": "matrix"},
        {"name": "typo", "shape": [4], "knd": "vector"},
        {"name": "zero", "shape": [4, 0], "kind": "matrix"},
        {"name": "scalar table", "shape": [], "kind": "head"},
        7,
    ]
    with pytest.raises(ShapeTableError) as error:
        parameters_from_table(entries)
    text = str(error.value)
    assert "no kind [4, 4]: kind is None" in text
    assert "entry 1: key 'name' is missing" in text
    assert "conv [4, 3, 3]: a Muon matrix must be 2-D" in text
    assert "typo: unknown keys knd" in text
    assert "zero: shape must be" in text
    assert "scalar table" in text
    assert "entry 6" in text
    with pytest.raises(ShapeTableError, match="JSON list"):
        parameters_from_table("text")
