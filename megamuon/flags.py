"""How a dataclass field becomes a command-line flag.

Owns the two directions of one declaration: ``flag(...)`` attaches help text, spellings, bounds and
parsers to a frozen dataclass field, and ``flag_specs(...)`` reads them back as ``FlagSpec`` records
from which the parser, the generated documentation and the range checks are built. Invariant: a flag
is declared once, as a field; its type, arity and choices come from the annotation, or its choices
from a registry. Any room may declare flags; ``megamuon.arguments`` puts them together. Tested by
``tests/arguments/test_parser.py``.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def flag(
    default: Any,
    help: str,
    *,
    names: tuple[str, ...] | None = None,
    off_names: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    parse: Callable[[str], Any] | None = None,
    choices: Callable[[], Iterable[Any]] | None = None,
) -> Any:
    """Declare a dataclass field that is also a flag.

    ``names`` are the spellings that set the value (for a bool: set True), ``off_names`` the
    spellings that set a bool False.  ``low``/``high`` are inclusive bounds, ``above``/``below``
    exclusive ones; they hold for every element of a tuple.  ``parse`` replaces the conversion that
    the annotation implies.  ``choices()`` gives the allowed values where they are the names of a
    registry; else a ``Literal`` says them.
    """
    metadata = {
        "help": help,
        "names": names,
        "off_names": off_names,
        "low": low,
        "high": high,
        "above": above,
        "below": below,
        "parse": parse,
        "choices": choices,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class FlagSpec:
    """One flag as the parser needs it."""

    component: str  # field name of the component in Config
    dest: str
    names: tuple[str, ...]  # spellings that take a value, or that set a bool True
    off_names: tuple[str, ...]  # spellings that set a bool False
    default: Any
    help: str
    value_type: type  # bool, int, float or str: the type of one word
    listed: tuple[Any, ...] | Callable[[], Iterable[Any]] | None  # choices, or what gives them
    many: bool  # a tuple: one or more words
    optional: bool  # None is a legal value
    bounds: tuple[float | None, float | None, float | None, float | None]  # low, high, above, below
    parse: Callable[[str], Any] | None

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """The allowed values as they are now; None where every value of the type is one."""
        return tuple(self.listed()) if callable(self.listed) else self.listed

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every way to write the flag."""
        return self.names + self.off_names

    @property
    def flag(self) -> str:
        """The spelling that messages use."""
        return self.spellings[0]


def _strip_optional(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        if len(kinds) != 1:
            raise TypeError(f"a flag may have one type besides None, got {annotation}")
        return kinds[0], len(kinds) != len(get_args(annotation))
    return annotation, False


def _word_type(annotation: Any) -> tuple[type, tuple[Any, ...] | None, bool]:
    """Type of one word, choices, and whether several words are taken."""
    if get_origin(annotation) is tuple:
        inner, choices, _ = _word_type(get_args(annotation)[0])
        return inner, choices, True
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return type(choices[0]), choices, False
    if annotation not in (bool, int, float, str):
        raise TypeError(f"no flag can be generated for the type {annotation}")
    return annotation, None, False


def _spellings(
    dest: str, default: Any, is_bool: bool, metadata: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    dashed = dest.replace("_", "-")
    names, off_names = metadata["names"], metadata["off_names"]
    if not is_bool:
        return names or (f"--{dashed}",), ()
    if default:
        # Megatron's factory gives a bool that defaults to True these two spellings.
        return names or (), off_names or (f"--no-{dashed}", f"--disable-{dashed}")
    return names or (f"--{dashed}",), off_names or ()


def flag_specs(component: str, config_class: type) -> tuple[FlagSpec, ...]:
    """The flags of one component, in field order.  Raises TypeError for a type that has no flag
    form.
    """
    hints = get_type_hints(config_class)
    specs = []
    for field in dataclasses.fields(config_class):
        annotation, optional = _strip_optional(hints[field.name])
        value_type, choices, many = _word_type(annotation)
        names, off_names = _spellings(field.name, field.default, value_type is bool, field.metadata)
        specs.append(
            FlagSpec(
                component=component,
                dest=field.name,
                names=names,
                off_names=off_names,
                default=field.default,
                help=field.metadata["help"],
                value_type=value_type,
                listed=field.metadata["choices"] or choices,
                many=many,
                optional=optional,
                bounds=tuple(field.metadata[key] for key in ("low", "high", "above", "below")),
                parse=field.metadata["parse"],
            )
        )
    return tuple(specs)
