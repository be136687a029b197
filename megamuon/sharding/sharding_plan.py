"""The sharding plan: a placement per parameter, a contract per module boundary.

Owns ``ShardingPlan`` and ``plan_sharding``. Invariants: planning is pure (shapes and names in, a
frozen value out; no process group, no rank), every parameter of the model has exactly one entry per
name, tied names agree, and a parameter that no rule knows is an error that names it. Source:
HyperParallel-FSDP, section 4.1. Tested by ``tests/sharding/test_sharding_plan.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType

from torch import nn

from megamuon.placements import Placed
from megamuon.sharding.roles import Role, classify
from megamuon.sharding.templates import (
    REQUIRED,
    ROLE_TYPES,
    BoundaryType,
    Contract,
    Grain,
    ShardingError,
    contract,
    place,
)

_FORMAT = "megamuon sharding plan"
_VERSION = 1
LOSS = "loss"  # child of the root that turns logits and labels into losses


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """One name of one parameter."""

    name: str
    role: Role
    boundary: str  # module path
    placement: Placed


@dataclass(frozen=True, kw_only=True)
class BoundaryEntry:
    """One module at whose edge activations may change their form."""

    path: str
    type: BoundaryType
    contract: Contract


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Where everything lies along the tp axis: one value for all ranks."""

    tp: int
    sequence_parallel: bool
    parameters: tuple[ParameterEntry, ...]  # registration order, tied parameters under each name
    boundaries: tuple[BoundaryEntry, ...]

    @cached_property
    def placements(self) -> Mapping[str, Placed]:
        """Placement by parameter name, every name of a tied parameter included."""
        return MappingProxyType({entry.name: entry.placement for entry in self.parameters})

    def to_json(self) -> str:
        """Canonical JSON: equal texts for equal plans."""
        body = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the JSON form, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Found:
    """One parameter name, classified."""

    name: str
    module: str
    attribute: str
    shape: tuple[int, ...]
    identity: int
    role: Role
    boundary: str


def _classified(model: nn.Module) -> list[_Found]:
    found, unknown = [], []
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            known = classify(path)
            if known is None:
                unknown.append(f"{name} {list(parameter.shape)} in {type(module).__name__}")
                continue
            found.append(
                _Found(
                    name=name,
                    module=path,
                    attribute=attribute,
                    shape=tuple(parameter.shape),
                    identity=id(parameter),
                    role=known[0],
                    boundary=known[1],
                )
            )
    if unknown:
        raise ShardingError(
            "no rule of tensor parallelism knows these parameters; run without"
            " --tensor-model-parallel-size, or add a rule to megamuon/sharding/roles.py:\n  "
            + "\n  ".join(unknown)
        )
    return found


def _boundary_types(found: list[_Found]) -> dict[str, BoundaryType]:
    """Type of each boundary from the roles of its members, in registration order."""
    roles: dict[str, set[Role]] = {}
    for entry in found:
        roles.setdefault(entry.boundary, set()).add(entry.role)
    types = {}
    for path, members in roles.items():
        kinds = {ROLE_TYPES[role] for role in members}
        if len(kinds) != 1:
            raise ShardingError(f"{path} has the roles of several boundaries: {sorted(kinds)}")
        (kind,) = kinds
        missing = REQUIRED.get(kind, frozenset()) - members
        if missing:
            raise ShardingError(
                f"{path} looks like a boundary of type {kind.value}, but no parameter in it plays"
                f" the role {', '.join(sorted(missing))}"
            )
        types[path] = kind
    return types


def _head_channels(model: nn.Module, path: str) -> int:
    """Channels of one head, as the attention module or its config says."""
    module = model.get_submodule(path)
    for holder, attribute in (
        (module, "head_dim"),
        (getattr(module, "config", None), "kv_channels"),
    ):
        value = getattr(holder, attribute, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ShardingError(
        f"{path} ({type(module).__name__}) does not say how many channels a head has: give it a"
        " head_dim or a config with kv_channels"
    )


def _grains(model: nn.Module, found: list[_Found]) -> dict[tuple[str, Role], Grain]:
    """What each boundary is cut by, for every role in it that is cut."""
    weights = [entry for entry in found if len(entry.shape) == 2]
    query_rows = {e.boundary: e.shape[0] for e in weights if e.role is Role.QUERY}
    grains: dict[tuple[str, Role], Grain] = {}
    for entry in weights:
        rows = entry.shape[0]
        if entry.role in (Role.VOCABULARY_TABLE, Role.VOCABULARY_HEAD):
            grains[entry.boundary, entry.role] = Grain(word="vocabulary rows", count=rows)
        elif entry.role in (Role.COLUMN, Role.EXPERT_COLUMN):
            row = Role.ROW if entry.role is Role.COLUMN else Role.EXPERT_ROW
            grain = Grain(word="inner features", count=rows)
            grains[entry.boundary, entry.role] = grains[entry.boundary, row] = grain
        elif entry.role is Role.KEY_VALUE:
            channels = _head_channels(model, entry.boundary)
            groups = rows // channels
            grains[entry.boundary, entry.role] = Grain(
                word="key/value groups", count=groups, size=channels
            )
            size = query_rows[entry.boundary] // max(groups, 1)
            grain = Grain(word="key/value groups", count=groups, size=size)
            grains[entry.boundary, Role.QUERY] = grain
            grains[entry.boundary, Role.ATTENTION_OUTPUT] = grain
    return grains


def _compares_tokens(model: nn.Module, path: str, kind: BoundaryType) -> bool:
    """Whether a router decides by looking at all tokens: its config sets a capacity."""
    config = getattr(model.get_submodule(path), "config", None)
    return kind is BoundaryType.ROUTER and getattr(config, "capacity_factor", None) is not None


def _check_ties(found: list[_Found], entries: list[ParameterEntry]) -> None:
    first: dict[int, ParameterEntry] = {}
    for known, entry in zip(found, entries, strict=True):
        other = first.setdefault(known.identity, entry)
        if other.placement != entry.placement:
            raise ShardingError(
                f"{other.name} and {entry.name} are one parameter, but as {other.role.value} and"
                f" {entry.role.value} they would lie differently"
            )


def _plan_of_one(model: nn.Module) -> ShardingPlan:
    """Nothing is cut, so nothing needs a rule."""
    entries = tuple(
        ParameterEntry(
            name=name,
            role=Role.REPLICATED,
            boundary=name.rpartition(".")[0],
            placement=Placed(shape=tuple(parameter.shape)),
        )
        for name, parameter in model.named_parameters(remove_duplicate=False)
    )
    return ShardingPlan(tp=1, sequence_parallel=False, parameters=entries, boundaries=())


def plan_sharding(model: nn.Module, *, tp: int, sequence_parallel: bool = False) -> ShardingPlan:
    """The plan of a whole ``model`` (on any device, meta included) for ``tp`` ranks.

    Sequence parallelism is off at ``tp`` 1.  Raises ShardingError: a parameter without a rule, a
    boundary that lacks members, a cut that leaves a rank without elements.
    """
    if tp < 1:
        raise ShardingError(f"{tp} tensor-parallel ranks: give 1 or more")
    sequence_parallel = sequence_parallel and tp > 1
    if tp == 1:
        return _plan_of_one(model)
    found = _classified(model)
    types = _boundary_types(found)
    grains = _grains(model, found)
    comparing = {path for path, kind in types.items() if _compares_tokens(model, path, kind)}
    entries = [
        ParameterEntry(
            name=entry.name,
            role=entry.role,
            boundary=entry.boundary,
            placement=place(
                entry.name,
                entry.shape,
                entry.role,
                grains.get((entry.boundary, entry.role)),
                tp=tp,
                partial_tokens=sequence_parallel and entry.boundary not in comparing,
            ),
        )
        for entry in found
    ]
    _check_ties(found, entries)
    if BoundaryType.HEAD in types.values():
        if LOSS not in dict(model.named_children()):
            raise ShardingError(
                f"{type(model).__name__} has an output head but no child called {LOSS!r}: the loss"
                " of a cut vocabulary is computed there"
            )
        types[LOSS] = BoundaryType.LOSS
    types[""] = BoundaryType.MODEL
    return ShardingPlan(
        tp=tp,
        sequence_parallel=sequence_parallel,
        parameters=tuple(entries),
        boundaries=tuple(
            BoundaryEntry(
                path=path,
                type=kind,
                contract=contract(
                    kind, sequence_parallel=sequence_parallel, all_tokens=path in comparing
                ),
            )
            for path, kind in types.items()
        ),
    )
