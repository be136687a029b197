"""What tools write with ``--json``: the keys, as ``--help`` says them, and the file.

Owns ``figures.json``: for each tool its keys and what they say. A dot goes one level down, into
each entry of a list too; ``*`` is any name. Invariant: a file has no key at its top that is not
described there. Tested by ``tests/test_tools_page.py``.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
TABLE = TOOLS / "figures.json"


def described(script: str) -> dict[str, str]:
    """The keys of the tool in the file ``script``. Raises KeyError for one that has no entry."""
    name = Path(script).resolve().relative_to(TOOLS).as_posix()
    return json.loads(TABLE.read_text(encoding="utf-8"))[name]


class _WithDefaults(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and leaves the list of keys as it is."""


FORMATTERS = {
    argparse.HelpFormatter: argparse.RawDescriptionHelpFormatter,
    argparse.ArgumentDefaultsHelpFormatter: _WithDefaults,
}


def add_json_flag(
    parser: argparse.ArgumentParser, script: str, group: argparse._ArgumentGroup | None = None
) -> None:
    """``--json FILE``, in ``group`` if given, and its keys at the end of ``--help``."""
    (group or parser).add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there; the keys are below"
    )
    lines = ["keys of --json (ratios are ours over theirs unless called speedup; a dot goes one"]
    lines += ["level down, into each entry of a list too; * is any name):"]
    for key, text in described(script).items():
        line = f"{key}: {text}" if text else key
        indents = {"initial_indent": "  ", "subsequent_indent": "      "}
        lines.append(textwrap.fill(line, 96, break_on_hyphens=False, **indents))
    parser.epilog = "\n".join(lines)
    parser.formatter_class = FORMATTERS.get(parser.formatter_class, parser.formatter_class)


def write_json(path: Path | None, script: str, figures: Mapping[str, Any]) -> None:
    """Write ``figures`` if there is a ``path``. Raises ValueError, after writing, for keys that
    ``figures.json`` does not describe.
    """
    if path is None:
        return
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    known = {key.partition(".")[0] for key in described(script)}
    if strange := sorted(set(figures) - known):
        raise ValueError(f"{Path(script).name} writes {', '.join(strange)}: say what in {TABLE}")
