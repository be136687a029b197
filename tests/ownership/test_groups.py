"""The rule of layer groups: what is gathered together, and what stays gathered."""

from __future__ import annotations

from megamuon.matrices import Kind, LogicalParameter, Route
from megamuon.ownership.groups import GroupKey, GroupKind, Plane, group_of, grouped
from tests.support.ownership import parameter, table

LAYER = "model.layers.3"


def key(kind: GroupKind, layer: str, kept: bool) -> GroupKey:
    return GroupKey(kind=kind, layer=layer, plane=Plane.DENSE, kept=kept)


def tied() -> LogicalParameter:
    return table("embed", 10, 4, aliases=("head",))


def test_a_layer_has_all_that_lies_in_it() -> None:
    inside = table(f"{LAYER}.positions", 6, 4, layer=LAYER)  # in slices too
    for member in (parameter(f"{LAYER}.up", 4, 4, layer=LAYER), inside):
        assert group_of(member) == key(GroupKind.LAYER, LAYER, False)
    assert group_of(inside).name == LAYER


def test_a_table_is_a_group_and_stays_only_if_it_is_tied() -> None:
    assert group_of(table("embed", 10, 4)) == key(GroupKind.TABLE, "embed", False)
    assert group_of(tied()) == key(GroupKind.TABLE, "embed", True)
    assert group_of(tied()).name == "table:embed"


def test_the_rest_is_the_roots_and_stays() -> None:
    loose = key(GroupKind.ROOT, "", True)
    assert group_of(parameter("norm", 4)) == loose
    assert group_of(parameter("map", 4, 4)) == loose  # a matrix outside every layer has an owner
    bias = table("head.bias", 4, kind=Kind.VECTOR, route=Route.ADAMW_SHARDED)
    assert group_of(bias) == loose  # sliced, and no table
    assert loose.name == ""


def test_groups_come_in_the_order_of_registration_with_the_root_first() -> None:
    members = [
        table("embed", 10, 4),
        parameter("layers.0.up", 4, 4, layer="layers.0"),
        parameter("norm", 4),
        parameter("layers.0.down", 4, 4, layer="layers.0"),
        parameter("scale", 4),
    ]
    found = grouped(members)
    assert [k.name for k in found] == ["", "table:embed", "layers.0"]
    assert [[p.name for p in group] for group in found.values()] == [
        ["norm", "scale"],
        ["embed"],
        ["layers.0.up", "layers.0.down"],
    ]
    assert [k.name for k in grouped(members[:2])] == ["table:embed", "layers.0"]  # no empty root
