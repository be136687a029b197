"""Suggestions for unknown flags: the nearest known names.

Owns the wording for unknown flags. Invariant: a Megatron flag outside the table is named as such;
anything else gets the nearest known spelling, if one is near. Tested by
``tests/arguments/test_parser.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_flag_problem(name: str, known: Iterable[str], outside: frozenset[str]) -> str:
    """One line for an unknown flag.  ``known`` are all spellings of this program."""
    dashed = "--" + name.lstrip("-").replace("_", "-").lower()
    spellings = list(known)
    if name in outside:
        return f"{name}: a Megatron flag outside this program's table; remove it"
    near = difflib.get_close_matches(dashed, spellings, n=1, cutoff=0.6)
    if near:
        return f"{name}: unknown flag; did you mean {near[0]}?"
    return f"{name}: unknown flag; --help lists all"
