"""Logical parameters: what the model's matrices are, declared by the modules that own them.

Owns the vocabulary of the whole package: what kind a parameter is (a matrix, a vector, an
embedding, an output head), which optimizer route it takes and which layer group it belongs to.
Invariant: a kind is *declared* by a module class or a module instance and is never guessed from a
name or from a local shape, so the answer is the same at every world size; a trainable matrix or
tensor without a declaration is an error, never a silent AdamW. Tested by
``tests/test_matrices.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import nn

from megamuon.placements import (
    DATA_AXES,
    Axis,
    AxisPlacement,
    Owned,
    Partial,
    Piece,
    Placed,
    Placement,
    Replicate,
    Shard,
    tp_piece,
)


class Kind(StrEnum):
    """What a parameter is, independently of how it is trained."""

    MATRIX = "matrix"  # a 2-D linear map: a candidate for a matrix optimizer
    VECTOR = "vector"  # a bias, a norm gain, or another element-wise parameter
    QK_NORM = (
        "qk_norm"  # the gain of a query or key norm: a vector with a weight decay rule of its own
    )
    ROUTER = "router"  # a map onto experts or a gate: 2-D, but trained element by element
    EMBEDDING = "embedding"  # a token or position table
    HEAD = "head"  # the output projection onto the vocabulary


class Route(StrEnum):
    """Who updates a parameter, and with what."""

    MATRIX = "matrix"  # the matrix optimizer, on its owner
    ADAMW_OWNER = (
        "adamw_owner"  # AdamW on its owner (biases and norm gains; matrices under --optimizer adam)
    )
    ADAMW_SHARDED = "adamw_sharded"  # AdamW on even slices of dim 0 (embedding and output head)
    FROZEN = "frozen"  # gathered, never updated

    @classmethod
    def _missing_(cls, value: object) -> Route | None:
        # Plans stored before there were several matrix optimizers call the route after the first.
        return cls.MATRIX if value == "muon" else None


class RoutingError(ValueError):
    """A parameter has no declared kind, or a route that its shape does not allow."""


@dataclass(frozen=True, kw_only=True)
class LogicalParameter:
    """One whole parameter of the model, and how it lies on the axes of the mesh.

    ``Owned()`` without an index is for the planner to choose.
    """

    name: str  # canonical name: the first one under which the module tree reaches it
    shape: tuple[int, ...]  # logical (whole) shape
    kind: Kind
    route: Route
    storage: Placement  # of master, reduced gradient and optimizer state
    update: Placement  # of what is worked on: the whole, for a matrix optimizer
    gradient: Placement  # of what a backward pass leaves, before it is reduced
    reason: str  # one line for the routing report
    layer: str = ""  # module path of its layer group; "" for what lies outside every layer
    expert: bool = False  # one matrix of a mixture of experts: never merged into a unit
    aliases: tuple[str, ...] = ()  # further names of the same storage (tied weights)
    fusion: str = (
        ""  # parameters with the same non-empty key lie back to back in the compute buffer
    )
    dtype: str = ""  # of its weights and gradients between masters, if not the run's

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def compute(self) -> Placement:
        """What its module reads: whole but for what tensor parallelism cuts."""
        return Placement(tuple(pair for pair in self.storage.axes if pair[0] not in DATA_AXES))

    @property
    def owned(self) -> bool:
        """Whether it lies whole on one rank of the shard axis, not in slices on all of them."""
        return isinstance(self.storage.on(Axis.SHARD), Owned)

    def piece(self, tp_rank: int) -> Piece:
        """What a tp rank has of it: the whole where nothing is cut."""
        return tp_piece(self.shape, self.storage, tp_rank)

    def piece_shape(self, tp_rank: int) -> tuple[int, ...]:
        """Shape of what a tp rank has."""
        return self.piece(tp_rank).shape

    def piece_numel(self, tp_rank: int) -> int:
        """Number of elements that a tp rank has."""
        return self.piece(tp_rank).numel

    @property
    def trainable(self) -> bool:
        """Whether it takes part in the backward pass."""
        return self.route is not Route.FROZEN


def placements_for(route: Route, placed: Placed, *, owned: bool) -> dict[str, Placement]:
    """``storage``, ``update`` and ``gradient`` of a parameter that the planner has not seen yet.

    An ``owned`` one lies whole on one rank of all replicas and shards; the others are cut along
    dim 0 over the shards of each replica. A matrix optimizer works on the whole of an owned matrix
    where it lies, or on one of the tp ranks that have pieces of it; of slices, on every rank that
    has one (``--matrix-update gather``). Everything else is updated where it is stored.
    """
    data: dict[Axis, AxisPlacement] = {Axis.SHARD: Shard(0)}
    if owned:
        data = {axis: Owned() for axis in DATA_AXES}
    storage = update = Placement.of({**dict(placed.compute.axes), **data})
    if route is Route.MATRIX and not owned:
        update = update.replaced(Axis.SHARD, Replicate()).replaced(Axis.TP, Replicate())
    elif route is Route.MATRIX and placed.compute.on(Axis.TP) != Replicate():
        update = update.replaced(Axis.TP, Owned())
    partial: dict[Axis, AxisPlacement] = dict.fromkeys(DATA_AXES, Partial())
    gradient = Placement.of({**dict(placed.gradient.axes), **partial})
    return {"storage": storage, "update": update, "gradient": gradient}


def placed_anew(parameter: LogicalParameter, *, route: Route, owned: bool) -> LogicalParameter:
    """The same parameter on another route, or owned instead of in slices, or the other way."""
    placed = Placed(shape=parameter.shape, compute=parameter.compute, gradient=parameter.gradient)
    return replace(parameter, route=route, **placements_for(route, placed, owned=owned))


# What the modules of torch declare.  Our own layers set ``logical_kinds`` on the class or on the
# instance.
TORCH_KINDS: dict[type[nn.Module], dict[str, Kind]] = {
    nn.Linear: {"weight": Kind.MATRIX, "bias": Kind.VECTOR},
    nn.Embedding: {"weight": Kind.EMBEDDING},
    nn.LayerNorm: {"weight": Kind.VECTOR, "bias": Kind.VECTOR},
    nn.RMSNorm: {"weight": Kind.VECTOR},
    nn.GroupNorm: {"weight": Kind.VECTOR, "bias": Kind.VECTOR},
}

RouteFunction = Callable[[str, nn.Parameter, nn.Module], "Route | None"]


def declared_kind(module: nn.Module, attribute: str, parameter: torch.Tensor) -> Kind | None:
    """The kind that ``module`` declares for its parameter ``attribute``; None where it declares
    nothing.

    Looks at ``module.logical_kinds`` first, then at the classes of torch (subclasses included). A
    1-D or 0-D parameter is a vector by definition and needs no declaration.
    """
    kinds = getattr(module, "logical_kinds", None) or {}
    if attribute in kinds:
        return Kind(kinds[attribute])
    for base, table in TORCH_KINDS.items():
        if isinstance(module, base) and attribute in table:
            return table[attribute]
    return Kind.VECTOR if parameter.ndim <= 1 else None


_LAYER_KEY = re.compile(r"^(.*?\b(?:layers|blocks)\.\d+)\.")


def layer_key(name: str) -> str:
    """Layer of a parameter *name* of a published inventory: the text up to and including
    ``layers.N`` or ``blocks.N``, else "". For planning from a table of shapes only; a real model
    says its layers itself."""
    found = _LAYER_KEY.match(name)
    return found.group(1) if found else ""


def _walk(model: nn.Module) -> Iterable[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every (parameter name, module, attribute, parameter) in registration order, tied ones
    repeated.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield (f"{path}.{attribute}" if path else attribute), module, attribute, parameter


def layer_paths(model: nn.Module, layers: Sequence[type[nn.Module]]) -> tuple[str, ...]:
    """Module paths of the layer groups: the outermost instances of the given classes, in
    registration order.
    """
    classes = tuple(layers)
    paths: list[str] = []
    for path, module in model.named_modules():
        if (
            classes
            and isinstance(module, classes)
            and not any(path.startswith(p + ".") for p in paths)
        ):
            paths.append(path)
    return tuple(paths)


def _fusion_keys(model: nn.Module) -> dict[int, str]:
    """id(parameter) -> fusion key, from the ``fusion_blocks`` that modules declare.

    ``fusion_blocks`` is a tuple of tuples of child names whose weights (and biases) are computed
    with as one tensor.
    """
    keys: dict[int, str] = {}
    for path, module in model.named_modules():
        for block in getattr(module, "fusion_blocks", ()):
            members = [module.get_submodule(child) for child in block]
            # A block of experts has hundreds of members: its ends name it as well.
            label = "|".join(block if len(block) <= 4 else (block[0], "..", block[-1]))
            for attribute in ("weight", "bias"):
                for member in members:
                    parameter = getattr(member, attribute, None)
                    if parameter is not None:
                        keys[id(parameter)] = f"{path}:{label}.{attribute}"
    return keys


OWN_DTYPES = (torch.float32,)  # what ``logical_dtype`` may say


def _own_dtypes(model: nn.Module) -> dict[str, str]:
    """Module path -> the dtype that the module or the nearest one around it declares, as text.

    ``logical_dtype`` on a module is of all parameters in it. Raises RoutingError for another one
    than FP32: what a run computes in is the run's choice, and only a wider island the module's.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        declared = getattr(module, "logical_dtype", None)
        if declared is not None and declared not in OWN_DTYPES:
            raise RoutingError(
                f"{path or 'the model'} declares logical_dtype = {declared}: torch.float32 is the"
                " dtype that parameters may have of their own"
            )
        around = found.get(path.rpartition(".")[0], "") if path else ""
        found[path] = around if declared is None else str(declared).removeprefix("torch.")
    return found


def _routed(kind: Kind, trainable: bool, matrices_to: Route) -> tuple[Route, str]:
    if not trainable:
        return Route.FROZEN, "requires_grad is False"
    if kind is Kind.MATRIX:
        if matrices_to is Route.MATRIX:
            return Route.MATRIX, "declared as a matrix"
        return matrices_to, "declared as a matrix; --optimizer asks for AdamW or SGD"
    if kind is Kind.ROUTER:
        return Route.ADAMW_OWNER, "router or gate, updated element by element on its owner"
    if kind in (Kind.VECTOR, Kind.QK_NORM):
        return Route.ADAMW_OWNER, "element-wise parameter, updated on the owner of its unit"
    name = "token table" if kind is Kind.EMBEDDING else "output head"
    return Route.ADAMW_SHARDED, f"{name}: even slices over the shard ranks"


def _matrix_problem(name: str, parameter: torch.Tensor, whole: bool) -> str | None:
    """Why no matrix optimizer can train this parameter; None where one can."""
    if parameter.ndim != 2:
        return f"{name} {tuple(parameter.shape)}: the matrix route takes 2-D parameters"
    if not whole:
        return f"{name}: a matrix optimizer needs whole matrices, and owner_layout is False"
    return None


def _in_slices(target: Route, kind: Kind, ndim: int, owner_layout: bool) -> bool:
    """Whether the shard ranks have slices of it, and no rank the whole."""
    sliced = target is Route.ADAMW_SHARDED or (
        target is Route.FROZEN and kind in (Kind.EMBEDDING, Kind.HEAD)
    )
    return (sliced or not owner_layout) and ndim > 0


def collect(
    model: nn.Module,
    *,
    layers: Sequence[type[nn.Module]],
    route: RouteFunction | None = None,
    matrices_to: Route = Route.MATRIX,
    owner_layout: bool = True,
    gathered_update: bool = False,
    placements: Mapping[str, Placed] | None = None,
) -> tuple[LogicalParameter, ...]:
    """All logical parameters of ``model`` in registration order, each with its route.

    ``layers``: classes whose outermost instances are layer groups. ``route(name, parameter,
    module)`` overrides the declared route; it returns None to keep it. ``matrices_to`` is where
    declared matrices go by default. ``owner_layout=False`` puts every parameter in even slices
    (``--param-layout even``), which a matrix optimizer can use only with ``gathered_update``
    (``--matrix-update gather``). ``placements``: by parameter name, for a model whose modules hold
    the pieces of one tp rank; shapes are those of the whole.

    Raises RoutingError that names all parameters with no declared kind (fail closed), and any
    matrix route on a parameter that is not 2-D or would lie in slices.
    """
    paths = layer_paths(model, layers)
    fusion, dtypes = _fusion_keys(model), _own_dtypes(model)
    seen: dict[int, int] = {}
    found: list[dict[str, object]] = []
    problems: list[str] = []
    for name, module, attribute, parameter in _walk(model):
        if id(parameter) in seen:
            first = found[seen[id(parameter)]]
            first["aliases"] = (*first["aliases"], name)  # type: ignore[misc]
            continue
        kind = declared_kind(module, attribute, parameter)
        chosen = route(name, parameter, module) if route is not None else None
        if kind is None and parameter.requires_grad and chosen is None:
            problems.append(
                f"{name} {tuple(parameter.shape)} in {type(module).__name__}: no declared kind;"
                " set logical_kinds on the module or return a Route for it"
            )
            continue
        kind = kind or Kind.VECTOR
        target, reason = _routed(kind, parameter.requires_grad, matrices_to)
        if chosen is not None and parameter.requires_grad:
            target, reason = Route(chosen), "chosen by the route function"
        whole = owner_layout or gathered_update
        problem = _matrix_problem(name, parameter, whole) if target is Route.MATRIX else None
        if problem is not None:
            problems.append(problem)
            continue
        seen[id(parameter)] = len(found)
        placed = (placements or {}).get(name) or Placed(shape=tuple(parameter.shape))
        sliced = _in_slices(target, kind, parameter.ndim, owner_layout)
        found.append(
            {
                "name": name,
                "shape": placed.shape,
                "kind": kind,
                "route": target,
                **placements_for(target, placed, owned=not sliced),
                "reason": reason,
                "layer": next((p for p in paths if name.startswith(p + ".")), ""),
                "expert": bool(getattr(module, "is_expert", False)),
                "aliases": (),
                "fusion": fusion.get(id(parameter), ""),
                "dtype": dtypes[name.rpartition(".")[0]],
            }
        )
    if problems:
        raise RoutingError("parameters without a usable route:\n  " + "\n  ".join(problems))
    return tuple(LogicalParameter(**entry) for entry in found)  # type: ignore[arg-type]


def routing_report(parameters: Sequence[LogicalParameter]) -> str:
    """The table that a run prints at its start: routes with counts, elements and reasons."""
    lines = ["routing of parameters:"]
    for target in Route:
        chosen = [p for p in parameters if p.route is target]
        if not chosen:
            continue
        total = sum(p.numel for p in chosen)
        lines.append(f"  {target.value:<14} {len(chosen):>6} parameters {total:>16,} elements")
        reasons: dict[str, list[LogicalParameter]] = {}
        for parameter in chosen:
            reasons.setdefault(parameter.reason, []).append(parameter)
        for reason, members in reasons.items():
            sample = members[0]
            lines.append(
                f"    {len(members):>6} x {reason} (e.g. {sample.name} {list(sample.shape)})"
            )
    return "\n".join(lines)
