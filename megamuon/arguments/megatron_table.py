"""What becomes of each Megatron flag that users have in their scripts.

Owns the table of 300 flags (``megatron_flags.json``): name, Megatron's default, arity, and the
status here. Invariant: a flag is honoured if and only if a config field carries its dest; every
other status has a note that is printed (accepted, mapped) or a reason that is an error (refused),
so nothing is taken silently. Tested by ``tests/arguments/test_table.py``.

Source: the flags and their meaning follow Megatron-LM at d98e8a6 (2026-08-22).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

STATUSES = ("honoured", "mapped", "accepted", "refused")


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One of the 300 flags."""

    group: str
    flags: tuple[str, ...]
    dest: str
    default: Any  # Megatron's
    kind: str  # int, float, str, store_true or store_false
    choices: tuple[str, ...]  # Megatron's
    nargs: str | int | None
    status: str
    note: str  # what is printed (accepted, mapped) or why it is refused
    accept: tuple[str, ...] = ()  # values of a refused flag that change nothing and may be given
    refuse: Mapping[str, str] = field(
        default_factory=dict
    )  # single values that are refused, and why
    map_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # value -> {to, note}
    deviation: str = ""  # what differs from Megatron in a flag that is honoured, and why

    @property
    def flag(self) -> str:
        """The spelling that messages use."""
        return self.flags[0]


@lru_cache(maxsize=1)
def _stored() -> Mapping[str, Any]:
    text = resources.files("megamuon.arguments").joinpath("megatron_flags.json").read_text("utf-8")
    return json.loads(text)


@lru_cache(maxsize=1)
def table() -> tuple[TableEntry, ...]:
    """The 300 flags, in the order of their groups."""
    tuples = ("flags", "choices", "accept")
    return tuple(
        TableEntry(**{k: tuple(v) if k in tuples else v for k, v in entry.items()})
        for entry in _stored()["table"]
    )


@lru_cache(maxsize=1)
def table_by_dest() -> Mapping[str, TableEntry]:
    """The table by Megatron's dest."""
    return {entry.dest: entry for entry in table()}


@lru_cache(maxsize=1)
def outside_flags() -> frozenset[str]:
    """Spellings of all other Megatron flags: known by name, outside the table."""
    return frozenset(_stored()["outside"])
