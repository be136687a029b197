"""Write docs/flags.md from the flags in the code.

Owns the generated page: this program's flags by component, and what becomes of each of Megatron's
300 flags. Invariant: the page holds nothing that is not in the code; ``--check`` fails when it is
stale. Tested by ``tests/arguments/test_flag_table.py``.

    python tools/flag_table.py          # write docs/flags.md
    python tools/flag_table.py --check  # exit status 1 if it is stale
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))  # works from a checkout, not installed

from megamuon.arguments import specs_by_dest  # noqa: E402
from megamuon.arguments.megatron_table import (  # noqa: E402
    STATUSES,
    TableEntry,
    outside_flags,
    table,
    table_by_dest,
)
from megamuon.console import run_script  # noqa: E402
from megamuon.flags import FlagSpec  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

PAGE = _ROOT / "docs" / "flags.md"

_HEAD = """# Flags

This page is written by `python tools/flag_table.py`; do not edit it.

A command line is read as a whole and all its problems are reported together. Precedence: explicit
flag, mapped Megatron flag, checkpoint arguments (`--use-checkpoint-args`), preset (`--model`,
`--line`, `--muon-preset`), default.
"""

_STATUS_TEXT = {
    "honoured": "means what it means in Megatron, with the deviation that is stated",
    "mapped": "is translated into flags of this program, with a printed note",
    "accepted": "is read, changes nothing, and a note is printed",
    "refused": "is an error with the reason that is stated",
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _default(spec: FlagSpec) -> str:
    if spec.value_type is bool:
        return "on" if spec.default else "off"
    if spec.default is None or spec.default == ():
        return "not set"
    return str(spec.default)


def _field_row(spec: FlagSpec) -> str:
    names = ", ".join(f"`{name}`" for name in spec.spellings)
    choices = f" {{{', '.join(str(c) for c in spec.choices)}}}" if spec.choices else ""
    is_megatron = spec.dest in table_by_dest() or set(spec.spellings) & outside_flags()
    origin = "Megatron" if is_megatron else "ours"
    return f"| {names} | {_default(spec)} | {_cell(spec.help)}{choices} | {origin} |"


def _field_section() -> Iterator[str]:
    yield "## Flags by component\n"
    component = ""
    for spec in specs_by_dest().values():
        if spec.component != component:
            component = spec.component
            yield f"### {component}\n"
            yield "| flag | default | meaning | origin |"
            yield "|---|---|---|---|"
        yield _field_row(spec)


def _table_text(entry: TableEntry) -> str:
    parts = [entry.note or entry.deviation or "as in Megatron"]
    if entry.accept:
        parts.append(f"{', '.join(f'`{value}`' for value in entry.accept)} may be given")
    parts += [f"`{value}` is refused: {why}" for value, why in entry.refuse.items()]
    parts += [f"`{value}` means `{target['to']}`" for value, target in entry.map_values.items()]
    return _cell("; ".join(parts))


def _table_section() -> Iterator[str]:
    counts = Counter(entry.status for entry in table())
    yield f"## Megatron's {len(table())} flags\n"
    for status in STATUSES:
        yield f"- **{status}** ({counts[status]}): the flag {_STATUS_TEXT[status]}."
    yield "\nAny other flag of Megatron is named as outside this table.\n"
    group = ""
    for entry in table():
        if entry.group != group:
            group = entry.group
            yield f"\n### {group}\n"
            yield "| flag | status | what happens |"
            yield "|---|---|---|"
        names = ", ".join(f"`{name}`" for name in entry.flags)
        yield f"| {names} | {entry.status} | {_table_text(entry)} |"


def render() -> str:
    """The whole page."""
    fields = "\n".join(_field_section()).replace("\n### ", "\n\n### ")
    return "\n".join([_HEAD, fields, "", *_table_section()]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write or check the page; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/flags.md from the code.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    add_json_flag(parser, __file__)
    options = parser.parse_args(argv)
    text = render()
    counts = Counter(entry.status for entry in table())
    print("Megatron's flags: " + ", ".join(f"{counts[s]} {s}" for s in _STATUS_TEXT))
    figures = {"own_flags": len(specs_by_dest()), "megatron_flags": dict(counts)}
    write_json(options.json, __file__, figures)
    if options.check:
        if PAGE.is_file() and PAGE.read_text("utf-8") == text:
            return 0
        print(f"{PAGE.name} is stale: run python tools/flag_table.py", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, "utf-8")
    print(f"wrote docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
