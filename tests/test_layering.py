"""The tree obeys its dependency rule and its size limits; a tree that breaks them is caught."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.layering import (
    ASK_NO_PLACEMENT,
    FLOOR_OF,
    LAUNCHER_ROOM,
    LAUNCHER_VARIABLES,
    MAY_IMPORT,
    NEVER_USES,
    PACKAGE,
    SourceFile,
    import_cycles,
    layering_problems,
    read_sources,
    shape_problems,
)

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"lines": 450, "function_lines": 90}


@functools.cache
def sources() -> list[SourceFile]:
    """The tree's files, from each place where there are some: an empty tree breaks no rule."""
    found = read_sources(ROOT)
    known = {"megamuon", "megamuon.runtime.engine", "tools.chaos", "tools.bench.lines"}
    assert known | {"pretrain_gpt"} <= {file.module for file in found}
    return found


def test_no_import_climbs_or_leaves_its_room() -> None:
    problems = layering_problems(sources())
    assert not problems, "\n".join(problems)


def test_no_import_cycles() -> None:
    cycles = import_cycles(sources())
    assert not cycles, "\n".join(cycles)


def test_files_are_documented_annotated_and_short() -> None:
    problems = [line for file in sources() for line in shape_problems(file, **LIMITS)]
    assert not problems, "\n".join(problems)


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "megamuon").glob("**/*.py")}
    assert ROOT / "megamuon" / "runtime" in folders
    missing = [
        str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()
    ]
    assert not missing, f"no __init__.py, so setup.py would not install: {missing}"


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


GOOD = {
    "megamuon/__init__.py": "",
    "megamuon/runtime/__init__.py": "from megamuon.optim.muon import update",
    "megamuon/runtime/owner_step.py": "from megamuon.collectives import base",
    "megamuon/optim/muon.py": "from megamuon import matrices",
    "megamuon/matrices.py": "import torch",
    "megamuon/mesh.py": "import torch.distributed\nNAME = 'RANK'",
    "megamuon/models/gpt.py": "from megamuon.kernels.linear import linear",
    "pretrain_gpt.py": "from megamuon.training import pretrain",
}
PLACEMENT_QUESTIONS = (
    "from megamuon.placements import Axis, Owned",
    "import megamuon.placements as placements\nisinstance(x, placements.Shard)",
    "def f(segment):\n    return segment.parameter.owned",
    "def f(p, Axis):\n    return p.storage.on(Axis.TP)",
)
HOME = {PACKAGE: "megamuon/__init__.py", "tools": "tools/x.py", "entry": "pretrain_x.py"}
NAME = {PACKAGE: PACKAGE, "tools": "tools.x", "entry": "pretrain_x"}


def home_of(room: str) -> str:
    return HOME.get(room, f"megamuon/{room}/x.py")


def module_in(room: str) -> str:
    return NAME.get(room, f"megamuon.{room}.x")


def breaches(room: str) -> Iterator[tuple[str, str, str]]:
    """A breach of each of the room's rules: file, text, what is said of it."""
    for target in FLOOR_OF.keys() - {room, *MAY_IMPORT[room]}:
        climbs = FLOOR_OF[target] > FLOOR_OF[room]
        words = f"{room} climbs to {target}" if climbs else f"{room} may not import {target}"
        yield home_of(room), f"import {module_in(target)}", words
    for module in NEVER_USES.get(room, ()):
        yield home_of(room), f"import {module} as d", f"{room} uses {module}"
        yield home_of(room), f"import torch\n{module}.f()", f"{room} uses {module}"
    for name in LAUNCHER_VARIABLES if room != LAUNCHER_ROOM else ():
        text = f"import os\nx = os.environ.get({name!r})"
        yield home_of(room), text, f"{room} names the launcher's {name}:"
    for text in PLACEMENT_QUESTIONS if room in ASK_NO_PLACEMENT else ():
        yield home_of(room), text, f"{room} asks for a placement"


def caught(root: Path, path: str, text: str, expected: str) -> None:
    """``text`` in ``path`` of a good tree is one problem, which says ``expected``."""
    write_tree(root, {path: text})
    (problem,) = layering_problems(read_sources(root))
    assert expected in problem
    (root / path).unlink()


@pytest.mark.parametrize("room", FLOOR_OF)
def test_a_breach_of_every_rule_of_a_room_is_caught(tmp_path: Path, room: str) -> None:
    write_tree(tmp_path, GOOD)
    assert layering_problems(read_sources(tmp_path)) == []
    found = list(breaches(room))
    assert found
    for path, text, expected in found:
        caught(tmp_path, path, text, expected)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("megamuon/models/x.py", "from ..runtime import step", "models climbs to runtime"),
        ("megamuon/data/x.py", "def f():\n    import megamuon.optim.x", "data climbs to optim"),
        ("megamuon/optim/x.py", "from torch import distributed", "uses torch.distributed"),
        ("megamuon/attic/x.py", "", "room 'attic' has no floor"),
    ],
)
def test_a_breach_in_other_words_is_caught(
    tmp_path: Path, path: str, text: str, expected: str
) -> None:
    write_tree(tmp_path, GOOD)
    caught(tmp_path, path, text, expected)


def test_every_room_says_what_it_may_import() -> None:
    assert MAY_IMPORT.keys() == FLOOR_OF.keys() == {file.room for file in sources()}
    assert NEVER_USES.keys() <= FLOOR_OF.keys()
    climbs = {(a, b) for a, may in MAY_IMPORT.items() for b in may if FLOOR_OF[b] > FLOOR_OF[a]}
    assert not climbs


def test_a_room_without_an_entry_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, GOOD)
    monkeypatch.delitem(MAY_IMPORT, "runtime")
    problems = layering_problems(read_sources(tmp_path))
    assert len(problems) == 2  # its two files
    assert all("room 'runtime' has no entry in MAY_IMPORT" in problem for problem in problems)


def test_a_cycle_is_caught_and_a_late_import_is_none(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "megamuon/__init__.py": "",
            "megamuon/optim/__init__.py": "",
            "megamuon/optim/a.py": "from megamuon.optim import b",
            "megamuon/optim/b.py": "def f() -> None:\n    from megamuon.optim import a",
        },
    )
    assert import_cycles(read_sources(tmp_path)) == []
    write_tree(tmp_path, {"megamuon/optim/b.py": "from .a import f"})
    assert import_cycles(read_sources(tmp_path)) == [
        "megamuon.optim.a -> megamuon.optim.b -> megamuon.optim.a"
    ]


def test_missing_types_docstrings_and_lengths_are_caught(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {"megamuon/mesh.py": "def f(a, *b: int, c=1):\n" + "    c += 1\n" * 3 + "    return c\n"},
    )
    (file,) = read_sources(tmp_path)
    assert shape_problems(file, lines=4, function_lines=4) == [
        "megamuon/mesh.py: no module docstring".replace("megamuon", f"{tmp_path.name}/megamuon"),
        f"{tmp_path.name}/megamuon/mesh.py: 5 lines, at most 4",
        f"{tmp_path.name}/megamuon/mesh.py:1: f has 5 lines, at most 4",
        f"{tmp_path.name}/megamuon/mesh.py:1: f lacks types of a, c, return",
    ]
