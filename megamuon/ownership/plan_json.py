"""The JSON form of an ownership plan, and the reading of older versions.

Owns the text of a plan's parts, in version 2, and the reading of versions 1 and 2. Invariant: equal
parts have equal texts, and a text reads back to the parts it was made of; a plan of version 1,
which knew layouts, cuts and tp owners in place of placements, has the same owners here. Tested by
``tests/ownership/test_plan.py`` and ``tests/ownership/test_stored_plans.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from megamuon.matrices import Kind, LogicalParameter, Route, placements_for
from megamuon.ownership.holdings import PlanError
from megamuon.ownership.owners import with_owners
from megamuon.ownership.settings import PlannerSettings, Topology
from megamuon.ownership.units import Unit
from megamuon.placements import (
    Axis,
    AxisPlacement,
    Owned,
    Partial,
    Placed,
    Placement,
    Shard,
)

_FORMAT = "megamuon ownership plan"
_VERSION = 2
_WORDS: dict[str, type[AxisPlacement]] = {"owned": Owned, "shard": Shard, "partial": Partial}
_NAMES = {kind: word for word, kind in _WORDS.items()}


def plan_to_text(
    topology: Topology,
    settings: PlannerSettings,
    parameters: Sequence[LogicalParameter],
    units: Sequence[Unit],
    costs: Sequence[float],
) -> str:
    """Canonical JSON: sorted keys, no spaces, floats that read back to the same value."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "topology": asdict(topology),
        "settings": asdict(settings),
        "parameters": [parameter_entry(p) for p in parameters],
        "units": [
            {"name": u.name, "layer": u.layer, "members": list(u.members), "ms": cost}
            for u, cost in zip(units, costs, strict=True)
        ],
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plan_from_text(text: str) -> dict[str, Any]:
    """The parts that ``plan_to_text`` wrote, by name.  Raises PlanError that says what is wrong."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise PlanError(f"the ownership plan is not valid JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise PlanError(f"this JSON is no ownership plan: it lacks the entry format = {_FORMAT!r}")
    if content.get("version") not in (1, _VERSION):
        raise PlanError(
            f"ownership plan of version {content.get('version')!r}; this code reads 1 and"
            f" {_VERSION}"
        )
    try:
        if content["version"] == 1:
            content |= {key: _renamed(content[key]) for key in ("topology", "settings")}
        topology = Topology(**content["topology"])
        if content["version"] == 1:
            parameters = _parameters_of_version_1(content, topology)
        else:
            parameters = tuple(_parameter(entry) for entry in content["parameters"])
        numels = {p.name: p.numel for p in parameters}
        return {
            "topology": topology,
            "settings": PlannerSettings(**content["settings"]),
            "parameters": parameters,
            "units": tuple(_unit(entry, numels) for entry in content["units"]),
            "costs": tuple(float(entry["ms"]) for entry in content["units"]),
        }
    except KeyError as error:
        raise PlanError(
            f"the ownership plan lacks the entry or names the unknown parameter {error}"
        ) from error
    except PlanError:
        raise
    except (TypeError, ValueError) as error:
        raise PlanError(f"the ownership plan has an entry of the wrong form: {error}") from error


_ENUMS = {"kind": Kind, "route": Route}
_PLACEMENTS = ("storage", "update", "gradient")


def parameter_entry(parameter: LogicalParameter) -> dict[str, Any]:
    """The JSON form of one parameter."""
    values = {field.name: getattr(parameter, field.name) for field in fields(parameter)}
    for key in _ENUMS:
        values[key] = values[key].value
    for key in _PLACEMENTS:
        values[key] = _placement_entry(values[key])
    return {**values, "shape": list(parameter.shape), "aliases": list(parameter.aliases)}


def _placement_entry(placement: Placement) -> dict[str, list[Any]]:
    """By axis the word and what goes with it, such as ``["shard", 0, [0, 5, 8]]``."""
    entry: dict[str, list[Any]] = {}
    for axis, on_axis in placement.axes:
        entry[axis.value] = [_NAMES[type(on_axis)], *vars(on_axis).values()]
        if isinstance(on_axis, Shard) and on_axis.bounds is not None:
            entry[axis.value][2] = list(on_axis.bounds)
    return entry


def _placement(entry: Mapping[str, Sequence[Any]]) -> Placement:
    axes: dict[Axis, AxisPlacement] = {}
    for axis, (word, *values) in entry.items():
        if word == "shard" and values[1] is not None:
            values[1] = tuple(values[1])
        axes[Axis(axis)] = _WORDS[word](*values)
    return Placement.of(axes)


def _parameter(entry: Mapping[str, Any]) -> LogicalParameter:
    values = dict(entry)
    for key, enum in _ENUMS.items():
        values[key] = enum(values[key])
    for key in _PLACEMENTS:
        values[key] = _placement(values[key])
    values["shape"], values["aliases"] = tuple(values["shape"]), tuple(values["aliases"])
    return LogicalParameter(**values)


def _unit(entry: Mapping[str, Any], numels: Mapping[str, int]) -> Unit:
    members = tuple(entry["members"])
    return Unit(
        name=entry["name"],
        layer=entry["layer"],
        members=members,
        numel=sum(numels[name] for name in members),
    )


# --- version 1 -----------------------------------------------------------------------------------


_NEW_NAMES = {"rows": "replicas", "columns": "shards", "balance_columns": "balance_rails"}


def _renamed(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {_NEW_NAMES.get(name, name): value for name, value in entry.items()}


def _parameters_of_version_1(
    content: Mapping[str, Any], topology: Topology
) -> tuple[LogicalParameter, ...]:
    """Owners stood beside the units, and those on the tp axis in a list of their own."""
    found = [_parameter_of_version_1(entry) for entry in content["parameters"]]
    owners = {name: unit["owner"] for unit in content["units"] for name in unit["members"]}
    for name in owners.keys() - {p.name for p in found}:
        raise KeyError(name)
    # It named tp ranks for matrices in slices too, where every tp rank works on the whole.
    wanted = {p.name for p in found if isinstance(p.update.on(Axis.TP), Owned)}
    tp_owners = {name: rank for name, rank in content.get("tp_owners", ()) if name in wanted}
    return with_owners(found, topology, owners, tp_owners)


def _parameter_of_version_1(entry: Mapping[str, Any]) -> LogicalParameter:
    values = dict(entry)
    layout, cut = values.pop("layout"), values.pop("cut", None)
    partial = values.pop("tp_partial", False)
    if layout not in ("owner", "even"):
        raise ValueError(f"layout of {values['name']} is {layout!r}: owner or even")
    compute = gradient = Placement()
    if cut is not None:
        compute = gradient = Placement.of({Axis.TP: Shard(cut["dim"], tuple(cut["bounds"]))})
    elif partial:
        gradient = Placement.of({Axis.TP: Partial()})
    placed = Placed(shape=tuple(values["shape"]), compute=compute, gradient=gradient)
    values["shape"], values["aliases"] = placed.shape, tuple(values["aliases"])
    values["kind"], values["route"] = Kind(values["kind"]), Route(values["route"])
    placements = placements_for(values["route"], placed, owned=layout == "owner")
    return LogicalParameter(**values, **placements)
