"""The tree obeys its dependency rule and its size limits; a tree that breaks them is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.layering import (
    SourceFile,
    import_cycles,
    layering_problems,
    read_sources,
    shape_problems,
)

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"lines": 450, "function_lines": 90}


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


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("megamuon/models/gpt.py", "from megamuon.runtime import step", "models climbs to runtime"),
        ("megamuon/models/gpt.py", "from ..runtime import step", "models climbs to runtime"),
        ("megamuon/data/x.py", "def f():\n    import megamuon.optim.muon", "data climbs to optim"),
        ("megamuon/metrics.py", "import pretrain_gpt", "metrics climbs to entry"),
        (
            "megamuon/ownership/plan.py",
            "from megamuon import mesh",
            "ownership may not import mesh",
        ),
        ("megamuon/arguments/a.py", "from megamuon.data import x", "arguments may not import data"),
        ("megamuon/optim/muon.py", "import torch.distributed as dist", "optim uses torch.dist"),
        ("megamuon/optim/muon.py", "from torch import distributed", "optim uses torch.dist"),
        ("megamuon/ownership/a.py", "import torch\ntorch.distributed.barrier()", "uses torch.dist"),
        ("megamuon/attic/x.py", "", "room 'attic' has no floor"),
    ],
)
def test_a_wrong_import_is_caught(tmp_path: Path, name: str, text: str, expected: str) -> None:
    good = {
        "megamuon/__init__.py": "",
        "megamuon/runtime/__init__.py": "from megamuon.optim.muon import update",
        "megamuon/runtime/step.py": "from megamuon.models import gpt",
        "megamuon/optim/muon.py": "from megamuon import matrices",
        "megamuon/matrices.py": "import torch",
        "megamuon/mesh.py": "import torch.distributed",
        "megamuon/models/gpt.py": "from megamuon.kernels.linear import linear",
        "pretrain_gpt.py": "from megamuon.training import pretrain",
    }
    write_tree(tmp_path, good)
    assert layering_problems(read_sources(tmp_path)) == []
    write_tree(tmp_path, {name: text})
    problems = layering_problems(read_sources(tmp_path))
    assert len(problems) == 1
    assert expected in problems[0]


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
