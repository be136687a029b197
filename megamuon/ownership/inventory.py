"""Shape tables of published models, for planning without building the model.

Owns ``inventories.json`` (names, shapes and optimizer class of each parameter, per layer pattern)
and the reading of a user's table of shapes.  Invariant: a table says the kind of everything that
is not 1-D; nothing is guessed from a shape.  The tables serve planning only: a run takes its
parameters from the modules (``megamuon.matrices.collect``). Tested by
``tests/ownership/test_inventory.py``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megamuon.matrices import Kind, LogicalParameter, Route, layer_key, placed_anew, placements_for
from megamuon.placements import Axis, Placed, Placement, Shard

_TABLES = Path(__file__).with_name("inventories.json")


class UnknownModelError(ValueError):
    """No inventory has this name."""


class ShapeTableError(ValueError):
    """A table of shapes that cannot be planned."""


def _tables() -> dict[str, dict[str, object]]:
    return json.loads(_TABLES.read_text(encoding="utf-8"))["models"]


def inventory_names() -> tuple[str, ...]:
    """Names that ``inventory`` knows, in the order of the file."""
    return tuple(_tables())


def unknown_model(name: str, known: Sequence[str]) -> UnknownModelError:
    """The error for an unknown model: the nearest name and the whole list."""
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
    guess = f"; did you mean {near[0]}?" if near else ""
    return UnknownModelError(f"unknown model {name!r}{guess} Known models: {', '.join(known)}")


def inventory(name: str, *, routers: Kind = Kind.ROUTER) -> tuple[LogicalParameter, ...]:
    """Parameters of a published model, layer by layer.

    Embeddings and output heads are in even layout; matrices go to Muon by the inventory's own
    class. ``routers``: what the maps onto experts count as. Our models train them with AdamW on
    their owner; ``Kind.MATRIX`` gives them to Muon, which is how DMuon-2 counts them (section 7
    and appendix C.5).  Raises UnknownModelError with the nearest name.
    """
    tables = _tables()
    if name not in tables:
        raise unknown_model(name, tuple(tables))
    found = tuple(_expand(tables[name]["parameters"]))  # type: ignore[arg-type]
    return found if routers is Kind.ROUTER else routers_as_matrices(found)


def routers_as_matrices(parameters: Iterable[LogicalParameter]) -> tuple[LogicalParameter, ...]:
    """The same parameters with trained routers and gates as Muon matrices."""
    return tuple(
        replace(
            placed_anew(p, route=Route.MATRIX, owned=p.owned),
            kind=Kind.MATRIX,
            reason="a router, counted as a matrix",
        )
        if p.kind is Kind.ROUTER and p.trainable
        else p
        for p in parameters
    )


# How tensor parallelism cuts a decoder, by the last words of a parameter's name: column-parallel
# maps and tables along dim 0, row-parallel maps along dim 1.
_CUT_DIMS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"\b(q|k|v|qkv|gate|up|gate_up)_proj(_experts)?(\.\d+)?\.(weight|bias)$"), 0),
    (re.compile(r"\b(o|out|down)_proj(_experts)?(\.\d+)?\.weight$"), 1),
)


def cut_by_name(parameters: Iterable[LogicalParameter], tp: int) -> tuple[LogicalParameter, ...]:
    """The same parameters as ``tp`` tensor-parallel ranks would hold them, for planning.

    A table of shapes knows no heads, so attention is cut in even parts of its rows, by the rule of
    torch.chunk, like the rest; a run cuts it by whole key-value groups. What has another name, or
    fewer than ``tp`` rows to cut, stays whole.
    """
    return tuple(_cut(parameter, tp) for parameter in parameters)


def _cut(parameter: LogicalParameter, tp: int) -> LogicalParameter:
    dim = next((dim for words, dim in _CUT_DIMS if words.search(parameter.name)), None)
    if parameter.kind in (Kind.EMBEDDING, Kind.HEAD):
        dim = 0
    if tp == 1 or dim is None or dim >= len(parameter.shape) or parameter.shape[dim] < tp:
        return parameter
    size = parameter.shape[dim]
    share = -(-size // tp)
    bounds = tuple(min(piece * share, size) for piece in range(tp + 1))
    on_tp = Placement.of({Axis.TP: Shard(dim, bounds)})
    placed = Placed(shape=parameter.shape, compute=on_tp, gradient=on_tp)
    return replace(parameter, **placements_for(parameter.route, placed, owned=parameter.owned))


def _expand(rows: Sequence[Sequence[object]]) -> Iterator[LogicalParameter]:
    """Parameters of the rows ``[pattern, shape, experts, layers, kind, note]``.

    Consecutive rows with as many layers form a block that repeats layer by layer, as modules would
    register them.
    """
    index = 0
    while index < len(rows):
        layers = rows[index][3]
        stop = index
        while (
            stop < len(rows) and rows[stop][3] == layers and _stem(rows[stop]) == _stem(rows[index])
        ):
            stop += 1
        for layer in range(layers):
            for pattern, shape, experts, _, kind, note in rows[index:stop]:
                for expert in range(experts):
                    name = pattern.replace("{L}", str(layer)).replace("{E}", str(expert))
                    yield _parameter(name, shape, Kind(kind), expert="{E}" in pattern, note=note)
        index = stop


def _stem(row: Sequence[object]) -> str:
    """What comes before the layer number."""
    pattern = str(row[0])
    return pattern.partition("{L}")[0] if "{L}" in pattern else ""


def _parameter(
    name: str,
    shape: Sequence[int],
    kind: Kind,
    *,
    expert: bool = False,
    frozen: bool = False,
    layer: str | None = None,
    note: str = "",
) -> LogicalParameter:
    even = kind in (Kind.EMBEDDING, Kind.HEAD)
    route = Route.MATRIX if kind is Kind.MATRIX else Route.ADAMW_OWNER
    route = Route.ADAMW_SHARDED if even else route
    route = Route.FROZEN if frozen else route
    return LogicalParameter(
        name=name,
        shape=tuple(shape),
        kind=kind,
        route=route,
        **placements_for(route, Placed(shape=tuple(shape)), owned=not even),
        reason="frozen in the table of shapes"
        if frozen
        else f"{kind.value} in the table of shapes" + note,
        layer=layer_key(name) if layer is None else layer,
        expert=expert,
    )


def parameters_from_table(entries: Sequence[Mapping[str, object]]) -> tuple[LogicalParameter, ...]:
    """Parameters of a user's table: a list of objects with the keys "name" and "shape".

    As needed also "kind" (matrix, vector, router, embedding, head), "expert", "frozen" and "layer".

    The layer is the text up to ``layers.N`` or ``blocks.N`` unless given.  Raises ShapeTableError
    that lists every entry without a usable name, shape or kind: a tensor of two or more dims must
    say its kind.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ShapeTableError(
            "a table of shapes is a JSON list of objects with the keys name and shape"
        )
    found: list[LogicalParameter] = []
    problems: list[str] = []
    for index, entry in enumerate(entries):
        try:
            found.append(_from_entry(entry))
        except (ShapeTableError, KeyError, TypeError, AttributeError) as error:
            text = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            problems.append(f"entry {index}: {text}")
    if problems:
        raise ShapeTableError("table of shapes:\n  " + "\n  ".join(problems))
    return tuple(found)


_ENTRY_KEYS = {"name", "shape", "kind", "expert", "frozen", "layer"}


def _from_entry(entry: Mapping[str, object]) -> LogicalParameter:
    name, shape = entry["name"], entry["shape"]
    unknown = sorted(set(entry) - _ENTRY_KEYS)
    if unknown:
        raise ShapeTableError(f"{name}: unknown keys {', '.join(unknown)}")
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise ShapeTableError(f"{name}: shape must be a list of positive integers, got {shape!r}")
    kinds = [kind.value for kind in Kind]
    kind = entry.get("kind", Kind.VECTOR.value if len(shape) <= 1 else None)
    if kind not in kinds:
        raise ShapeTableError(
            f"{name} {shape}: kind is {kind!r}, must be one of {', '.join(kinds)}"
        )
    frozen = bool(entry.get("frozen", False))
    if kind == Kind.MATRIX.value and len(shape) != 2 and not frozen:
        raise ShapeTableError(f"{name} {shape}: a Muon matrix must be 2-D")
    if kind in (Kind.EMBEDDING.value, Kind.HEAD.value) and not shape:
        raise ShapeTableError(f"{name} {shape}: a table has at least one dim")
    return _parameter(
        name,
        shape,
        Kind(kind),
        expert=bool(entry.get("expert", False)),
        frozen=frozen,
        layer=entry.get("layer"),
    )
