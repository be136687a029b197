"""The configuration as text and as JSON.

Owns the block that is printed at start (Megatron's layout) and the JSON form that lies beside every
checkpoint. Invariant: JSON to Config to JSON is the identity, and a field that this version does
not know is an error, never dropped. Nothing is pickled. Tested by
``tests/arguments/test_printing.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from megamuon.arguments.config import (
    Config,
    ConfigError,
    components,
    config_from_values,
    specs_by_dest,
    values_from_config,
)
from megamuon.flags import FlagSpec

_DOTTED_WIDTH = 48


def format_config(config: Config) -> str:
    """Every value, sorted by name whatever the case, names dotted to 48 columns."""
    values = values_from_config(config)
    lines = ["------------------------ arguments ------------------------"]
    for name in sorted(values, key=str.lower):
        shown = list(values[name]) if isinstance(values[name], tuple) else values[name]
        lines.append(f"  {name} {'.' * (_DOTTED_WIDTH - len(name))} {shown}")
    lines.append("-------------------- end of arguments ---------------------")
    return "\n".join(lines)


def config_to_nested(config: Config) -> dict[str, dict[str, Any]]:
    """Component -> dest -> value, with lists for tuples: what JSON can hold."""
    nested: dict[str, dict[str, Any]] = {component: {} for component in components()}
    for dest, value in values_from_config(config).items():
        spec = specs_by_dest()[dest]
        nested[spec.component][dest] = list(value) if isinstance(value, tuple) else value
    return nested


def config_to_json(config: Config) -> str:
    """The nested form as JSON text."""
    return json.dumps(config_to_nested(config), indent=2) + "\n"


def _type_problem(spec: FlagSpec, value: Any) -> str | None:
    """A line when a stored value cannot be a value of the field."""
    where = f"{spec.component}.{spec.dest}: {value!r}"
    if value is None:
        return None if spec.optional else f"{where}: a value is needed"
    if spec.many and not isinstance(value, list):
        return f"{where}: must be a list"
    for item in value if spec.many else [value]:
        allowed = (int, float) if spec.value_type is float else (spec.value_type,)
        # bool is an int to Python, never to a configuration.
        if not isinstance(item, allowed) or (
            spec.value_type is not bool and isinstance(item, bool)
        ):
            return f"{where}: must be of type {spec.value_type.__name__}"
        if spec.choices is not None and item not in spec.choices:
            return f"{where}: must be one of {', '.join(str(c) for c in spec.choices)}"
        if isinstance(item, float) and not math.isfinite(item):
            return f"{where}: must be finite"
    return None


def config_from_nested(nested: Mapping[str, Any]) -> Config:
    """A Config from the nested form.  Fields that are missing keep their defaults.

    Raises ConfigError naming every unknown component or field and every value of a wrong type.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    specs, known = specs_by_dest(), components()
    for component, fields in nested.items():
        if component not in known or not isinstance(fields, Mapping):
            problems.append(f"{component}: no component has this name")
            continue
        for dest, value in fields.items():
            spec = specs.get(dest)
            if spec is None or spec.component != component:
                problems.append(f"{component}.{dest}: no such field")
                continue
            problem = _type_problem(spec, value)
            if problem:
                problems.append(problem)
            values[dest] = value
    if problems:
        raise ConfigError(problems)
    return config_from_values(values)


def config_from_json(text: str) -> Config:
    """The inverse of ``config_to_json``.  Raises ConfigError, also for text that is not JSON."""
    try:
        nested = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([f"stored arguments are not JSON: {error}"]) from error
    if not isinstance(nested, dict):
        raise ConfigError([f"stored arguments must be an object, not {type(nested).__name__}"])
    return config_from_nested(nested)
