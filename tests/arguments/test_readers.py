"""Every flag has a reader in the program.

A reader takes the value from its component: ``<config>.<component>.<dest>``, or ``<alias>.<dest>``
where the alias was assigned from ``<config>.<component>`` or is annotated as that component's
class. Modules below the loop have settings of their own with the same names, so an attribute of
that name alone proves nothing. ``models/build.py`` takes the model and recompute flags as a whole
and reads some by name.
"""

from __future__ import annotations

import ast
from pathlib import Path

from megamuon.arguments import specs_by_dest
from megamuon.arguments.config import components
from megamuon.optim import RECIPES

ROOT = Path(__file__).parents[2]

# Flags that the parser itself consumes: presets of other flags, and the reading of checkpoint
# arguments. Tested in test_mapping.py, test_parser.py and test_checkpoint_arguments.py.
READ_BY_THE_PARSER = {"model", "use_checkpoint_args"}

CLASSES = {config_class.__name__: name for name, config_class in components().items()}
CLASSES |= {recipe.flags.__name__: "optimizer" for recipe in RECIPES.values()}


def _sources() -> list[Path]:
    files = [*(ROOT / "megamuon").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    files += ROOT.glob("*.py")
    return [file for file in files if not file.is_relative_to(ROOT / "megamuon" / "arguments")]


def _component(node: ast.AST | None) -> str | None:
    """The component that an expression is, as far as its last name says."""
    if isinstance(node, ast.Attribute) and node.attr in components():
        return node.attr
    return None


def _aliases(tree: ast.AST) -> dict[str, set[str]]:
    """Expressions of a module that stand for a component."""
    found: dict[str, set[str]] = {}

    def add(target: ast.AST, component: str | None) -> None:
        if component is not None:
            found.setdefault(ast.unparse(target), set()).add(component)

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for one, value in zip(target.elts, node.value.elts, strict=False):
                        add(one, _component(value))
                else:
                    add(target, _component(node.value))
        elif isinstance(node, ast.arg) and node.annotation is not None:
            name = ast.unparse(node.annotation).strip("'\"").rsplit(".", 1)[-1]
            add(ast.Name(node.arg), CLASSES.get(name))
    return found


def _read(tree: ast.AST) -> set[tuple[str, str]]:
    """Component and dest of everything that a module reads from a configuration."""
    aliases, read = _aliases(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owners = aliases.get(ast.unparse(node.value), set())
            direct = _component(node.value)
            read |= {(owner, node.attr) for owner in owners | ({direct} if direct else set())}
    return read


def _read_by_name(tree: ast.AST) -> set[tuple[str, str]]:
    """What ``models/build.py`` reads of the model through ``getattr`` and tables of names."""
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {("model", word) for word in words if isinstance(word, str)}


def test_the_search_finds_readers_and_only_readers():
    seed = ("training", "seed")
    assert seed in _read(ast.parse("use(config.training.seed)"))
    assert seed in _read(ast.parse("a, b = config.model, self.config.training\nuse(b.seed)"))
    assert seed in _read(ast.parse("def f(flags: TrainingFlags): return flags.seed"))
    assert seed not in _read(ast.parse("use(spec.seed); use(config.model.seed)"))
    assert seed not in _read(ast.parse("config.training.seed = 1; spec = Spec(seed=2)"))


def test_every_flag_has_a_reader():
    read: set[tuple[str, str]] = set()
    for file in _sources():
        tree = ast.parse(file.read_text("utf-8"))
        read |= _read(tree)
        if file == ROOT / "megamuon" / "models" / "build.py":
            read |= _read_by_name(tree)
    unread = {
        f"{spec.component}.{dest} ({spec.flag})"
        for dest, spec in specs_by_dest().items()
        if (spec.component, dest) not in read and dest not in READ_BY_THE_PARSER
    }
    assert not unread, "flags that nothing reads:\n  " + "\n  ".join(sorted(unread))


def test_no_flag_has_a_single_value():
    assert not [dest for dest, spec in specs_by_dest().items() if len(spec.choices or ()) == 1]
