"""The argument parser: from words on the command line to a resolved configuration.

Owns ``parse_config``. Invariants: all problems of a command line are found in one go and raised
together; nothing that was given is dropped without a printed note; precedence is explicit flag,
then mapped Megatron flag, then checkpoint arguments (``--use-checkpoint-args``), then those of a
Hugging Face folder, then preset, then the caller's defaults, then the field's default. Tested by
``tests/arguments/test_parser.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megamuon.arguments.checkpoint_arguments import (
    CheckpointArgsReader,
    FolderArgsReader,
    checkpoint_values,
    folder_values,
)
from megamuon.arguments.config import Config, ConfigError, config_from_values, specs_by_dest
from megamuon.arguments.derive import derive
from megamuon.arguments.mapping import apply_mapped_flags, apply_presets
from megamuon.arguments.megatron_table import TableEntry, outside_flags, table, table_by_dest
from megamuon.arguments.run_context import RunContext
from megamuon.arguments.suggest import unknown_flag_problem
from megamuon.arguments.validate import problems_of
from megamuon.flags import FlagSpec

# Table flags that are no config fields have this prefix, so that they never meet a field's dest.
_TABLE_PREFIX = "megatron:"

# Values of our own flags that are known by name and not in this version. [dest][value] = reason
REFUSED_VALUES: Mapping[str, Mapping[Any, str]] = {
    "line": {
        "H": "its relays of gathered matrices are not in this version; use B or D",
    },
}

ExtraArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


@dataclass(frozen=True, kw_only=True)
class ParsedConfig:
    """What ``parse_config`` returns."""

    config: Config
    notes: tuple[str, ...]  # lines to print at start
    explicit: frozenset[str]  # dests given on the command line
    extra: argparse.Namespace  # what extra_args_provider added


@dataclass(kw_only=True)
class _Words:
    """What the command line says, before presets and defaults."""

    given: dict[str, Any] = field(default_factory=dict)  # field dest -> value
    table_given: dict[str, Any] = field(default_factory=dict)  # table dest -> value
    unusable: set[str] = field(default_factory=set)  # field dests whose value could not be read
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, so that errors can be collected."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def _word_reader(spec: FlagSpec) -> Callable[[str], Any]:
    reader = spec.parse or spec.value_type

    def read(word: str) -> Any:
        return reader(word)

    # argparse names this in "invalid ... value".
    read.__name__ = {int: "integer", float: "number", str: "text"}[spec.value_type]
    return read


def _add_field(group: argparse._ArgumentGroup, spec: FlagSpec) -> None:
    text = spec.help.replace("%", "%%")
    if spec.value_type is bool:
        if spec.names:
            group.add_argument(*spec.names, dest=spec.dest, action="store_true", help=text)
        if spec.off_names:
            group.add_argument(*spec.off_names, dest=spec.dest, action="store_false", help=text)
        return
    shown = "{" + ",".join(str(c) for c in spec.choices) + "}" if spec.choices else None
    group.add_argument(
        *spec.names,
        dest=spec.dest,
        type=_word_reader(spec),
        metavar=shown or spec.dest.rsplit("_", 1)[-1].upper(),
        nargs="+" if spec.many else None,
        help=f"{text} (default: {spec.default})",
    )


def _add_table_entry(parser: argparse.ArgumentParser, entry: TableEntry) -> None:
    """A Megatron flag that is no field: recognised, hidden from --help, left to the table."""
    dest = _TABLE_PREFIX + entry.dest
    if entry.kind in ("store_true", "store_false"):
        parser.add_argument(*entry.flags, dest=dest, action=entry.kind, help=argparse.SUPPRESS)
        return
    word_type = {"int": int, "float": float, "str": str}[entry.kind]
    parser.add_argument(
        *entry.flags,
        dest=dest,
        type=word_type,
        choices=[word_type(choice) for choice in entry.choices] or None,
        nargs=entry.nargs,
        help=argparse.SUPPRESS,
    )


def build_parser(extra_args_provider: ExtraArgsProvider | None = None) -> argparse.ArgumentParser:
    """The argparse parser, generated from the config dataclasses and the flag table.

    A value that was not given is absent from its namespace, except for extra arguments.
    """
    parser = _Parser(
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Pretrain a language model with matrix owners.",
        epilog="docs/flags.md lists every flag, and what becomes of Megatron's.",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec in specs_by_dest().values():
        if spec.component not in groups:
            groups[spec.component] = parser.add_argument_group(spec.component)
        _add_field(groups[spec.component], spec)
    for entry in table():
        if entry.status != "honoured":
            _add_table_entry(parser, entry)
    if extra_args_provider is not None:
        parser.argument_default = None  # extra arguments keep argparse's usual defaults
        parser = extra_args_provider(parser) or parser
    return parser


def _segments(argv: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Words before the first flag, and one list per flag: the flag and the words that follow it."""
    stray: list[str] = []
    segments: list[list[str]] = []
    for word in argv:
        is_flag = word.startswith("--") or (len(word) > 1 and word[0] == "-" and word[1].isalpha())
        if is_flag:
            segments.append([word])
        elif segments:
            segments[-1].append(word)
        else:
            stray.append(word)
    return stray, segments


def _read_words(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, str], _Words]:
    """Parse flag by flag, so that one bad flag hides no other.  Returns values, dest ->
    spelling, problems.
    """
    words = _Words()
    # argparse's public calls parse everything at once; its table of spellings goes one by one.
    known = parser._option_string_actions
    namespace, _ = parser.parse_known_args([])  # the defaults of extra arguments; flags have none
    spelled: dict[str, str] = {}
    stray, segments = _segments(argv)
    words.problems += [f"{word!r}: a word that belongs to no flag" for word in stray]
    for segment in segments:
        name = segment[0].split("=", 1)[0]
        if name not in known:
            words.problems.append(unknown_flag_problem(name, known, outside_flags()))
            continue
        dest = known[name].dest
        if dest in spelled:
            words.notes.append(f"{name} was given more than once; the last value counts")
        spelled[dest] = name
        try:
            _, rest = parser.parse_known_args(segment, namespace)
        except argparse.ArgumentError as error:
            text = str(error).split(": ", 1)[-1]
            words.problems.append(f"{name} {' '.join(segment[1:])}".rstrip() + f": {text}")
            words.unusable.add(dest)
            continue
        words.problems += [
            f"{word!r} after {name}: a word that belongs to no flag" for word in rest
        ]
    return namespace, spelled, words


def _resolve_field_value(flag: str, value: Any, spec: FlagSpec, words: _Words) -> Any:
    """Choices, and the table's rules for single values; element by element in a tuple."""
    if isinstance(value, list):
        return tuple(_resolve_field_value(flag, item, spec, words) for item in value)
    entry = table_by_dest().get(spec.dest)
    if value in REFUSED_VALUES.get(spec.dest, {}):
        words.problems.append(f"{flag} {value}: refused: {REFUSED_VALUES[spec.dest][value]}")
        return value
    if entry is not None and value in entry.map_values:
        target = entry.map_values[value]
        if target["note"]:
            words.notes.append(target["note"])
        return target["to"]
    if spec.choices is None or value in spec.choices:
        return value
    if entry is not None and value in entry.refuse:
        words.problems.append(f"{flag} {value}: refused: {entry.refuse[value]}")
    else:
        allowed = ", ".join(str(choice) for choice in spec.choices)
        words.problems.append(f"{flag} {value}: must be one of {allowed}")
    return value


def _as_words(value: Any) -> str:
    if isinstance(value, bool):
        return ""
    return " ".join(str(item) for item in value) if isinstance(value, list) else str(value)


def _resolve_table_value(flag: str, value: Any, entry: TableEntry, words: _Words) -> None:
    """Turn a given table flag into a problem, a note, or a flag to be mapped."""
    said = f"{flag} {_as_words(value)}".rstrip()
    if entry.status == "refused":
        if _as_words(value) in entry.accept:
            words.notes.append(f"{said}: accepted, it changes nothing ({entry.note})")
        else:
            words.problems.append(f"{said}: refused: {entry.note}")
    elif isinstance(value, str) and value in entry.refuse:
        words.problems.append(f"{said}: refused: {entry.refuse[value]}")
    elif entry.status == "accepted":
        words.notes.append(f"{said}: accepted without effect: {entry.note}")
    else:
        words.table_given[entry.dest] = value


def _sort_values(
    namespace: argparse.Namespace, spelled: Mapping[str, str], words: _Words
) -> argparse.Namespace:
    """Split the namespace into fields, table flags and extra arguments; returns the extras."""
    entries, specs = table_by_dest(), specs_by_dest()
    extra = argparse.Namespace()
    for dest, value in vars(namespace).items():
        if dest in specs:
            before = len(words.problems)
            resolved = _resolve_field_value(spelled[dest], value, specs[dest], words)
            if len(words.problems) == before:
                words.given[dest] = resolved
            else:
                words.unusable.add(dest)
        elif dest.startswith(_TABLE_PREFIX):
            _resolve_table_value(spelled[dest], value, entries[dest[len(_TABLE_PREFIX) :]], words)
        else:
            setattr(extra, dest, value)
    return extra


def _take_required(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Take `required` off the extra arguments (flags are parsed one by one); returns dest and
    spelling of each.
    """
    required = []
    for action in parser._actions:
        if not action.option_strings:
            raise ValueError(
                f"extra argument {action.dest!r}: only --flags can be added, not positional words"
            )
        if action.required:
            required.append((action.dest, action.option_strings[0]))
            action.required = False
    return required


def parse_config(
    argv: Sequence[str],
    *,
    presets: Mapping[str, Mapping[str, Any]],
    world_size: int,
    local_world_size: int | None = None,
    defaults: Mapping[str, Any] | None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    read_checkpoint_args: CheckpointArgsReader | None = None,
    read_folder_args: FolderArgsReader | None = None,
) -> ParsedConfig:
    """Read a command line (without the program's name) into a resolved, checked configuration.

    ``presets`` maps the names of ``--model`` to values by dest; ``local_world_size`` are the ranks
    of a node, for the default of ``--shard-size``; ``defaults`` are the calling
    script's values for dests that nobody gave.  ``read_checkpoint_args(load, step)`` returns the
    nested arguments of a checkpoint, or None when there is none; it is called for
    ``--use-checkpoint-args`` only.  ``read_folder_args(place)`` returns those of a Hugging Face
    folder in ``--load`` or ``--pretrained-checkpoint``, or None.  Raises ConfigError with every
    problem.  ``--help`` prints and raises SystemExit(0), as argparse does.
    """
    parser = build_parser(extra_args_provider)
    required = _take_required(parser)
    namespace, spelled, words = _read_words(parser, argv)
    words.problems += [f"{flag}: required" for dest, flag in required if dest not in spelled]
    extra = _sort_values(namespace, spelled, words)

    preset = presets.get(str(words.given.get("model")), {})
    mapped = apply_mapped_flags(words.table_given, words.given, preset)
    explicit_values = {**mapped.values, **words.given}
    presetted = apply_presets(explicit_values, presets)
    folder = folder_values(explicit_values, read_folder_args)
    stored = checkpoint_values(
        explicit_values, read_checkpoint_args, needed=not (folder.values or folder.problems)
    )
    for step in (mapped, presetted, folder, stored):
        words.problems += step.problems
        words.notes += step.notes
    values = {
        **{dest: spec.default for dest, spec in specs_by_dest().items()},
        **_checked_defaults(defaults or {}),
        **presetted.values,
        **folder.values,
        **stored.values,
        **explicit_values,
    }
    context = RunContext(
        world_size=world_size,
        local_world_size=local_world_size,
        explicit=frozenset(explicit_values),
        unusable=frozenset(words.unusable),
    )
    resolved, notes = derive(values, context)
    config = config_from_values(resolved)
    words.problems += problems_of(config, context)
    if words.problems:
        raise ConfigError(list(dict.fromkeys(words.problems)))
    return ParsedConfig(
        config=config,
        notes=tuple(dict.fromkeys([*words.notes, *notes])),
        explicit=frozenset(explicit_values),
        extra=extra,
    )


def _checked_defaults(defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = sorted(set(defaults) - set(specs_by_dest()))
    if unknown:
        raise ValueError(f"defaults name no flag: {unknown}")
    return defaults
