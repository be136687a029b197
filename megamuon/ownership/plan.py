"""The ownership plan: where every parameter lies, one frozen value for the whole run.

Owns ``OwnershipPlan``: parameters with all owners chosen, units, costs and settings, and the
segment table derived from them. Invariant: each owned parameter belongs to exactly one unit, all
members of a unit to one rank of the grid, a cut matrix that is updated whole to one tp rank
besides, and the segments of a parameter tile ``[0, numel)``; a plan that breaks this cannot be
made. Its JSON form is in ``plan_json.py``. Tested by ``tests/ownership/test_plan.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType

from megamuon.matrices import LogicalParameter
from megamuon.ownership.holdings import (
    Home,
    PlanError,
    Segment,
    home_of,
    segments_of,
    storage_problem,
)
from megamuon.ownership.owners import without_owners
from megamuon.ownership.plan_json import parameter_entry, plan_from_text, plan_to_text
from megamuon.ownership.settings import PlannerSettings, Topology
from megamuon.ownership.units import Unit
from megamuon.placements import Axis, Owned, Placement

__all__ = ["OwnershipPlan", "PlanError", "Segment", "Topology"]


@dataclass(frozen=True, kw_only=True)
class OwnershipPlan:
    """Who owns what: one value for the runtime, the optimizer, checkpoints and planning tools."""

    topology: Topology
    parameters: tuple[LogicalParameter, ...]  # registration order; every owner is chosen
    units: tuple[Unit, ...]
    costs: tuple[float, ...]  # milliseconds of Newton-Schulz of each unit
    settings: PlannerSettings

    def __post_init__(self) -> None:
        if len(self.units) != len(self.costs):
            raise PlanError(f"plan with {len(self.units)} units and {len(self.costs)} costs")
        for parameter in self.parameters:
            problem = storage_problem(parameter, self.topology.sizes)
            if problem is not None:
                raise PlanError(f"{parameter.name} {list(parameter.shape)} {problem}")
        unassigned = set(self.homes)
        for unit in self.units:
            for name in unit.members:
                if name not in unassigned:
                    raise PlanError(
                        f"unit {unit.name} lists {name}: in another unit, in slices or unknown"
                    )
                unassigned.remove(name)
            homes = {self.homes[name] for name in unit.members}
            if len(homes) > 1:
                raise PlanError(f"unit {unit.name} has members on several ranks: {sorted(homes)}")
        if unassigned:
            raise PlanError(
                f"{len(unassigned)} owned parameters have no unit, e.g. {min(unassigned)}"
            )

    @cached_property
    def _by_name(self) -> dict[str, LogicalParameter]:
        """Parameters by every name of theirs."""
        return {name: p for p in self.parameters for name in (p.name, *p.aliases)}

    @cached_property
    def homes(self) -> Mapping[str, Home]:
        """Where each owned parameter is owned, in registration order."""
        found = {p.name: home_of(p) for p in self.parameters}
        return MappingProxyType({name: home for name, home in found.items() if home is not None})

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Data-parallel rank of each unit."""
        return tuple(self.owner_of(unit.members[0]) for unit in self.units)

    def parameter(self, name: str) -> LogicalParameter:
        """The parameter of this name or alias.  Raises PlanError where there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise PlanError(f"the plan has no parameter named {name}") from None

    def owner_of(self, name: str) -> int:
        """Data-parallel rank that owns the parameter.  Raises PlanError: unknown name, slices."""
        parameter = self.parameter(name)
        if parameter.name not in self.homes:
            raise PlanError(f"{name} is in slices and has no owner")
        home = self.homes[parameter.name]
        return home.replica * self.topology.sizes[Axis.SHARD] + home.shard

    def storage(self, name: str) -> Placement:
        """Where the master, the reduced gradient and the optimizer's state of a parameter lie."""
        return self.parameter(name).storage

    def compute(self, name: str) -> Placement:
        """What the module of a parameter reads."""
        return self.parameter(name).compute

    def update(self, name: str) -> Placement:
        """Where a parameter is worked on: its whole, for a matrix optimizer."""
        return self.parameter(name).update

    def gradient(self, name: str) -> Placement:
        """What a backward pass leaves of a parameter's gradient, before it is reduced."""
        return self.parameter(name).gradient

    def check_contiguous(self) -> None:
        """Check that no rank holds two segments of a parameter (MatrixFSDP, section 4.1: its
        collectives send one interval per owner). Raises PlanError that names the parameter.
        """
        for parameter in self.parameters:
            for tp_rank in range(self.topology.tp):
                ranks = [segment.shard for segment in self.segments(parameter.name, tp_rank)]
                if len(ranks) != len(set(ranks)):
                    raise PlanError(
                        f"a rank holds more than one segment of {parameter.name}: {ranks}"
                    )

    def segments(self, name: str, tp_rank: int = 0) -> tuple[Segment, ...]:
        """Segments of a tp rank's piece of the parameter in the order of elements."""
        return segments_of(self.parameter(name), self.topology.sizes, tp_rank)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the JSON form, in hexadecimal: equal exactly when two plans are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, floats that read back to the same value."""
        return plan_to_text(self.topology, self.settings, self.parameters, self.units, self.costs)

    @classmethod
    def from_json(cls, text: str) -> OwnershipPlan:
        """The plan that ``to_json`` wrote.  Raises PlanError that says what is wrong."""
        return cls(**plan_from_text(text))

    def first_difference(self, other: OwnershipPlan) -> str | None:
        """The first entry in which ``other`` differs, in words; None where the plans are equal.

        "here" is this plan and "there" the other, e.g. "owner of model.norm.weight: 2 here, 5
        there".
        """
        for label in ("topology", "settings"):
            mine, theirs = asdict(getattr(self, label)), asdict(getattr(other, label))
            for key, value in mine.items():
                if value != theirs[key]:
                    return _words(f"{label} {key}", value, theirs[key])
        declared = (without_owners(self.parameters), without_owners(other.parameters))
        return (
            _difference_of_records("parameter", *declared, parameter_entry)
            or _difference_of_records("unit", self.units, other.units, asdict)
            or _difference_of_values("owner of", self.units, self.owners, other.owners)
            or _difference_of_updates(self.parameters, other.parameters)
            or _difference_of_values("Newton-Schulz ms of", self.units, self.costs, other.costs)
        )


def _words(entry: str, mine: object, theirs: object) -> str:
    return f"{entry}: {mine} here, {theirs} there"


def _difference_of_records(
    label: str,
    mine: Sequence[object],
    theirs: Sequence[object],
    as_dict: Callable[[object], dict[str, object]],
) -> str | None:
    for index, (one, two) in enumerate(zip(mine, theirs, strict=False)):
        if one == two:
            continue
        first, second = as_dict(one), as_dict(two)
        if first["name"] != second["name"]:
            return _words(f"name of {label} {index}", first["name"], second["name"])
        key = next(key for key in first if first[key] != second[key])
        return _words(f"{key} of {label} {first['name']}", first[key], second[key])
    return (
        _words(f"number of {label}s", len(mine), len(theirs)) if len(mine) != len(theirs) else None
    )


def _difference_of_updates(
    mine: Sequence[LogicalParameter], theirs: Sequence[LogicalParameter]
) -> str | None:
    # Equal but for their owners, so both name the same axes.
    for one, two in zip(mine, theirs, strict=True):
        pairs = zip(one.update.axes, two.update.axes, strict=True)
        for (axis, here), (_, there) in pairs:
            if here != there:
                assert isinstance(here, Owned) and isinstance(there, Owned)
                return _words(f"{axis} owner of {one.name}", here.index, there.index)
    return None


def _difference_of_values(
    label: str, units: Sequence[Unit], mine: Sequence[object], theirs: Sequence[object]
) -> str | None:
    for unit, one, two in zip(units, mine, theirs, strict=True):
        if one != two:
            return _words(f"{label} {unit.name}", one, two)
    return None
