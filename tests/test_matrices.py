"""Logical parameters: kinds are declared, routes follow, nothing is guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megamuon.matrices import (
    Kind,
    LogicalParameter,
    Route,
    RoutingError,
    collect,
    declared_kind,
    layer_key,
    layer_paths,
    routing_report,
)


class Projection(nn.Module):
    """A matrix and a bias of our own, declared."""

    logical_kinds = {"weight": Kind.MATRIX}

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, cols))
        self.bias = nn.Parameter(torch.zeros(rows))


class Block(nn.Module):
    fusion_blocks = (("q_proj", "k_proj"),)

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = Projection(4, 4)
        self.k_proj = nn.Linear(4, 2, bias=False)
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.logical_kinds = {"weight": Kind.HEAD}


def by_name(model: nn.Module, **options: object) -> dict[str, LogicalParameter]:
    return {p.name: p for p in collect(model, layers=(Block,), **options)}


def test_routes_of_a_small_model() -> None:
    found = by_name(Model())
    assert {name: p.route for name, p in found.items() if not name.startswith("layers.1")} == {
        "embed.weight": Route.ADAMW_SHARDED,
        "layers.0.q_proj.weight": Route.MATRIX,
        "layers.0.q_proj.bias": Route.ADAMW_OWNER,
        "layers.0.k_proj.weight": Route.MATRIX,
        "layers.0.norm.weight": Route.ADAMW_OWNER,
        "layers.0.norm.bias": Route.ADAMW_OWNER,
        "head.weight": Route.ADAMW_SHARDED,
    }
    even = {name for name, p in found.items() if not p.owned}
    assert even == {"embed.weight", "head.weight"}
    assert found["head.weight"].kind is Kind.HEAD


def test_registration_order_and_layers() -> None:
    found = collect(Model(), layers=(Block,))
    assert [p.name for p in found] == [name for name, _ in Model().named_parameters()]
    assert {p.layer for p in found} == {"", "layers.0", "layers.1"}
    assert all(p.layer == "layers.1" for p in found if p.name.startswith("layers.1."))


def test_layers_with_a_common_prefix_do_not_mix() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Block() for _ in range(11)])
    found = {p.name: p.layer for p in collect(model, layers=(Block,))}
    assert found["layers.1.norm.weight"] == "layers.1"
    assert found["layers.10.norm.weight"] == "layers.10"


def test_only_the_outermost_layer_counts() -> None:
    class Outer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

    model = nn.Sequential(Outer(), Block())
    assert layer_paths(model, (Block,)) == ("0", "1")
    assert layer_paths(model, ()) == ()


def test_fusion_keys_are_per_block_and_attribute() -> None:
    found = by_name(Model())
    key = found["layers.0.q_proj.weight"].fusion
    assert key
    assert found["layers.0.k_proj.weight"].fusion == key
    assert found["layers.1.q_proj.weight"].fusion not in ("", key)
    assert found["layers.0.q_proj.bias"].fusion not in ("", key)
    assert found["layers.0.norm.weight"].fusion == ""


def test_tied_weights_are_one_parameter_with_an_alias() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    found = by_name(model)
    assert found["embed.weight"].aliases == ("head.weight",)
    assert found["embed.weight"].kind is Kind.EMBEDDING
    assert "head.weight" not in found


def test_a_module_used_twice_is_one_parameter_with_an_alias() -> None:
    model = nn.Module()
    model.first = nn.Linear(4, 4, bias=False)
    model.second = model.first
    (only,) = collect(model, layers=())
    assert (only.name, only.aliases) == ("first.weight", ("second.weight",))


def test_a_matrix_without_a_declaration_is_an_error_that_names_all_of_them() -> None:
    model = Model()
    model.stray = nn.Parameter(torch.zeros(3, 5))
    model.conv = nn.Conv2d(1, 2, 3)
    with pytest.raises(RoutingError) as error:
        collect(model, layers=(Block,))
    assert "stray (3, 5) in Model" in str(error.value)
    assert "conv.weight (2, 1, 3, 3) in Conv2d" in str(error.value)
    assert "conv.bias" not in str(error.value)


def test_a_route_function_answers_for_an_undeclared_tensor() -> None:
    model = Model()
    model.stray = nn.Parameter(torch.zeros(3, 5))

    def route(name: str, parameter: nn.Parameter, module: nn.Module) -> Route | None:
        return Route.ADAMW_OWNER if name == "stray" else None

    found = by_name(model, route=route)
    assert found["stray"].route is Route.ADAMW_OWNER
    assert found["stray"].reason == "chosen by the route function"
    assert found["layers.0.q_proj.weight"].route is Route.MATRIX


def test_an_undeclared_frozen_tensor_is_no_error() -> None:
    model = Model()
    model.stray = nn.Parameter(torch.zeros(3, 5), requires_grad=False)
    assert by_name(model)["stray"].route is Route.FROZEN


def test_muon_needs_two_dims() -> None:
    with pytest.raises(
        RoutingError, match=r"norm\.bias \(4,\): the matrix route takes 2-D parameters"
    ):
        collect(Model(), layers=(Block,), route=lambda name, parameter, module: Route.MATRIX)


def test_frozen_parameters_keep_their_layout_and_ignore_the_route_function() -> None:
    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = by_name(model, route=lambda name, parameter, module: Route.ADAMW_OWNER)
    assert {p.route for p in found.values()} == {Route.FROZEN}
    assert not any(p.trainable for p in found.values())
    assert not found["embed.weight"].owned
    assert found["layers.0.q_proj.weight"].owned


def test_adamw_for_everything_and_even_layout() -> None:
    found = by_name(Model(), matrices_to=Route.ADAMW_OWNER, owner_layout=False)
    assert found["layers.0.q_proj.weight"].route is Route.ADAMW_OWNER
    assert "AdamW" in found["layers.0.q_proj.weight"].reason
    assert {p.owned for p in found.values()} == {False}


def test_a_scalar_stays_on_an_owner() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    (scale,) = collect(model, layers=(), owner_layout=False)
    assert (scale.owned, scale.numel, scale.kind) == (True, 1, Kind.VECTOR)


def test_expert_flag_comes_from_the_module() -> None:
    model = Model()
    model.layers[0].q_proj.is_expert = True
    found = by_name(model)
    assert [name for name, p in found.items() if p.expert] == [
        "layers.0.q_proj.weight",
        "layers.0.q_proj.bias",
    ]


def test_kinds_are_declared_by_instance_class_or_torch() -> None:
    linear = nn.Linear(2, 2)
    assert declared_kind(linear, "weight", linear.weight) is Kind.MATRIX
    linear.logical_kinds = {"weight": "head"}
    assert declared_kind(linear, "weight", linear.weight) is Kind.HEAD
    assert declared_kind(linear, "bias", linear.bias) is Kind.VECTOR
    assert declared_kind(nn.Module(), "vector", torch.zeros(3)) is Kind.VECTOR
    assert declared_kind(nn.Module(), "matrix", torch.zeros(3, 3)) is None


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("model.layers.13.moe.experts.0.down_proj.weight", "model.layers.13"),
        ("visual.blocks.7.norm1.weight", "visual.blocks.7"),
        ("layers.0.weight", "layers.0"),
        ("model.layers.1.blocks.2.weight", "model.layers.1"),
        ("model.norms.0.weight", ""),
        ("model.input_layernorms.0.weight", ""),
        ("model.embed_tokens.weight", ""),
    ],
)
def test_layer_key(name: str, layer: str) -> None:
    assert layer_key(name) == layer


def test_the_report_counts_routes_and_gives_reasons() -> None:
    model = Model()
    model.head.weight.requires_grad_(False)
    text = routing_report(collect(model, layers=(Block,)))
    assert "matrix              4 parameters               48 elements" in text
    assert "frozen              1 parameters" in text
    assert "1 x requires_grad is False (e.g. head.weight [10, 4])" in text
    assert "1 x token table: even slices" in text
