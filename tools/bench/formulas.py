"""What a line should send and hold: the closed forms and the plan, in bytes.

Owns the arithmetic that counted bytes are compared with, for lines A, B, C, D and M on a grid of R
replicas and K shards with T tensor-parallel ranks behind each. Invariant:
pure functions of a plan's parameters and places; nothing here looks at a runtime. Tested by
``tests/tools/test_lines.py``.

[Note: the closed forms]

Sent per step of one micro-batch, summed over all ranks; P counts the elements of all parameters,
each tensor-parallel rank's pieces of them:

* gather, inside replicas: R (K-1) times 2P at ZeRO-3, P at ZeRO-2 and ZeRO-1, in the compute dtype.
  Groups that stay from forward to backward (a token table that is tied to the head, the loose
  parameters outside of all layers) are gathered once per pass, so they count once at ZeRO-3 too.
* reduce, inside replicas: R (K-1) P, in the reduction dtype. With one replica both make the 2(N-1)P
  and 3(N-1)P of DMuon-2.
* reduce and publish, across replicas: (R-1) P each, 2(R-1) P together. Gradients of owned
  parameters travel to the owner in the reduction dtype, the new weights back in the compute dtype.
  Parameters in even slices are all-reduced; the sums come back in the master dtype (line A:
  all-reduced in the reduction dtype). A message of a publish has a header, which is not in the
  formula. Line D publishes payloads alone.
* matrix_gather, inside replicas, line B, and tp_matrices, between tensor-parallel ranks: the moves
  of the matrix update (``megamuon/ownership/update_plan.py``), in the master dtype. For line B that
  is R (K-1) M, the momentum of the M elements of matrices.

Line D moves what line C moves, and holds what it holds; beyond that it keeps a symmetric pool,
whose size is a plan of its own (``megamuon/runtime/pool.py``), and control memory.

FSDP2 (line A) pads dim 0 of every parameter to a multiple of K, which travels and stays: its forms
are over padded sizes, and the padding is stated apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megamuon.matrices import Layout, LogicalParameter, Route
from megamuon.ownership import OwnershipPlan
from megamuon.ownership.groups import group_of
from megamuon.ownership.update_plan import update_moves
from megamuon.placements import Axis

INSIDE, ACROSS, TP = "inside_rows", "across_rows", "tp"
RESIDENT = ("parameters", "gradients", "optimizer_state")
Key = tuple[str, str]  # kind of traffic, link class
# What the moves of the matrix update count as, by axis.
MOVES: dict[Axis, Key] = {Axis.SHARD: ("matrix_gather", INSIDE), Axis.TP: ("tp_matrices", TP)}
MASTERS = {dtype.itemsize: dtype for dtype in (torch.float32, torch.float64)}


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of an element."""

    compute: int
    reduce: int
    master: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a line the forms depend on, beside its plan."""

    line: str
    zero_stage: int
    widths: Widths


def padded_numel(piece: tuple[int, ...], shards: int) -> int:
    """Elements of a piece under FSDP2, which pads dim 0 to a multiple of the shard ranks."""
    return -(-piece[0] // shards) * shards * math.prod(piece[1:])


def _sizes(plan: OwnershipPlan, padded: bool) -> Callable[[LogicalParameter], int]:
    """Elements of a parameter on all tensor-parallel ranks together, with FSDP2's padding or
    without.
    """
    shards, tp = plan.topology.shards, plan.topology.tp

    def size(parameter: LogicalParameter) -> int:
        if not padded:
            return sum(parameter.piece_numel(rank) for rank in range(tp))
        return sum(padded_numel(parameter.piece_shape(rank), shards) for rank in range(tp))

    return size


def traffic_formula(plan: OwnershipPlan, shape: Shape, *, padding: bool = True) -> dict[Key, int]:
    """Bytes of a step of one micro-batch, summed over ranks; see [Note: the closed forms].

    ``padding``: with what FSDP2 pads; without effect on other lines than A.
    """
    replicas, shards = plan.topology.replicas, plan.topology.shards
    widths, size = shape.widths, _sizes(plan, padding and shape.line == "A")
    passes = 2 if shape.zero_stage == 3 else 1
    everything = sum(size(p) * (1 if group_of(p).kept else passes) for p in plan.parameters)
    trained = [p for p in plan.parameters if p.trainable]
    owned = sum(size(p) for p in trained if p.layout is Layout.OWNER)
    sliced = sum(size(p) for p in trained if p.layout is Layout.EVEN)
    back = widths.reduce if shape.line == "A" else widths.master
    forms = {
        ("gather", INSIDE): replicas * (shards - 1) * everything * widths.compute,
        ("reduce", INSIDE): replicas * (shards - 1) * (owned + sliced) * widths.reduce,
        ("reduce", ACROSS): (replicas - 1) * ((owned + sliced) * widths.reduce + sliced * back),
        ("publish", ACROSS): (replicas - 1) * owned * widths.compute,
    }
    for move in update_moves(plan, MASTERS[widths.master]):
        key = MOVES[move.axis]
        forms[key] = forms.get(key, 0) + move.nbytes
    return {key: nbytes for key, nbytes in forms.items() if nbytes}


def _state_width(parameter: LogicalParameter, widths: Widths) -> int:
    """Bytes of optimizer state per element: momentum, or AdamW's two moments."""
    return widths.master * (1 if parameter.route is Route.MATRIX else 2) * parameter.trainable


def resident_formula(plan: OwnershipPlan, shape: Shape) -> dict[str, float]:
    """Mean resident bytes per rank by kind (DMuon-2, section 4.4), with the dtypes in use.

    With O owned elements and E in even slices: masters O/(RK) + E/K, copies that replicas gather
    from O/K in the compute dtype if there are several replicas, gradients and optimizer state
    O/(RK) + E/K. ZeRO-1 adds whole weights. Pieces of all tensor-parallel ranks, over their number.
    Line D's pool is not in it.
    """
    grid, widths = plan.topology, shape.widths
    size, bare = _sizes(plan, shape.line == "A"), _sizes(plan, False)
    found = dict.fromkeys(RESIDENT, 0.0)
    for parameter in plan.parameters:
        owner = parameter.layout is Layout.OWNER
        share = 1 / (grid.tp * grid.shards * (grid.replicas if owner else 1))
        numel = size(parameter)
        found["parameters"] += numel * share * widths.master
        if owner and grid.replicas > 1:
            found["parameters"] += numel / (grid.tp * grid.shards) * widths.compute
        if shape.zero_stage == 1:
            found["parameters"] += numel / grid.tp * widths.compute
        found["gradients"] += numel * share * widths.master * parameter.trainable
        found["optimizer_state"] += bare(parameter) * share * _state_width(parameter, widths)
    return found


def resident_plan(
    plan: OwnershipPlan, shape: Shape, data_rank: int, tp_rank: int
) -> dict[str, int]:
    """Resident bytes by kind that the plan gives one rank: its own segments."""
    grid, widths = plan.topology, shape.widths
    replica, shard = grid.replica_of(data_rank), grid.shard_of(data_rank)
    found = dict.fromkeys(RESIDENT, 0)
    for parameter in plan.parameters:
        if shape.zero_stage == 1:
            found["parameters"] += parameter.piece_numel(tp_rank) * widths.compute
        if shape.line == "A":  # every rank holds a padded share
            piece = parameter.piece_shape(tp_rank)
            share = padded_numel(piece, grid.shards) // grid.shards * widths.master
            found["parameters"] += share
            found["gradients"] += share * parameter.trainable
        for segment in plan.segments(parameter.name, tp_rank):
            numel = segment.stop - segment.start
            owned = parameter.layout is Layout.OWNER
            place = (grid.replica_of(segment.rank), grid.shard_of(segment.rank))
            here = (replica, shard) == place if owned else shard == segment.rank
            if owned and grid.replicas > 1 and shard == place[1]:
                found["parameters"] += numel * widths.compute
            if not here:
                continue
            if shape.line != "A":
                found["parameters"] += numel * widths.master
                found["gradients"] += numel * widths.master * parameter.trainable
            found["optimizer_state"] += numel * _state_width(parameter, widths)
    return found
