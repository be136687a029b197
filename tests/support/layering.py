"""The dependency rule of the package, as data and as a checker over source text.

Pure: a folder in, problems out, so that a test can also feed it a tree that breaks the rule.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "megamuon"

# Floors, from the bottom. A module may import its own floor and those below, never one above.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "kernels",
        "data",
        "flags",
        "mesh",
        "matrices",
        "placements",
        "rendezvous",
        "sizes",
        "console",
    ),
    ("optim", "ownership", "agreement", "sharding", "models"),
    ("collectives", "checkpoint"),
    ("runtime", "conversion"),
    ("arguments", "baselines"),
    ("training", "metrics", "profiling", PACKAGE),  # the package's own __init__ exports names
    ("tools", "entry"),  # tools/ and pretrain_*.py, which no room imports
)
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def _up_to(*rooms: str) -> frozenset[str]:
    """Everything on the floors below that of the first of ``rooms``, and ``rooms`` themselves."""
    below = [room for room, height in FLOOR_OF.items() if height < FLOOR_OF[rooms[0]]]
    return frozenset({*below, *rooms})


# What each room may import of the others.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "kernels": frozenset(),
    "data": frozenset(),
    "mesh": frozenset({"placements", "rendezvous"}),
    "rendezvous": frozenset(),
    "matrices": frozenset({"placements"}),
    "placements": frozenset(),
    "console": frozenset(),
    "sizes": frozenset(),
    "flags": frozenset(),
    "optim": frozenset({"matrices", "kernels", "flags"}),
    "ownership": frozenset({"matrices", "placements"}),
    "agreement": frozenset({"ownership"}),
    "sharding": frozenset({"matrices", "placements", "mesh", "kernels"}),
    "models": frozenset({"matrices", "kernels", "data", "sizes"}),
    "collectives": frozenset({"agreement", "ownership", "kernels", "mesh", "placements"}),
    "checkpoint": frozenset({"mesh", "placements"}),
    "runtime": frozenset(
        {"matrices", "placements", "mesh", "kernels", "optim", "ownership", "agreement"}
        | {"collectives", "checkpoint"}
    ),
    "conversion": frozenset({"checkpoint", "sizes"}),
    "baselines": frozenset(
        {"matrices", "placements", "mesh", "kernels", "optim", "ownership", "agreement"}
        | {"collectives", "checkpoint", "runtime"}
    ),
    # Choices and flags of what is registered, and the defaults of the rooms' own settings.
    "arguments": frozenset({"flags", "sizes", "optim", "ownership", "collectives", "runtime"}),
    "training": _up_to("training", "metrics", "profiling"),
    "metrics": frozenset({"console"}),
    "profiling": frozenset(),
    PACKAGE: frozenset({"matrices", "runtime"}),
    "tools": _up_to("tools"),
    "entry": _up_to("entry"),
}

# Modules of torch that a room never uses, imported or reached as an attribute.
NEVER_USES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("kernels", "data", "arguments", "matrices", "placements", "sizes", "console")
        + ("flags", "optim", "ownership", "models", "conversion"),
        ("torch.distributed",),
    ),
    **dict.fromkeys(("collectives", "runtime", "training"), ("torch.distributed.fsdp",)),
}

# What the launcher sets: one room reads it, so that a rank is told its place in one way.
LAUNCHER_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
    + ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")
)
LAUNCHER_ROOM = "mesh"

# Who works from the tables that placements give never asks what a tensor is on an axis: a further
# placement then needs no new branch there.
ASK_NO_PLACEMENT = ("runtime", "collectives")
PLACEMENT_WORDS = frozenset({"Replicate", "Shard", "Owned", "Partial"})


@dataclass
class SourceFile:
    """One parsed file: its dotted module name, its room, and what it imports."""

    path: Path
    module: str
    room: str
    tree: ast.Module
    text: str
    imports: list[tuple[str, int, bool]] = field(default_factory=list)  # name, line, at import time


def read_sources(root: Path) -> list[SourceFile]:
    """Every Python file of the package, of tools/ and the entry scripts."""
    paths = [*root.glob(f"{PACKAGE}/**/*.py"), *root.glob("tools/**/*.py")]
    paths += root.glob("pretrain_*.py")
    files = [_read(root, path) for path in sorted(paths)]
    modules = {file.module for file in files}
    for file in files:
        file.imports = list(_imports(file, modules))
    return files


def _read(root: Path, path: Path) -> SourceFile:
    parts = path.relative_to(root).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    if parts[0] == PACKAGE:
        room = parts[1] if len(parts) > 1 else PACKAGE
    else:
        room = "tools" if parts[0] == "tools" else "entry"
    text = path.read_text(encoding="utf-8")
    return SourceFile(path, ".".join(parts), room, ast.parse(text, str(path)), text)


def _imports(file: SourceFile, modules: set[str]) -> Iterator[tuple[str, int, bool]]:
    """(module, line, runs at import time); ``from a import b`` gives a.b where that is a module."""
    package = file.module if file.path.name == "__init__.py" else file.module.rpartition(".")[0]
    for node, at_import in _statements(file.tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, at_import
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                known = whole in modules or not base.startswith(PACKAGE)
                yield (whole if known else base), node.lineno, at_import


def _statements(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = at_import
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        ):
            inside = False
        yield child, inside
        yield from _statements(child, inside)


def room_of(module: str) -> str | None:
    """The room of a dotted name, None where it is not ours."""
    parts = module.split(".")
    if parts[0] == "tools":
        return "tools"
    if parts[0].startswith("pretrain_"):
        return "entry"
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 else PACKAGE


def layering_problems(files: list[SourceFile]) -> list[str]:
    """Imports that climb, that a room may not make, or that come from a room without a floor; uses
    of what a room never uses; names of the launcher's variables; questions about placements.
    """
    problems = []
    for file in files:
        where = "/".join(file.path.parts[-3:])
        if file.room not in FLOOR_OF:
            problems.append(f"{where}: room {file.room!r} has no floor: add it to FLOORS")
            continue
        if file.room not in MAY_IMPORT:
            problems.append(f"{where}: room {file.room!r} has no entry in MAY_IMPORT")
            continue
        for name, line, _ in file.imports:
            target = room_of(name)
            if target is None or target == file.room:
                continue
            if FLOOR_OF.get(target, 0) > FLOOR_OF[file.room]:
                problems.append(f"{where}:{line}: {file.room} climbs to {target} ({name})")
            elif target not in MAY_IMPORT[file.room]:
                problems.append(f"{where}:{line}: {file.room} may not import {target} ({name})")
        problems += [f"{where}:{line}: {file.room} uses {name}" for name, line in _forbidden(file)]
        problems += [
            f"{where}:{line}: {file.room} names the launcher's {name}: {LAUNCHER_ROOM} reads it"
            for name, line in _launcher_variables(file)
        ]
        problems += [
            f"{where}:{line}: {file.room} asks for a placement ({name}): derive it in ownership"
            for name, line in _placement_questions(file)
        ]
    return problems


def _launcher_variables(file: SourceFile) -> Iterator[tuple[str, int]]:
    for node in ast.walk(file.tree) if file.room != LAUNCHER_ROOM else ():
        if isinstance(node, ast.Constant) and node.value in LAUNCHER_VARIABLES:
            yield str(node.value), node.lineno


def _placement_questions(file: SourceFile) -> Iterator[tuple[str, int]]:
    for node in ast.walk(file.tree) if file.room in ASK_NO_PLACEMENT else ():
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("placements"):
            for alias in node.names:
                if alias.name in PLACEMENT_WORDS:
                    yield alias.name, node.lineno
        elif isinstance(node, ast.Attribute):
            of_module = ast.unparse(node.value).endswith("placements")
            of_parameter = ast.unparse(node.value).endswith("parameter") and node.attr == "owned"
            if (of_module and node.attr in PLACEMENT_WORDS) or of_parameter:
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and ".on(Axis." in ast.unparse(node):
            yield ast.unparse(node), node.lineno


def _forbidden(file: SourceFile) -> Iterator[tuple[str, int]]:
    never = NEVER_USES.get(file.room, ())
    for name, line, _ in file.imports:
        if any(name == module or name.startswith(f"{module}.") for module in never):
            yield name, line
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in never:
            yield ast.unparse(node), node.lineno


def import_cycles(files: list[SourceFile]) -> list[str]:
    """One line per import-time cycle between modules (imports inside functions do not count)."""
    names = {file.module for file in files}
    edges = {
        file.module: sorted({name for name, _, at_import in file.imports if at_import} & names)
        for file in files
    }
    cycles: list[str] = []
    finished: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            cycles.append(" -> ".join([*trail[trail.index(module) :], module]))
            return
        if module in finished:
            return
        for target in edges[module]:
            if target != module:
                visit(target, [*trail, module])
        finished.add(module)

    for module in sorted(edges):
        visit(module, [])
    return cycles


def shape_problems(file: SourceFile, *, lines: int, function_lines: int) -> list[str]:
    """Missing module docstring or annotations, files and functions that are too long."""
    where = "/".join(file.path.parts[-3:])
    problems = []
    empty_marker = file.path.name == "__init__.py" and not file.text.strip()
    if ast.get_docstring(file.tree) is None and not empty_marker:
        problems.append(f"{where}: no module docstring")
    count = file.text.count("\n")
    if count > lines:
        problems.append(f"{where}: {count} lines, at most {lines}")
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        size = (node.end_lineno or node.lineno) - node.lineno + 1
        if size > function_lines:
            problems.append(
                f"{where}:{node.lineno}: {node.name} has {size} lines, at most {function_lines}"
            )
        bare = [argument.arg for argument in _arguments(node) if argument.annotation is None]
        bare += ["return"] if node.returns is None else []
        if bare:
            problems.append(f"{where}:{node.lineno}: {node.name} lacks types of {', '.join(bare)}")
    return problems


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    if positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    return [*positional, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
