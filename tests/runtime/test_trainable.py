"""Both kinds of runtime are what the loop, checkpoints and logging hold, and no more is asked."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from megamuon.baselines.fully_sharded_runtime import FullyShardedRuntime
from megamuon.runtime import Runtime, TrainableRuntime

PACKAGE = Path(__file__).resolve().parents[2] / "megamuon"
ATTRIBUTES = set(TrainableRuntime.__annotations__)
METHODS = set(TrainableRuntime.__abstractmethods__)
KINDS = (Runtime, FullyShardedRuntime)


@pytest.mark.parametrize("kind", KINDS)
def test_a_runtime_takes_what_the_protocol_says(kind: type[TrainableRuntime]) -> None:
    assert "step" in METHODS and not kind.__abstractmethods__
    for name in METHODS - {"version"}:
        mine, wanted = (inspect.signature(getattr(each, name)) for each in (kind, TrainableRuntime))
        assert mine.parameters == wanted.parameters, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_runtime_sets_all_attributes(kind: type[TrainableRuntime]) -> None:
    tree = ast.parse(inspect.cleandoc(inspect.getsource(kind.__init__)))
    given = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert given >= ATTRIBUTES


def test_a_runtime_without_a_method_cannot_be_made() -> None:
    class Half(TrainableRuntime):
        def close(self) -> None:
            """Nothing to end."""

    with pytest.raises(TypeError, match="abstract"):
        Half()


@pytest.mark.parametrize("room", ["training", "checkpoint", "metrics"])
def test_nobody_above_asks_a_runtime_for_more(room: str) -> None:
    """Attributes of whatever is called ``runtime`` are those of the protocol."""
    known = ATTRIBUTES | METHODS
    for path in sorted((PACKAGE / room).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            held = node.value
            name = held.attr if isinstance(held, ast.Attribute) else getattr(held, "id", "")
            if name == "runtime" and node.attr not in known:
                pytest.fail(f"{path.name}:{node.lineno}: a runtime need not have {node.attr}")
