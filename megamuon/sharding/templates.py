"""Templates of boundaries: how their parameters are cut, and what crosses their edge.

Owns ``BoundaryType``, ``Flow``, ``Contract`` and the rules of cutting. Invariant: a template speaks
of whole sizes only, so a plan is the same on every rank and for a model on the meta device; cuts
follow the rule of ``torch.chunk`` (ceil first) over heads, inner features or vocabulary rows, and a
piece without elements is an error. Source: HyperParallel-FSDP, section 4.1, passes 3 and 4; the
cuts and the two forms of the residual stream are those of Megatron-LM's tensor and sequence
parallelism. Tested by ``tests/sharding/test_sharding_plan.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from megamuon.placements import Axis, Partial, Placed, Placement, Shard
from megamuon.sharding.roles import Role


class ShardingError(ValueError):
    """A model, a plan and a number of tp ranks that do not fit together."""


class BoundaryType(StrEnum):
    """Structural kinds of boundaries."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    ROUTER = "router"
    GATE = "gate"
    NORM = "norm"
    EMBEDDING = "embedding"
    POSITIONS = "positions"
    HEAD = "head"
    LOSS = "loss"
    MODEL = "model"  # the root: nothing crosses it, it only says how random numbers are drawn


class Flow(StrEnum):
    """How an activation lies over the tp ranks."""

    WHOLE = "whole"  # everywhere the same
    SEQUENCE = "sequence"  # cut along the positions
    VOCABULARY = "vocabulary"  # cut along the last dim, like the rows of the vocabulary
    PARTIAL = "partial"  # everywhere a summand of the whole


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a module is given and gives, outside (with the neighbours) and inside (locally).

    The forward pass brings ``given`` into ``computed`` and ``produced`` into ``returned``; the
    backward pass runs the transposes.
    """

    given: Flow
    computed: Flow
    produced: Flow
    returned: Flow


ROLE_TYPES: Mapping[Role, BoundaryType] = MappingProxyType(
    {
        Role.QUERY: BoundaryType.ATTENTION,
        Role.KEY_VALUE: BoundaryType.ATTENTION,
        Role.ATTENTION_OUTPUT: BoundaryType.ATTENTION,
        Role.HEAD_NORM: BoundaryType.ATTENTION,
        Role.COLUMN: BoundaryType.MLP,
        Role.ROW: BoundaryType.MLP,
        Role.EXPERT_COLUMN: BoundaryType.EXPERTS,
        Role.EXPERT_ROW: BoundaryType.EXPERTS,
        Role.ROUTER: BoundaryType.ROUTER,
        Role.GATE: BoundaryType.GATE,
        Role.VOCABULARY_TABLE: BoundaryType.EMBEDDING,
        Role.VOCABULARY_HEAD: BoundaryType.HEAD,
        Role.POSITION_TABLE: BoundaryType.POSITIONS,
        Role.NORM: BoundaryType.NORM,
    }
)

# Roles without which a boundary of the type could not compute on pieces.
REQUIRED: Mapping[BoundaryType, frozenset[Role]] = MappingProxyType(
    {
        BoundaryType.ATTENTION: frozenset({Role.QUERY, Role.KEY_VALUE, Role.ATTENTION_OUTPUT}),
        BoundaryType.MLP: frozenset({Role.COLUMN, Role.ROW}),
        BoundaryType.EXPERTS: frozenset({Role.EXPERT_COLUMN, Role.EXPERT_ROW}),
    }
)

_COLUMN_ROLES = (Role.QUERY, Role.KEY_VALUE, Role.COLUMN, Role.EXPERT_COLUMN)
_ROW_ROLES = (Role.ATTENTION_OUTPUT, Role.ROW, Role.EXPERT_ROW)
_TABLE_ROLES = (Role.VOCABULARY_TABLE, Role.VOCABULARY_HEAD)


def contract(kind: BoundaryType, *, sequence_parallel: bool, all_tokens: bool = False) -> Contract:
    """The contract of a boundary; the residual stream between them is whole, or cut along the
    positions under sequence parallelism.

    ``all_tokens``: a router that compares tokens with each other (a capacity), so that each rank
    does the whole of its work.
    """
    stream = Flow.SEQUENCE if sequence_parallel else Flow.WHOLE
    whole, partial, rows = Flow.WHOLE, Flow.PARTIAL, Flow.VOCABULARY
    if kind in (BoundaryType.ATTENTION, BoundaryType.MLP, BoundaryType.EXPERTS):
        return Contract(given=stream, computed=whole, produced=partial, returned=stream)
    if kind is BoundaryType.EMBEDDING:
        return Contract(given=whole, computed=whole, produced=partial, returned=stream)
    if kind is BoundaryType.POSITIONS:
        return Contract(given=whole, computed=stream, produced=stream, returned=stream)
    if kind is BoundaryType.HEAD:
        return Contract(given=stream, computed=whole, produced=rows, returned=rows)
    if kind is BoundaryType.LOSS:
        return Contract(given=rows, computed=rows, produced=whole, returned=whole)
    if kind is BoundaryType.ROUTER and all_tokens:
        return Contract(given=stream, computed=whole, produced=whole, returned=stream)
    if kind is BoundaryType.MODEL:
        return Contract(given=whole, computed=whole, produced=whole, returned=whole)
    return Contract(given=stream, computed=stream, produced=stream, returned=stream)


def chunk_bounds(size: int, pieces: int) -> tuple[int, ...]:
    """Edges of ``size`` things in ``pieces`` runs, as ``torch.chunk`` cuts them; the last runs may
    be empty.
    """
    step = -(-size // pieces)
    return tuple(min(step * place, size) for place in range(pieces + 1))


@dataclass(frozen=True, kw_only=True)
class Grain:
    """What a cut may not split: runs of ``size`` rows or columns, ``count`` of them."""

    word: str  # what one is called in a message
    count: int
    size: int = 1

    def cut(self, name: str, shape: tuple[int, ...], dim: int, tp: int) -> Shard:
        """Cut ``dim`` into ``tp`` pieces.  Raises ShardingError: empty piece, other size."""
        if self.count * self.size != shape[dim]:
            raise ShardingError(
                f"{name} {list(shape)}: dim {dim} should hold {self.count} {self.word} of"
                f" {self.size}"
            )
        edges = chunk_bounds(self.count, tp)
        if any(a == b for a, b in zip(edges, edges[1:], strict=False)):
            sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
            raise ShardingError(
                f"{name} {list(shape)}: {self.count} {self.word} over {tp} tensor-parallel ranks"
                f" give pieces of {sizes}, and none may be empty: use a smaller"
                " --tensor-model-parallel-size"
            )
        return Shard(dim, tuple(edge * self.size for edge in edges))


def place(
    name: str,
    shape: tuple[int, ...],
    role: Role,
    grain: Grain | None,
    *,
    tp: int,
    partial_tokens: bool,
) -> Placed:
    """Where one parameter lies; ``grain`` is what its boundary is cut by (None: it is not cut).

    ``partial_tokens``: outside cut regions, a rank meets only some of the tokens. A replicated
    parameter is partial exactly where that holds, and where a rank meets only some of the heads.
    """
    if tp > 1 and role is Role.EXPERT_ROW and len(shape) == 1:
        raise ShardingError(
            f"{name}: the bias of an expert's last map would be added once per tensor-parallel rank"
        )
    cut: Shard | None = None
    if tp > 1 and grain is not None:
        if role in _COLUMN_ROLES or role in _TABLE_ROLES:
            cut = grain.cut(name, shape, 0, tp)
        elif role in _ROW_ROLES and len(shape) == 2:
            cut = grain.cut(name, shape, 1, tp)
    if cut is not None:
        compute = gradient = Placement.of({Axis.TP: cut})
    else:
        partial = tp > 1 and (role is Role.HEAD_NORM or partial_tokens)
        compute = Placement()
        gradient = Placement.of({Axis.TP: Partial()}) if partial else compute
    return Placed(shape=shape, compute=compute, gradient=gradient)
