"""The ownership plan: segments, JSON, digest, differences, refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megamuon.matrices import LogicalParameter
from megamuon.ownership import (
    OwnershipPlan,
    PlanError,
    PlannerSettings,
    Segment,
    Topology,
    build_plan,
)
from megamuon.ownership.owners import tp_owners, with_owners, without_owners
from megamuon.placements import Axis, Owned, Partial, Placement, Shard, piece_of
from tests.support.ownership import golden_plan, other_owners, parameter, random_model, table

LAYER = "model.layers.3"
UP = f"{LAYER}.mlp.up_proj.weight"


def parameters() -> list[LogicalParameter]:
    return [
        table("model.embed.weight", 10, 4),
        parameter(UP, 8, 4, layer=LAYER, fusion="gate|up"),
        parameter(f"{LAYER}.norm.weight", 4, layer=LAYER),
        parameter("model.head.weight", 4, 4, aliases=("model.other.weight",)),
    ]


def small_plan(**changes: object) -> OwnershipPlan:
    plan = build_plan(
        parameters(),
        Topology(replicas=2, shards=4),
        lambda rows, cols: rows * cols / 3,
        PlannerSettings(),
        threshold=20,
    )
    return replace(plan, **changes)


def test_an_owned_parameter_is_one_segment_on_its_owner() -> None:
    plan = small_plan()
    owner = plan.owner_of(UP)
    replica, shard = divmod(owner, 4)
    assert plan.segments(UP) == (Segment(0, 32, shard, replica),)
    assert plan.owners[[u.name for u in plan.units].index(UP)] == owner


def test_an_alias_has_the_owner_of_its_parameter() -> None:
    plan = small_plan()
    assert plan.owner_of("model.other.weight") == plan.owner_of("model.head.weight")
    assert plan.segments("model.other.weight") == plan.segments("model.head.weight")


def test_even_slices_are_those_of_torch_chunk() -> None:
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 151936):
        for shards in (1, 2, 3, 4, 8):
            grid = Topology(replicas=2, shards=shards)
            plan = build_plan([table("t", rows, 3)], grid, lambda *shape: 1.0)
            chunks = [len(c) * 3 for c in torch.arange(rows).chunk(shards)]
            segments = plan.segments("t")
            assert [stop - start for start, stop, _, _ in segments] == chunks
            assert [s.shard for s in segments] == list(range(len(chunks)))


@pytest.mark.parametrize("seed", range(10))
def test_segments_tile_every_parameter(seed: int) -> None:
    generator = random.Random(seed)
    grid = Topology(replicas=generator.randint(1, 3), shards=generator.randint(1, 5))
    plan = build_plan(random_model(generator), grid, lambda *shape: 1.0, threshold=8)
    for p in plan.parameters:
        end = 0
        for start, stop, _, _ in plan.segments(p.name):
            assert start == end
            assert stop > start
            end = stop
        assert end == p.numel


def test_a_plan_survives_json() -> None:
    for plan in (small_plan(), golden_plan("table7a")):
        again = OwnershipPlan.from_json(plan.to_json())
        assert again == plan
        assert again.digest == plan.digest
        assert again.to_json() == plan.to_json()
        assert plan.first_difference(again) is None


def test_a_plan_that_calls_the_route_after_its_first_optimizer_is_read() -> None:
    plan = small_plan()
    text = plan.to_json()
    assert '"route":"matrix"' in text
    assert OwnershipPlan.from_json(text.replace('"route":"matrix"', '"route":"muon"')) == plan


def test_the_digest_does_not_depend_on_how_the_plan_was_made() -> None:
    assert small_plan().digest == small_plan().digest
    assert len(small_plan().digest) == 64


def changed(plan: OwnershipPlan, index: int, **changes: object) -> tuple[LogicalParameter, ...]:
    entries = list(plan.parameters)
    entries[index] = replace(entries[index], **changes)
    return tuple(entries)


DIFFERENCES: list[tuple[Callable[[OwnershipPlan], OwnershipPlan], str]] = [
    (lambda p: other_owners(p, (5, *p.owners[1:])), f"owner of {UP}: 0 here, 5 there"),
    (
        lambda p: replace(p, costs=(1.5, *p.costs[1:])),
        f"Newton-Schulz ms of {UP}: {32 / 3} here, 1.5 there",
    ),
    (
        lambda p: replace(p, topology=Topology(replicas=4, shards=4)),
        "topology replicas: 2 here, 4 there",
    ),
    (
        lambda p: replace(p, settings=PlannerSettings(byte_cap=None)),
        "settings byte_cap: 0.1 here, None there",
    ),
    (
        lambda p: replace(p, parameters=changed(p, 1, shape=(4, 8))),
        f"shape of parameter {UP}: [8, 4] here, [4, 8] there",
    ),
    (
        lambda p: replace(p, parameters=changed(p, 0, name="wte")),
        "name of parameter 0: model.embed.weight here, wte there",
    ),
    (
        lambda p: replace(p, parameters=changed(p, 1, fusion="")),
        f"fusion of parameter {UP}: gate|up here,  there",
    ),
    (
        lambda p: replace(p, units=(replace(p.units[0], layer="x"), *p.units[1:])),
        f"layer of unit {UP}: {LAYER} here, x there",
    ),
    (
        lambda p: replace(p, parameters=(*p.parameters, table("more", 2, 2))),
        "number of parameters: 4 here, 5 there",
    ),
]


@pytest.mark.parametrize(("change", "words"), DIFFERENCES, ids=[words for _, words in DIFFERENCES])
def test_each_difference_changes_the_digest_and_is_named(
    change: Callable[[OwnershipPlan], OwnershipPlan], words: str
) -> None:
    plan = small_plan()
    other = change(plan)
    assert other.digest != plan.digest
    assert plan.first_difference(other) == words
    assert other.first_difference(plan) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": (1.0, 1.0)}, "3 units and 2 costs"),
        ({"topology": Topology(replicas=2, shards=1)}, "of the 1 ranks on the shard axis"),
        (
            {"parameters": tuple(parameters())},
            "is stored by nobody of the 2 ranks on the replicate",
        ),
        ({"units": (), "costs": ()}, "3 owned parameters have no unit"),
    ],
)
def test_a_plan_that_contradicts_itself_cannot_be_made(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        small_plan(**change)


@pytest.mark.parametrize("wrong", [8, -1])
def test_an_owner_must_be_a_rank_of_the_grid(wrong: int) -> None:
    with pytest.raises(PlanError, match=f"is rank {wrong}, of 8 ranks"):
        other_owners(small_plan(), (0, 0, wrong))


def test_members_of_a_unit_have_one_owner() -> None:
    plan = small_plan()
    unit = max(plan.units, key=lambda unit: len(unit.members))
    owners = dict.fromkeys(plan.homes, 0) | {unit.members[0]: 1}
    elsewhere = with_owners(without_owners(plan.parameters), plan.topology, owners, {})
    alone = replace(unit, members=tuple(owners))
    with pytest.raises(PlanError, match="has members on several ranks"):
        replace(plan, parameters=elsewhere, units=(alone,), costs=(1.0,))


def test_a_parameter_in_two_units_is_refused() -> None:
    plan = small_plan()
    twice = replace(plan.units[1], members=(*plan.units[1].members, UP))
    with pytest.raises(PlanError, match=rf"lists {UP}: in another unit"):
        replace(plan, units=(plan.units[0], twice, plan.units[2]))


def test_questions_without_an_answer() -> None:
    plan = small_plan()
    with pytest.raises(PlanError, match="no parameter named nothing"):
        plan.owner_of("nothing")
    with pytest.raises(PlanError, match=r"embed\.weight is in slices"):
        plan.owner_of("model.embed.weight")


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(small_plan().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "no ownership plan"),
        (edited(format="else"), "no ownership plan"),
        (edited(version=3), "version 3; this code reads 1 and 2"),
        (edited(units=[]), "have no unit"),
        (edited(topology={"replicas": 2}), "wrong form"),
        (edited(topology={"replicas": 2, "shards": 0}), "shards must be"),
        (edited(units=[{"name": "a"}]), "members"),
        (edited(units=[{"name": "a", "layer": "", "members": ["b"]}]), "'b'"),
        (edited(parameters=[{"name": "a"}]), "kind"),
    ],
)
def test_damaged_json_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        OwnershipPlan.from_json(text)


def placed_plan() -> OwnershipPlan:
    bounds = Shard(0, (0, 5, 8))
    return build_plan(
        [
            parameter("owned", 8, 4, cut=bounds),
            parameter("whole", 6, 4),
            parameter("gain", 4, tp_partial=True),
            parameter("sliced", 8, 4, owned=False, cut=bounds),
            table("table", 10, 4, cut=Shard(0, (0, 6, 10))),
        ],
        Topology(replicas=2, shards=2, tp=2),
        lambda rows, cols: rows * cols / 3,
        threshold=1,
    )


def owned(plan: OwnershipPlan, name: str) -> dict[Axis, Owned]:
    replica, shard = divmod(plan.owner_of(name), 2)
    return {Axis.REPLICATE: Owned(replica), Axis.SHARD: Owned(shard)}


def test_storage_says_where_masters_lie() -> None:
    plan, cut = placed_plan(), Shard(0, (0, 5, 8))
    assert plan.storage("owned") == Placement.of({**owned(plan, "owned"), Axis.TP: cut})
    assert plan.storage("whole") == Placement.of(owned(plan, "whole"))
    assert plan.storage("sliced") == Placement.of({Axis.SHARD: Shard(0), Axis.TP: cut})
    assert plan.storage("table") == Placement.of(
        {Axis.SHARD: Shard(0), Axis.TP: Shard(0, (0, 6, 10))}
    )


def test_modules_read_what_tensor_parallelism_leaves() -> None:
    plan = placed_plan()
    assert plan.compute("owned") == Placement.of({Axis.TP: Shard(0, (0, 5, 8))})
    assert plan.compute("whole") == plan.compute("gain") == Placement()


def test_a_gradient_is_partial_where_ranks_saw_other_samples() -> None:
    plan = placed_plan()
    data = {Axis.REPLICATE: Partial(), Axis.SHARD: Partial()}
    assert plan.gradient("owned") == Placement.of({**data, Axis.TP: Shard(0, (0, 5, 8))})
    assert plan.gradient("whole") == Placement.of(data)
    assert plan.gradient("gain") == Placement.of({**data, Axis.TP: Partial()})


def test_update_says_who_works_on_the_whole() -> None:
    plan = placed_plan()
    tp_owner = Owned(tp_owners(plan.parameters)["owned"])
    assert plan.update("owned") == Placement.of({**owned(plan, "owned"), Axis.TP: tp_owner})
    assert plan.update("whole") == plan.storage("whole")
    assert plan.update("sliced") == Placement()  # every rank of every replica
    assert plan.update("table") == plan.storage("table")  # element by element
    assert plan.update("gain") == plan.storage("gain")


@pytest.mark.parametrize("seed", range(10))
def test_segments_are_the_pieces_of_the_storage(seed: int) -> None:
    generator = random.Random(seed)
    grid = Topology(replicas=generator.randint(1, 3), shards=generator.randint(1, 5))
    plan = build_plan(random_model(generator), grid, lambda *shape: 1.0, threshold=8)
    for p in plan.parameters:
        found = []
        for rank in range(grid.shards):
            for replica in range(grid.replicas):
                place = {Axis.REPLICATE: replica, Axis.SHARD: rank}
                piece = piece_of(p.shape, plan.storage(p.name), grid.sizes, place)
                if piece is None or not piece.numel:
                    continue
                start = (piece.offset[0] if piece.offset else 0) * (
                    p.numel // max(1, (p.shape or (1,))[0])
                )
                if p.owned or replica == 0:
                    where = replica if p.owned else None
                    found.append(Segment(start, start + piece.numel, rank, where))
        assert tuple(found) == plan.segments(p.name)
