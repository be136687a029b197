"""Flags and configuration.

Owns everything between the command line and a frozen ``Config``: one dataclass per component (a
field is a flag), the table of Megatron's flags, presets, derived values, checks, and the printed
and JSON forms. Invariant: choices that are names of a registry (optimizers, transports, policies)
are read from it, and defaults of a room's settings from that room. Tested by ``tests/arguments``.
"""

from megamuon.arguments.config import (
    Config,
    ConfigError,
    config_from_values,
    specs_by_dest,
    values_from_config,
)
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
)
from megamuon.arguments.parser import (
    ExtraArgsProvider,
    ParsedConfig,
    build_parser,
    parse_config,
)
from megamuon.arguments.printing import (
    config_from_json,
    config_from_nested,
    config_to_json,
    config_to_nested,
    format_config,
)

__all__ = [
    "CheckpointFlags",
    "Config",
    "ConfigError",
    "DataFlags",
    "DistributedFlags",
    "ExtraArgsProvider",
    "FaultFlags",
    "LoggingFlags",
    "ModelFlags",
    "OptimizerFlags",
    "OwnershipFlags",
    "ParallelFlags",
    "ParsedConfig",
    "PrecisionFlags",
    "ProfilingFlags",
    "RecomputeFlags",
    "ScheduleFlags",
    "TokenizerFlags",
    "TrainingFlags",
    "ValidationFlags",
    "build_parser",
    "config_from_json",
    "config_from_nested",
    "config_from_values",
    "config_to_json",
    "config_to_nested",
    "format_config",
    "parse_config",
    "specs_by_dest",
    "values_from_config",
]
