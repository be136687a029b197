"""The rule of layer groups, FSDP2's units: which parameters are gathered and reduced together.

Owns ``group_of``, the one rule that runtime, estimates and closed forms share: a layer's parameters
form one group, a token table or head that lies in slices outside every layer one of its own, and
all that is left over the root's; parameters with a dtype of their own form groups apart. Invariant:
a group depends on the logical parameter alone, so it is the same on every rank and at every grid
size. Tested by ``tests/ownership/test_groups.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from megamuon.matrices import LogicalParameter


class GroupKind(StrEnum):
    """What the parameters of a group have in common."""

    ROOT = "root"  # loose parameters outside every layer
    LAYER = "layer"  # one of the classes that ``shard`` was given
    TABLE = "table"  # one token table, or one head


class Plane(StrEnum):
    """A set of communicators: all parameters of a group are gathered and reduced along its axes."""

    DENSE = "dense"  # the whole replicate and shard axes


@dataclass(frozen=True)
class GroupKey:
    """Which group a parameter is in."""

    kind: GroupKind
    layer: str  # module path of a layer, name of a table's parameter, "" for the root
    plane: Plane
    kept: bool  # gathered once per pass at ZeRO-3 too: used at both of its ends
    dtype: str = ""  # of the gathered weights and their gradients; "": the run's

    @property
    def module(self) -> tuple[GroupKind, str]:
        """Whose forward uses it: equal for groups that differ in their dtype alone."""
        return self.kind, self.layer

    @property
    def name(self) -> str:
        """The group's name in messages and in the order that all ranks compare."""
        name = f"table:{self.layer}" if self.kind is GroupKind.TABLE else self.layer
        return f"{name}@{self.dtype}" if self.dtype else name


def group_of(parameter: LogicalParameter) -> GroupKey:
    """The group of ``parameter``.

    The root's group stays gathered from forward to backward, and so does a table that is tied to
    the head.
    """
    kind, layer, kept = GroupKind.ROOT, "", True
    if parameter.layer:
        kind, layer, kept = GroupKind.LAYER, parameter.layer, False
    elif len(parameter.shape) > 1 and not parameter.owned:
        kind, layer, kept = GroupKind.TABLE, parameter.name, bool(parameter.aliases)
    return GroupKey(kind=kind, layer=layer, plane=Plane.DENSE, kept=kept, dtype=parameter.dtype)


def grouped(
    parameters: Iterable[LogicalParameter],
) -> dict[GroupKey, tuple[LogicalParameter, ...]]:
    """Parameters by group: the root's first, the others in the order of their first members."""
    found: dict[GroupKey, list[LogicalParameter]] = {}
    for parameter in parameters:
        found.setdefault(group_of(parameter), []).append(parameter)
    order = sorted(found, key=lambda key: key.kind is not GroupKind.ROOT)  # stable
    return {key: tuple(found[key]) for key in order}
