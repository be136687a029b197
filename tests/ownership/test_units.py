"""The rule that makes assignment units."""

from __future__ import annotations

import pytest

from megamuon.matrices import Kind, Route
from megamuon.ownership import UNIT_THRESHOLD, build_units
from megamuon.ownership.inventory import inventory
from tests.support.ownership import parameter, table

MIB = 1 << 20

# Model, layer, MiB of the units that stand alone, and (parameters, Muon, MiB) of the merged unit.
TABLE = [
    ("qwen2.5-0.5b", "model.layers.0", [], (12, 7, 28.443)),
    ("qwen2.5-1.5b", "model.layers.0", [26.25] * 3, (9, 4, 10.510)),
    ("qwen2.5-7b", "model.layers.0", [24.5] * 2 + [129.5] * 3, (7, 2, 7.0225)),
    ("qwen2.5-32b", "model.layers.0", [10] * 2 + [50] * 2 + [270] * 3, (5, 0, 0.0332)),
    ("qwen3-0.6b", "model.layers.0", [], (11, 7, 30.004)),
    ("qwen3-14b", "model.layers.0", [10] * 2 + [50] * 2 + [170] * 3, (4, 0, 0.020)),
    ("qwen1.5-moe-a2.7b", "model.layers.0", [22] * 3, (191, 186, 1022.258)),
    ("qwen3-30b-a3b", "model.layers.0", [16] * 2, (391, 387, 1156.508)),
    ("qwen2.5-vl-3b", "model.layers.0", [43] * 3, (9, 4, 18.013)),
    ("qwen2.5-vl-3b", "visual.blocks.0", [], (12, 5, 37.579)),
    ("wall-oss-0.5", "model.layers.0", [10, 43, 86], (11, 5, 29.0215)),
    ("wall-oss-0.5", "visual.blocks.0", [16.875], (9, 3, 20.968)),
    ("pi0.5", "language_model.layers.0", [64] * 3, (6, 4, 18.008)),
    ("pi0.5", "gemma_expert.model.layers.0", [], (11, 7, 45.012)),
    ("pi0.5", "encoder.layers.0", [], (16, 6, 29.067)),
    ("pi0.5-fused", "language_model.layers.0", [10, 64, 128], (3, 1, 8.008)),
    ("pi0.5-fused", "gemma_expert.model.layers.0", [16], (7, 3, 29.012)),
]


@pytest.mark.parametrize(("model", "layer", "large", "small"), TABLE)
def test_units_of_published_models(
    model: str, layer: str, large: list[float], small: tuple[int, int, float]
) -> None:
    parameters = inventory(model, routers=Kind.MATRIX)  # the published counts
    by_name = {p.name: p for p in parameters}
    units = [u for u in build_units(parameters, merge_experts=True) if u.layer.endswith(layer)]
    alone = [u for u in units if u.numel >= UNIT_THRESHOLD and len(u.members) == 1]
    (merged,) = [u for u in units if u not in alone]
    assert sorted(u.numel * 2 / MIB for u in alone) == large
    muon = sum(by_name[name].route is Route.MATRIX for name in merged.members)
    assert (len(merged.members), muon) == small[:2]
    assert merged.numel * 2 / MIB == pytest.approx(small[2], abs=0.0006)


@pytest.mark.parametrize(
    ("model", "count", "experts"),
    [("qwen1.5-moe-a2.7b", 184, 60), ("qwen3-30b-a3b", 387, 128)],
)
def test_expert_matrices_never_merge_by_default(model: str, count: int, experts: int) -> None:
    units = [u for u in build_units(inventory(model)) if u.layer == "model.layers.0"]
    assert len(units) == count
    assert sorted(u.members for u in units if ".experts." in u.name) == sorted(
        (f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight",)
        for expert in range(experts)
        for name in ("gate", "up", "down")
    )


@pytest.mark.parametrize(
    ("shape", "alone"),
    [
        ((4304, 1152), False),  # SigLIP fc1: 4,958,208
        ((3840, 1280), False),  # Qwen vision qkv: 4,915,200
        ((1280, 3456), False),  # Qwen vision down, padded: 4,423,680
        ((2048, 2048), False),  # 4,194,304
        ((1024, 5120), True),  # Qwen2.5-32B k and v: 5,242,880
        ((2560, 2048), True),  # WALL-OSS fused qkv: 5,242,880
        ((2000, 2500), True),  # exactly the threshold
        ((1, 4_999_999), False),
    ],
)
def test_shapes_near_the_threshold(shape: tuple[int, int], alone: bool) -> None:
    units = build_units([parameter("matrix", *shape), parameter("bias", 8)])
    assert (len(units) == 2) is alone


def test_a_unit_is_named_after_its_smallest_member_and_keeps_registration_order() -> None:
    parameters = [parameter(name, 2, 2, layer="layers.0") for name in ("z", "a", "m")]
    (unit,) = build_units(parameters)
    assert unit.name == "a"
    assert unit.members == ("z", "a", "m")
    assert unit.numel == 12


def test_layers_do_not_mix_and_the_rest_is_one_group() -> None:
    parameters = [
        parameter("layers.0.norm", 4, layer="layers.0"),
        parameter("first", 4),
        parameter("layers.1.norm", 4, layer="layers.1"),
        parameter("last", 4),
    ]
    assert [u.members for u in build_units(parameters)] == [
        ("layers.0.norm",),
        ("first", "last"),
        ("layers.1.norm",),
    ]


def test_threshold_zero_and_huge() -> None:
    parameters = [parameter("a", 3000, 3000), parameter("b", 4)]
    assert len(build_units(parameters, threshold=0)) == 2
    assert len(build_units(parameters, threshold=10**9)) == 1


def test_expert_flag_counts_not_the_name() -> None:
    parameters = [
        parameter("mlp.experts.0.weight", 2, 2),
        parameter("other", 2, 2, expert=True),
        parameter("norm", 2),
    ]
    assert [u.members for u in build_units(parameters)] == [
        ("mlp.experts.0.weight", "norm"),
        ("other",),
    ]
    assert len(build_units(parameters, merge_experts=True)) == 1


def test_frozen_matrices_are_owned_and_even_layout_is_not() -> None:
    frozen = parameter("frozen", 3000, 3000, route=Route.FROZEN)
    head = parameter("head", 9, 9, kind=Kind.HEAD, owned=False, route=Route.ADAMW_SHARDED)
    assert [u.name for u in build_units([frozen, head, table("embedding", 4, 4)])] == ["frozen"]


def test_no_parameters_no_units() -> None:
    assert build_units([]) == ()


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="twice"):
        build_units([parameter("a", 2), parameter("a", 2)])
    with pytest.raises(ValueError, match="--owner-unit-threshold"):
        build_units([], threshold=-1)
