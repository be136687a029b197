"""The whole configuration: one frozen dataclass of component configs.

Owns ``Config``, the list of components and the conversions between a flat mapping of dests and the
nested dataclasses. Invariant: every dest belongs to exactly one component, so flat and nested forms
are equivalent. Tested by ``tests/arguments/test_config.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megamuon.arguments.config_data import DataFlags, ValidationFlags
from megamuon.arguments.config_model import ModelFlags, TokenizerFlags
from megamuon.arguments.config_output import CheckpointFlags, LoggingFlags, ProfilingFlags
from megamuon.arguments.config_parallel import (
    DistributedFlags,
    FaultFlags,
    OwnershipFlags,
    ParallelFlags,
    RecomputeFlags,
)
from megamuon.arguments.config_training import (
    OptimizerFlags,
    PrecisionFlags,
    ScheduleFlags,
    TrainingFlags,
    optimizer_flags,
)
from megamuon.flags import FlagSpec, flag_specs


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run was asked to do, resolved."""

    model: ModelFlags = field(default_factory=ModelFlags)
    tokenizer: TokenizerFlags = field(default_factory=TokenizerFlags)
    data: DataFlags = field(default_factory=DataFlags)
    training: TrainingFlags = field(default_factory=TrainingFlags)
    optimizer: OptimizerFlags = field(default_factory=lambda: optimizer_flags()())
    schedule: ScheduleFlags = field(default_factory=ScheduleFlags)
    precision: PrecisionFlags = field(default_factory=PrecisionFlags)
    parallel: ParallelFlags = field(default_factory=ParallelFlags)
    ownership: OwnershipFlags = field(default_factory=OwnershipFlags)
    recompute: RecomputeFlags = field(default_factory=RecomputeFlags)
    checkpoint: CheckpointFlags = field(default_factory=CheckpointFlags)
    validation: ValidationFlags = field(default_factory=ValidationFlags)
    logging: LoggingFlags = field(default_factory=LoggingFlags)
    profiling: ProfilingFlags = field(default_factory=ProfilingFlags)
    distributed: DistributedFlags = field(default_factory=DistributedFlags)
    fault: FaultFlags = field(default_factory=FaultFlags)


def components() -> dict[str, type]:
    """The class of each component, by its field in Config."""
    classes = {item.name: item.default_factory for item in dataclasses.fields(Config)}
    return {**classes, "optimizer": optimizer_flags()}  # type: ignore[dict-item]


class ConfigError(ValueError):
    """Everything that is wrong with a command line or a stored configuration; one line per
    problem.
    """

    def __init__(self, problems: tuple[str, ...] | list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def specs_by_dest() -> Mapping[str, FlagSpec]:
    """Every flag of every component by its dest.  Raises TypeError if two components share a
    dest.
    """
    return _specs(tuple(components().items()))


@cache
def _specs(classes: tuple[tuple[str, type], ...]) -> Mapping[str, FlagSpec]:
    found: dict[str, FlagSpec] = {}
    for component, config_class in classes:
        for spec in flag_specs(component, config_class):
            if spec.dest in found:
                raise TypeError(
                    f"{spec.dest} is in both {found[spec.dest].component} and {component}"
                )
            found[spec.dest] = spec
    return found


def config_from_values(values: Mapping[str, Any]) -> Config:
    """A Config from a flat mapping of dests; what is missing keeps its default.

    Raises ConfigError for a dest that no component has.
    """
    specs = specs_by_dest()
    unknown = sorted(set(values) - set(specs))
    if unknown:
        raise ConfigError([f"{name}: no component has such a field" for name in unknown])
    nested: dict[str, dict[str, Any]] = {component: {} for component in components()}
    for dest, value in values.items():
        nested[specs[dest].component][dest] = tuple(value) if isinstance(value, list) else value
    classes = components()
    return Config(**{name: classes[name](**fields) for name, fields in nested.items()})


def values_from_config(config: Config) -> dict[str, Any]:
    """The flat mapping of dests that ``config_from_values`` takes."""
    return {
        dest: getattr(getattr(config, spec.component), dest)
        for dest, spec in specs_by_dest().items()
    }
