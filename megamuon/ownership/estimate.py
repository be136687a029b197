"""Closed forms of what a plan costs each rank: fan-out per block, bytes held, bytes moved.

Owns the arithmetic of MatrixFSDP's gamma (section 4.2), and the one set of forms for the bytes of
lines A, B, C, D and M on a grid of R replicas and K shards with T tensor-parallel
ranks behind each: what each rank holds, and what a step sends and receives inside
the replicas and across them. Their sums are the closed forms that counted bytes are compared with.
Invariant: pure; a function of a plan's parameters and places alone. Tested by
``tests/ownership/test_estimate.py`` and, against real runs, ``tests/tools/test_lines.py``.

[Note: the closed forms]

Sent per step of one micro-batch, summed over all ranks; P counts the elements of all parameters,
each tensor-parallel rank's pieces of them:

* gather, along shard: R (K-1) times 2P at ZeRO-3, P at ZeRO-2 and ZeRO-1, in the compute dtype.
  Groups that stay from forward to backward (a token table that is tied to the head, the loose
  parameters outside of all layers) are gathered once per pass, so they count once at ZeRO-3 too.
  At ZeRO-1 there is one gather per step, after the update, however many the micro-batches.
* reduce, along shard: R (K-1) P, in the reduction dtype, for each micro-batch. With one replica
  both make the 2(N-1)P and 3(N-1)P of DMuon-2.
* reduce and publish, along replicate: (R-1) P each, 2(R-1) P together. Gradients of owned
  parameters travel to the owner in the reduction dtype, the new weights back in the compute dtype.
  Parameters in even slices are all-reduced; the sums come back in the master dtype (line A:
  all-reduced in the reduction dtype). A message of a publish has a header, which is not in the
  form. Line D publishes payloads alone.
* matrix_gather, along shard, and tp_matrices, along tp: the moves of the matrix update
  (``update_plan.py``), in the master dtype. For line B that is R (K-1) M, the momentum of the M
  elements of matrices.

Held, mean over ranks, with O owned elements and E in even slices (DMuon-2, section 4.4): masters
O/(RK) + E/K, copies that replicas gather from O/K in the compute dtype if there are several,
reduced gradients and optimizer state O/(RK) + E/K. ZeRO-1 adds whole weights.

Line D moves what line C moves, and holds what it holds; beyond that it keeps a symmetric pool,
whose size is a plan of its own (``megamuon/runtime/pool.py``), and control memory. FSDP2 (line A)
pads dim 0 of every parameter to a multiple of K, which travels and stays: its forms are over padded
sizes, but for optimizer state, which has no padding.

[Note: what the estimate assumes]

A gather sends each segment from its holder straight to the other ranks of the replica, and a
reduction the other way. Workspace: gathered buffers (at ZeRO-3 the largest group, the one
prefetched and those that stay; at ZeRO-2 all), unsharded gradients of two groups (one is written,
one is reduced) and the largest sharded gradient. What the update of matrices moves is counted
apart, in ``update_plan.py``. Padding of buffers to an alignment and what a library allocates for
itself are not in it. Everything is counted at tensor-parallel rank 0, whose pieces are the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megamuon.matrices import LogicalParameter, Route
from megamuon.ownership.groups import GroupKey, group_of
from megamuon.ownership.plan import OwnershipPlan
from megamuon.ownership.update_plan import update_moves
from megamuon.placements import Axis, Owned

SHARD, REPLICATE = "shard", "replicate"
RESIDENT = ("parameters", "gradients", "optimizer_state")
Key = tuple[str, str]  # operation and axis, as ``collectives.traffic`` counts them
# What the moves of the matrix update count as, by axis.
MOVES: dict[Axis, Key] = {Axis.SHARD: ("matrix_gather", SHARD), Axis.TP: ("tp_matrices", "tp")}
OWN_WIDTHS = {"": 0, "float32": 4}  # by ``LogicalParameter.dtype``
MASTERS = {dtype.itemsize: dtype for dtype in (torch.float32, torch.float64)}


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What the optimizers of a run keep; the defaults are Muon's and AdamW's in FP32.  Counts of
    steps, 4 bytes each, are left out.
    """

    flat: int = 8  # per element of what is trained element by element
    piece: int = 4  # per element of a matrix, beside each of its pieces
    whole: Callable[[int, int], int] | None = None  # of a [rows, cols] matrix where it is worked on


@dataclass(frozen=True, kw_only=True)
class LineShape:
    """What bytes depend on beside the plan; widths are bytes of an element."""

    line: str = "C"  # A, B, C, D or M
    zero_stage: int = 3
    compute: int = 4  # gathered weights, publishes
    reduce: int = 4  # gradients on the wire
    master: int = 4  # masters, reduced gradients

    @property
    def padded(self) -> bool:
        """Whether dim 0 of every parameter is padded to a multiple of the shard ranks."""
        return self.line == "A"


@dataclass(frozen=True, kw_only=True)
class BlockFanout:
    """How unevenly one block lies on the ranks that gather it."""

    block: str  # layer; "" for what lies outside every layer
    bytes: int  # of its owned parameters, in the compute dtype
    busiest_bytes: int  # of these, led by one shard rank
    gamma: float  # busiest over mean: 1 moves as many bytes on the busiest link as even shards do


@dataclass(frozen=True, kw_only=True)
class ResourceEstimate:
    """Bytes per data-parallel rank, each a tuple over the ranks of the grid."""

    parameters: tuple[int, ...]  # masters, and frozen weights and resident copies as gathered
    gradients: tuple[int, ...]  # reduced, on their owners
    optimizer_state: tuple[int, ...]
    workspace: tuple[int, ...]
    sent_inside_replicas: tuple[int, ...]  # per step, as the rest
    received_inside_replicas: tuple[int, ...]
    sent_across_replicas: tuple[int, ...]
    received_across_replicas: tuple[int, ...]


def block_fanouts(plan: OwnershipPlan) -> tuple[BlockFanout, ...]:
    """gamma_B = max_r O_(B,r) / (P_B / W) of every block with owned parameters, in registration
    order. W is the shard span, the ranks of a replica; under HSDP the parameters of all owners of a
    shard leave from the one rank of that rail in each replica.
    """
    shards = plan.topology.shards
    held: dict[str, np.ndarray] = {}
    for parameter in plan.parameters:
        if parameter.name in plan.homes:
            block = held.setdefault(parameter.layer, np.zeros(shards, dtype=np.int64))
            home = plan.homes[parameter.name]
            width = max(OWN_WIDTHS[parameter.dtype], plan.settings.bytes_per_element)
            block[home.shard] += parameter.piece_numel(0) * width
    return tuple(
        BlockFanout(
            block=name,
            bytes=int(sizes.sum()),
            busiest_bytes=int(sizes.max()),
            gamma=float(sizes.max() * shards / sizes.sum()) if sizes.sum() else 0.0,
        )
        for name, sizes in held.items()
    )


@dataclass
class _Group:
    """Elements of one gather group at one tensor-parallel rank, [replicas, shards]."""

    stays: bool  # gathered once per pass, whatever the stage
    own_width: int  # bytes of an element of a group with a dtype of its own, or 0
    owned: np.ndarray
    sliced: np.ndarray  # every replica holds the same
    owned_trainable: np.ndarray
    sliced_trainable: np.ndarray

    def width(self, compute: int) -> int:
        """Bytes of a gathered element where the run computes with ``compute`` bytes."""
        return max(self.own_width, compute)

    @property
    def led(self) -> np.ndarray:
        """Elements that each rail sends into its replica, [shards]."""
        return self.owned.sum(axis=0) + self.sliced[0]

    @property
    def led_trainable(self) -> np.ndarray:
        """The trainable ones of these."""
        return self.owned_trainable.sum(axis=0) + self.sliced_trainable[0]


def _groups(plan: OwnershipPlan, tp_rank: int = 0, *, padded: bool = False) -> list[_Group]:
    grid = plan.topology
    found: dict[GroupKey, _Group] = {}
    for parameter in plan.parameters:
        key = group_of(parameter)
        if key not in found:
            blank = [np.zeros((grid.replicas, grid.shards), dtype=np.int64) for _ in range(4)]
            found[key] = _Group(key.kept, OWN_WIDTHS[key.dtype], *blank)
        group = found[key]
        kinds = [group.owned if parameter.owned else group.sliced]
        if parameter.trainable:
            kinds.append(group.owned_trainable if parameter.owned else group.sliced_trainable)
        for place, numel in _places(plan, parameter, tp_rank, padded):
            for kind in kinds:
                kind[place] += numel
    return list(found.values())


def _places(
    plan: OwnershipPlan, parameter: LogicalParameter, tp_rank: int, padded: bool
) -> Iterator[tuple[tuple[object, object], int]]:
    """Where the elements of a parameter's piece lie: an index into [replicas, shards], elements."""
    if padded:
        first, *rest = parameter.piece_shape(tp_rank)
        yield (slice(None), slice(None)), -(-first // plan.topology.shards) * math.prod(rest)
        return
    for start, stop, shard, replica in plan.segments(parameter.name, tp_rank):
        yield (slice(None) if replica is None else replica, shard), stop - start


def _total(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return sum(arrays, start=np.int64(0))  # type: ignore[call-overload]


# --- bytes that stay -----------------------------------------------------------------------------


def _of_whole(
    plan: OwnershipPlan, parameter: LogicalParameter, state: StateBytes, tp_rank: int
) -> int:
    """Bytes of a matrix's own state on each data-parallel rank that works on it."""
    if parameter.route is not Route.MATRIX or state.whole is None:
        return 0
    on_tp = parameter.update.on(Axis.TP)
    elsewhere = isinstance(on_tp, Owned) and on_tp.index != tp_rank
    return 0 if elsewhere else state.whole(parameter.shape[0], parameter.shape[1])


def optimizer_bytes(
    plan: OwnershipPlan, state: StateBytes | None = None, tp_rank: int = 0
) -> np.ndarray:
    """Bytes of optimizer state, [replicas, shards]; every replica holds the even slices of its
    shards, and each rank that has a slice of a matrix the state of the whole.
    """
    grid, state = plan.topology, state or StateBytes()
    held = np.zeros((grid.replicas, grid.shards), dtype=np.int64)
    for parameter in plan.parameters:
        if not parameter.trainable:
            continue
        each = state.piece if parameter.route is Route.MATRIX else state.flat
        whole = _of_whole(plan, parameter, state, tp_rank)
        for place, numel in _places(plan, parameter, tp_rank, padded=False):
            held[place] += numel * each + whole
    return held


def resident(plan: OwnershipPlan, shape: LineShape, tp_rank: int = 0) -> dict[str, np.ndarray]:
    """Bytes that each rank keeps by kind (``RESIDENT``), [replicas, shards]: masters and copies
    in the compute dtype, reduced gradients, optimizer state.
    """
    groups = _groups(plan, tp_rank, padded=shape.padded)
    return _resident(groups, shape) | {"optimizer_state": optimizer_bytes(plan, None, tp_rank)}


def _resident(groups: Sequence[_Group], shape: LineShape) -> dict[str, np.ndarray]:
    masters = _total(g.owned_trainable + g.sliced_trainable for g in groups)
    kept = np.int64(0)  # bytes, as they are gathered
    for group in groups:
        replicas, width = len(group.owned), group.width(shape.compute)
        # Frozen weights are kept as they are gathered, owned ones in leaders' copies if there are.
        frozen = group.sliced - group.sliced_trainable
        frozen = frozen + (group.owned - group.owned_trainable) * (replicas == 1)
        if shape.line == "A":  # FSDP2 keeps frozen weights in the master dtype too
            masters, frozen = masters + frozen, frozen * 0
        # Leaders keep a copy of what the owners of their shard publish to them.
        copies = group.owned.sum(axis=0) * (replicas > 1)
        if shape.zero_stage == 1:  # whole weights for life
            copies = group.led.sum()
        kept = kept + (frozen + copies) * width
    return {
        "parameters": masters * shape.master + kept,
        "gradients": _total(g.owned_trainable + g.sliced_trainable for g in groups) * shape.master,
    }


def resident_formula(plan: OwnershipPlan, shape: LineShape) -> dict[str, float]:
    """Mean resident bytes per rank by kind, over all tensor-parallel ranks too."""
    pieces = [resident(plan, shape, tp_rank) for tp_rank in range(plan.topology.tp)]
    return {kind: float(np.mean([held[kind] for held in pieces])) for kind in RESIDENT}


# --- bytes that move -----------------------------------------------------------------------------


def _traffic(
    groups: Sequence[_Group], shape: LineShape, micro_batches: int = 1
) -> dict[Key, tuple[np.ndarray, np.ndarray]]:
    """Bytes that each rank sends and receives per step, [replicas, shards]; [shards] where all
    replicas are alike.
    """
    replicas, shards = groups[0].owned.shape
    zero = np.zeros(shards, dtype=np.int64)
    gathered, received = zero, zero
    for group in groups:
        passes = 2 if shape.zero_stage == 3 and not group.stays else 1
        gathers = 1 if shape.zero_stage == 1 else passes * micro_batches
        width = gathers * group.width(shape.compute)
        gathered = gathered + width * (shards - 1) * group.led
        received = received + width * (group.led.sum() - group.led)
    mine = _total(g.led_trainable for g in groups)
    reduced = micro_batches * shape.reduce
    trained = _total(g.owned_trainable for g in groups)
    others = trained.sum(axis=0) - trained  # owned by the other ranks of the rail
    published = _total(g.owned_trainable * g.width(shape.compute) for g in groups)  # bytes
    slices = _total(g.sliced_trainable for g in groups)[0]
    back = shape.reduce if shape.line == "A" else shape.master
    # An all-reduce sends and receives equally much; replicas share what does not divide.
    summed = (replicas - 1) * micro_batches * (shape.reduce + back) * slices
    ring = np.diff(summed * np.arange(replicas + 1)[:, None] // replicas, axis=0)
    return {
        ("gather", SHARD): (gathered, received),
        ("reduce", SHARD): (reduced * (mine.sum() - mine), reduced * (shards - 1) * mine),
        ("reduce", REPLICATE): (
            others * reduced + ring,
            (replicas - 1) * trained * reduced + ring,
        ),
        ("publish", REPLICATE): (
            (replicas - 1) * published,
            published.sum(axis=0) - published,
        ),
    }


def traffic_formula(
    plan: OwnershipPlan, shape: LineShape, *, padding: bool = True
) -> dict[Key, int]:
    """Bytes of a step of one micro-batch, summed over all ranks; what is not sent has no entry.

    ``padding``: with what FSDP2 pads; without effect on other lines than A.
    """
    grid, found = plan.topology, dict[Key, int]()
    for tp_rank in range(grid.tp):
        groups = _groups(plan, tp_rank, padded=padding and shape.padded)
        for key, (sent, _) in (_traffic(groups, shape) if groups else {}).items():
            total = int(np.broadcast_to(sent, (grid.replicas, grid.shards)).sum())
            found[key] = found.get(key, 0) + total
    for move in update_moves(plan, MASTERS[shape.master]):
        key = MOVES[move.axis]
        found[key] = found.get(key, 0) + move.nbytes
    return {key: nbytes for key, nbytes in found.items() if nbytes}


# --- all of it, for each rank --------------------------------------------------------------------


def _workspace(groups: Sequence[_Group], stage: int, width: int, reduce_width: int) -> np.ndarray:
    """Bytes per shard."""
    sizes = [int(group.led.sum()) * group.width(width) for group in groups]
    trained = (int(group.led_trainable.sum()) * group.width(width) for group in groups)
    unsharded = sorted(trained, reverse=True)[:2]
    if stage == 1:
        gathered = 0
    elif stage == 2:
        gathered = sum(sizes)
    else:
        pairs = list(zip(groups, sizes, strict=True))
        passing = sorted((size for group, size in pairs if not group.stays), reverse=True)
        gathered = sum(size for group, size in pairs if group.stays) + sum(passing[:2])
    sharded = np.max([group.led_trainable for group in groups], axis=0)
    return gathered + sum(unsharded) + sharded * reduce_width


def estimate(
    plan: OwnershipPlan,
    *,
    zero_stage: int = 3,
    micro_batches: int = 1,
    master_bytes: int = 4,
    reduce_bytes: int = 4,
    state: StateBytes | None = None,
) -> ResourceEstimate:
    """Bytes of every rank under ``plan``; see [Note: what the estimate assumes].

    ``master_bytes``: per element of masters and reduced gradients; ``reduce_bytes``: of gradients
    on the wire; ``state``: of the optimizers. The compute dtype is the plan's. Raises
    ValueError on another ZeRO stage than 1, 2 or 3 and on fewer than one micro-batch.
    """
    if zero_stage not in (1, 2, 3):
        raise ValueError(f"zero_stage {zero_stage}: choose 1, 2 or 3 (--zero-stage)")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
    grid, width = plan.topology, plan.settings.bytes_per_element
    groups = _groups(plan)
    if not groups:
        return ResourceEstimate(**dict.fromkeys(_KINDS, (0,) * grid.world))
    shape = LineShape(
        zero_stage=zero_stage, compute=width, reduce=reduce_bytes, master=master_bytes
    )
    figures = {
        **_resident(groups, shape),
        "optimizer_state": optimizer_bytes(plan, state),
        "workspace": _workspace(groups, zero_stage, width, reduce_bytes),
    }
    for (_, axis), moved in _traffic(groups, shape, micro_batches).items():
        where = "inside_replicas" if axis == SHARD else "across_replicas"
        for direction, nbytes in zip(("sent", "received"), moved, strict=True):
            kind = f"{direction}_{where}"
            figures[kind] = figures.get(kind, np.int64(0)) + nbytes
    return ResourceEstimate(
        **{
            kind: tuple(int(v) for v in np.broadcast_to(values, (grid.replicas, grid.shards)).flat)
            for kind, values in figures.items()
        }
    )


_KINDS = tuple(ResourceEstimate.__dataclass_fields__)
