"""Where does every parameter live?  The ownership plan, one frozen value for the whole run.

Owns ``OwnershipPlan``: parameters, units, owners, tp owners, costs and settings, the segment table
derived from them, its JSON form and its digest.  Invariant: each parameter in owner layout belongs
to exactly one unit, each unit to exactly one rank of the grid, each Muon matrix that tensor
parallelism cuts to exactly one tp rank besides, and the segments of a parameter tile
``[0, numel)``; a plan that breaks this cannot be made. Tested by ``tests/ownership/test_plan.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import NamedTuple

from megamuon.matrices import Cut, Kind, Layout, LogicalParameter, Route
from megamuon.ownership.settings import PlannerSettings, Topology
from megamuon.ownership.tensor_parallel import needs_tp_owner
from megamuon.ownership.units import Unit
from megamuon.placements import Axis, AxisPlacement, Owned, Partial, Placement, Replicate, Shard

__all__ = ["OwnershipPlan", "PlanError", "Segment", "Topology"]

_FORMAT = "megamuon ownership plan"
_VERSION = 1


class PlanError(ValueError):
    """A plan that contradicts itself, or a question that the plan has no answer to."""


class Segment(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, flattened row-major, and where they live.

    ``rank`` is a global rank for a parameter in owner layout and a shard in ``[0, K)`` for one in
    even layout (every replica holds the same slices).
    """

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class OwnershipPlan:
    """Who owns what: one value for the runtime, the optimizer, checkpoints and planning tools."""

    topology: Topology
    parameters: tuple[LogicalParameter, ...]  # registration order
    units: tuple[Unit, ...]
    owners: tuple[int, ...]  # global rank of each unit
    costs: tuple[float, ...]  # milliseconds of Newton-Schulz of each unit
    settings: PlannerSettings
    # Of each matrix that tensor parallelism cuts: the tp rank that works on the whole of it.
    tp_owners: tuple[tuple[str, int], ...] = ()  # sorted by name; empty without tensor parallelism

    def __post_init__(self) -> None:
        counts = (len(self.units), len(self.owners), len(self.costs))
        if len(set(counts)) != 1:
            raise PlanError(
                f"plan with {counts[0]} units, {counts[1]} owners and {counts[2]} costs"
            )
        for unit, owner in zip(self.units, self.owners, strict=True):
            if not 0 <= owner < self.topology.world:
                raise PlanError(
                    f"owner of {unit.name} is rank {owner}, of {self.topology.world} ranks"
                )
        unassigned = {p.name for p in self.parameters if p.layout is Layout.OWNER}
        for unit in self.units:
            for name in unit.members:
                if name not in unassigned:
                    raise PlanError(
                        f"unit {unit.name} lists {name}: in another unit, in even layout or unknown"
                    )
                unassigned.remove(name)
        if unassigned:
            raise PlanError(
                f"{len(unassigned)} parameters in owner layout have no unit, e.g. {min(unassigned)}"
            )
        self._check_tp()

    def _check_tp(self) -> None:
        tp = self.topology.tp
        for parameter in self.parameters:
            cut = parameter.cut
            if cut is not None and (
                cut.dim not in range(len(parameter.shape))
                or len(cut.bounds) != tp + 1
                or cut.bounds[-1] != parameter.shape[cut.dim]
            ):
                raise PlanError(
                    f"{parameter.name} {list(parameter.shape)} is cut along dim {cut.dim} at"
                    f" {list(cut.bounds)}, which does not make {tp} pieces (one per tp rank) of it"
                )
        names = [name for name, _ in self.tp_owners]
        if names != sorted(set(names)):
            raise PlanError("tp owners must be sorted by name and name each matrix once")
        wanted = {p.name for p in self.parameters if needs_tp_owner(p)} if tp > 1 else set()
        for name, rank in self.tp_owners:
            if name not in wanted:
                raise PlanError(
                    f"{name} has tp owner {rank} but is no Muon matrix that {tp} tp ranks cut"
                )
            if not 0 <= rank < tp:
                raise PlanError(f"tp owner of {name} is tp rank {rank}, of {tp} tp ranks")
        missing = wanted.difference(names)
        if missing:
            raise PlanError(f"{len(missing)} cut matrices have no tp owner, e.g. {min(missing)}")

    @cached_property
    def _by_name(self) -> dict[str, LogicalParameter]:
        """Parameters by every name of theirs."""
        return {name: p for p in self.parameters for name in (p.name, *p.aliases)}

    @cached_property
    def _owners_by_name(self) -> dict[str, int]:
        pairs = zip(self.units, self.owners, strict=True)
        return {name: owner for unit, owner in pairs for name in unit.members}

    def parameter(self, name: str) -> LogicalParameter:
        """The parameter of this name or alias.  Raises PlanError where there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise PlanError(f"the plan has no parameter named {name}") from None

    def owner_of(self, name: str) -> int:
        """Global rank that owns the parameter.  Raises PlanError: unknown name, even layout."""
        parameter = self.parameter(name)
        if parameter.layout is not Layout.OWNER:
            raise PlanError(f"{name} is in {parameter.layout.value} layout and has no owner")
        return self._owners_by_name[parameter.name]

    def tp_owner_of(self, name: str) -> int:
        """The tp rank that works on the whole of a matrix: 0 where nothing is cut."""
        return self._tp_owners_by_name.get(self.parameter(name).name, 0)

    # --- placements ------------------------------------------------------------------------------

    def storage(self, name: str) -> Placement:
        """Where the master, the reduced gradient and the optimizer's state of a parameter lie."""
        parameter = self.parameter(name)
        on_tp = _on_tp(parameter)
        if parameter.layout is not Layout.OWNER:
            return Placement.of({Axis.SHARD: Shard(0), Axis.TP: on_tp})
        owner, grid = self._owners_by_name[parameter.name], self.topology
        return Placement.of(
            {
                Axis.REPLICATE: Owned(grid.replica_of(owner)),
                Axis.SHARD: Owned(grid.shard_of(owner)),
                Axis.TP: on_tp,
            }
        )

    def compute(self, name: str) -> Placement:
        """What the module of a parameter reads: whole but for what tensor parallelism cuts."""
        return Placement.of({Axis.TP: _on_tp(self.parameter(name))})

    def gradient(self, name: str) -> Placement:
        """What a backward pass leaves of a parameter's gradient, before it is reduced."""
        parameter = self.parameter(name)
        on_tp = Partial() if parameter.tp_partial else _on_tp(parameter)
        return Placement.of({Axis.REPLICATE: Partial(), Axis.SHARD: Partial(), Axis.TP: on_tp})

    def update(self, name: str) -> Placement:
        """Where a parameter is updated.  For a matrix optimizer: who works on the whole of it, its
        owner, and the tp owner of one that tensor parallelism cuts; every rank of a replica that
        gathers slices (``--matrix-update gather``). Element by element: where it is stored.
        """
        parameter, stored = self.parameter(name), self.storage(name)
        if parameter.route is not Route.MATRIX:
            return stored
        if parameter.layout is not Layout.OWNER:
            return stored.replaced(Axis.SHARD, Replicate()).replaced(Axis.TP, Replicate())
        if parameter.cut is None:
            return stored
        return stored.replaced(Axis.TP, Owned(self.tp_owner_of(name)))

    def check_contiguous(self) -> None:
        """Check that no rank holds two segments of a parameter (MatrixFSDP, section 4.1: its
        collectives send one interval per owner). Raises PlanError that names the parameter.
        """
        for parameter in self.parameters:
            for tp_rank in range(self.topology.tp if parameter.cut is not None else 1):
                ranks = [segment.rank for segment in self.segments(parameter.name, tp_rank)]
                if len(ranks) != len(set(ranks)):
                    raise PlanError(
                        f"a rank holds more than one segment of {parameter.name}: {ranks}"
                    )

    @cached_property
    def _tp_owners_by_name(self) -> dict[str, int]:
        return dict(self.tp_owners)

    def segments(self, name: str, tp_rank: int = 0) -> tuple[Segment, ...]:
        """Segments of a tp rank's piece of the parameter (the whole, where nothing is cut) in order
        of elements: they tile the piece, none is empty.

        Even layout: slices of dim 0 of ceil(rows / K) rows each, the rule of torch.chunk; shards
        without rows have no segment.
        """
        parameter = self.parameter(name)
        numel = parameter.piece_numel(tp_rank)
        if numel == 0:
            return ()
        if parameter.layout is Layout.OWNER:
            return (Segment(self._owners_by_name[parameter.name], 0, numel),)
        rows = parameter.piece_shape(tp_rank)[0]
        width = numel // rows
        share = -(-rows // self.topology.shards)
        starts = range(0, rows, share)
        return tuple(
            Segment(shard, start * width, min(start + share, rows) * width)
            for shard, start in enumerate(starts)
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the JSON form, in hexadecimal: equal exactly when two plans are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, floats that read back to the same value."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "topology": _stored(self.topology),
            "settings": _stored(self.settings),
            "tp_owners": [list(pair) for pair in self.tp_owners],
            "parameters": [_parameter_to_dict(p) for p in self.parameters],
            "units": [
                {
                    "name": u.name,
                    "layer": u.layer,
                    "members": list(u.members),
                    "owner": owner,
                    "ms": cost,
                }
                for u, owner, cost in zip(self.units, self.owners, self.costs, strict=True)
            ],
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> OwnershipPlan:
        """The plan that ``to_json`` wrote.  Raises PlanError that says what is wrong."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise PlanError(f"the ownership plan is not valid JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise PlanError(
                f"this JSON is no ownership plan: it lacks the entry format = {_FORMAT!r}"
            )
        if content.get("version") != _VERSION:
            raise PlanError(
                f"ownership plan of version {content.get('version')!r}; this code reads {_VERSION}"
            )
        try:
            parameters = tuple(_parameter_from_dict(entry) for entry in content["parameters"])
            sizes = {p.name: p.numel for p in parameters}
            return cls(
                topology=Topology(**_read(content["topology"])),
                settings=PlannerSettings(**_read(content["settings"])),
                parameters=parameters,
                tp_owners=tuple((name, rank) for name, rank in content.get("tp_owners", ())),
                units=tuple(_unit_from_dict(entry, sizes) for entry in content["units"]),
                owners=tuple(int(entry["owner"]) for entry in content["units"]),
                costs=tuple(float(entry["ms"]) for entry in content["units"]),
            )
        except KeyError as error:
            raise PlanError(
                f"the ownership plan lacks the entry or names the unknown parameter {error}"
            ) from error
        except PlanError:
            raise
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"the ownership plan has an entry of the wrong form: {error}"
            ) from error

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
        return (
            _difference_of_records(
                "parameter", self.parameters, other.parameters, _parameter_to_dict
            )
            or _difference_of_records("unit", self.units, other.units, asdict)
            or _difference_of_values("owner of", self.units, self.owners, other.owners)
            or _difference_of_tp_owners(self.tp_owners, other.tp_owners)
            or _difference_of_values("Newton-Schulz ms of", self.units, self.costs, other.costs)
        )


def _on_tp(parameter: LogicalParameter) -> AxisPlacement:
    cut = parameter.cut
    return Replicate() if cut is None else Shard(cut.dim, cut.bounds)


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


def _difference_of_tp_owners(
    mine: Sequence[tuple[str, int]], theirs: Sequence[tuple[str, int]]
) -> str | None:
    # Equal parameters and tp sizes, so both name the same matrices.
    for (name, one), (_, two) in zip(mine, theirs, strict=True):
        if one != two:
            return _words(f"tp owner of {name}", one, two)
    return None


def _difference_of_values(
    label: str, units: Sequence[Unit], mine: Sequence[object], theirs: Sequence[object]
) -> str | None:
    for unit, one, two in zip(units, mine, theirs, strict=True):
        if one != two:
            return _words(f"{label} {unit.name}", one, two)
    return None


# Fields that stored plans know by other names.
_STORED_NAMES = {"replicas": "rows", "shards": "columns", "balance_rails": "balance_columns"}
_FIELD_NAMES = {stored: name for name, stored in _STORED_NAMES.items()}


def _stored(value: Topology | PlannerSettings) -> dict[str, object]:
    return {_STORED_NAMES.get(name, name): part for name, part in asdict(value).items()}


def _read(entry: Mapping[str, object]) -> dict[str, object]:
    return {_FIELD_NAMES.get(name, name): part for name, part in entry.items()}


_ENUMS = {"kind": Kind, "route": Route, "layout": Layout}


def _parameter_to_dict(parameter: LogicalParameter) -> dict[str, object]:
    values = {field.name: getattr(parameter, field.name) for field in fields(parameter)}
    for key in _ENUMS:
        values[key] = values[key].value
    if values["cut"] is not None:
        values["cut"] = {"dim": parameter.cut.dim, "bounds": list(parameter.cut.bounds)}
    return {**values, "shape": list(parameter.shape), "aliases": list(parameter.aliases)}


def _parameter_from_dict(entry: Mapping[str, object]) -> LogicalParameter:
    values = dict(entry)
    for key, enum in _ENUMS.items():
        values[key] = enum(values[key])
    values["shape"], values["aliases"] = tuple(values["shape"]), tuple(values["aliases"])
    if values.get("cut") is not None:
        cut = values["cut"]
        values["cut"] = Cut(dim=cut["dim"], bounds=tuple(cut["bounds"]))
    return LogicalParameter(**values)


def _unit_from_dict(entry: Mapping[str, object], sizes: Mapping[str, int]) -> Unit:
    members = tuple(entry["members"])
    return Unit(
        name=entry["name"],
        layer=entry["layer"],
        members=members,
        numel=sum(sizes[name] for name in members),
    )
