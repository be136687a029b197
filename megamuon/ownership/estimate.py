"""What does a plan cost each rank?  Owner fan-out per block, and bytes held and moved.

Owns the arithmetic of MatrixFSDP's gamma (section 4.2) and the expansion of a plan into bytes per
rank: parameters, gradients, optimizer state, workspace, and what a step sends and receives inside
the replicas and across them. Invariant: pure; summed over ranks, the bytes moved are the closed
forms 2(N-1)P at ZeRO-2, 3(N-1)P at ZeRO-3 and 2(R-1)P across replicas. Everything is counted at
tensor-parallel rank 0, whose pieces are the largest. Tested by
``tests/ownership/test_estimate.py``.

[Note: what the estimate assumes]

A gather sends each segment from its holder straight to the other ranks of the replica, and a
reduction the other way. Groups that stay gathered (the root's loose parameters, a table tied to a
head) are gathered once per pass at ZeRO-3 too; at ZeRO-1 weights are gathered once per step, after
the update. Each micro-batch is reduced. Across replicas, gradients of owned parameters go to the
owner, slices are all-reduced as in plain HSDP, and owned parameters are published. What the update
of matrices moves is counted apart, in ``update_plan.py``. Workspace:
gathered buffers (at ZeRO-3 the largest group, the one prefetched and those that stay; at ZeRO-2
all), gradient slots of two groups (one is written, one is reduced) and the largest owner window.
Padding of buffers to an alignment and what a library allocates for itself are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megamuon.matrices import Layout, LogicalParameter, Route
from megamuon.ownership.groups import GroupKey, group_of
from megamuon.ownership.plan import OwnershipPlan


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What the optimizers of a run keep; the defaults are Muon's and AdamW's in FP32.  Counts of
    steps, 4 bytes each, are left out.
    """

    flat: int = 8  # per element of what is trained element by element
    piece: int = 4  # per element of a matrix, beside each of its pieces
    whole: Callable[[int, int], int] | None = None  # of a [rows, cols] matrix where it is worked on


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
        if parameter.layout is Layout.OWNER:
            block = held.setdefault(parameter.layer, np.zeros(shards, dtype=np.int64))
            shard = plan.topology.shard_of(plan.owner_of(parameter.name))
            block[shard] += parameter.piece_numel(0) * plan.settings.bytes_per_element
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
    """Elements of one gather group: held by each rank, whole and trainable alone."""

    stays: bool  # gathered once per pass, whatever the stage
    owned: np.ndarray  # [replicas, shards]
    sliced: np.ndarray  # [replicas, shards]; every replica holds the same
    owned_trainable: np.ndarray
    sliced_trainable: np.ndarray

    @property
    def led(self) -> np.ndarray:
        """Elements that each rail sends into its replica, [shards]."""
        return self.owned.sum(axis=0) + self.sliced[0]

    @property
    def led_trainable(self) -> np.ndarray:
        """The trainable ones of these."""
        return self.owned_trainable.sum(axis=0) + self.sliced_trainable[0]


def _groups(plan: OwnershipPlan) -> list[_Group]:
    grid = plan.topology
    found: dict[GroupKey, _Group] = {}
    for parameter in plan.parameters:
        key = group_of(parameter)
        if key not in found:
            blank = [np.zeros((grid.replicas, grid.shards), dtype=np.int64) for _ in range(4)]
            found[key] = _Group(key.kept, *blank)
        group = found[key]
        for rank, start, stop in plan.segments(parameter.name):
            if parameter.layout is Layout.OWNER:
                place: tuple[object, int] = (grid.replica_of(rank), grid.shard_of(rank))
                whole, trainable = group.owned, group.owned_trainable
            else:
                place = (slice(None), rank)
                whole, trainable = group.sliced, group.sliced_trainable
            whole[place] += stop - start
            if parameter.trainable:
                trainable[place] += stop - start
    return list(found.values())


def _of_whole(plan: OwnershipPlan, parameter: LogicalParameter, state: StateBytes) -> int:
    """Bytes of a matrix's own state on each data-parallel rank that works on it, at tp rank 0."""
    if parameter.route is not Route.MATRIX or state.whole is None:
        return 0
    elsewhere = parameter.cut is not None and plan.tp_owner_of(parameter.name) != 0
    return 0 if elsewhere else state.whole(parameter.shape[0], parameter.shape[1])


def optimizer_bytes(plan: OwnershipPlan, state: StateBytes | None = None) -> np.ndarray:
    """Bytes of optimizer state per rank; every replica holds the even slices of its shards, and
    each rank that has a slice of a matrix the state of the whole.
    """
    grid, state = plan.topology, state or StateBytes()
    held = np.zeros(grid.world, dtype=np.int64)
    by_replica = held.reshape(grid.replicas, grid.shards)
    for parameter in plan.parameters:
        if not parameter.trainable:
            continue
        each = state.piece if parameter.route is Route.MATRIX else state.flat
        whole = _of_whole(plan, parameter, state)
        for rank, start, stop in plan.segments(parameter.name):
            size = (stop - start) * each + whole
            if parameter.layout is Layout.OWNER:
                held[rank] += size
            else:
                by_replica[:, rank] += size
    return held


def _total(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return sum(arrays, start=np.int64(0))  # type: ignore[call-overload]


def _workspace(groups: Sequence[_Group], stage: int, width: int, reduce_width: int) -> np.ndarray:
    """Bytes per shard."""
    sizes = [int(group.led.sum()) for group in groups]
    slots = sorted((int(group.led_trainable.sum()) for group in groups), reverse=True)[:2]
    if stage == 1:
        gathered = 0
    elif stage == 2:
        gathered = sum(sizes)
    else:
        pairs = list(zip(groups, sizes, strict=True))
        passing = sorted((size for group, size in pairs if not group.stays), reverse=True)
        gathered = sum(size for group, size in pairs if group.stays) + sum(passing[:2])
    windows = np.max([group.led_trainable for group in groups], axis=0)
    return (gathered + sum(slots)) * width + windows * reduce_width


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
    replicas, shards = grid.replicas, grid.shards
    shape = (replicas, shards)
    groups = _groups(plan)
    if not groups:
        return ResourceEstimate(**dict.fromkeys(_KINDS, (0,) * grid.world))
    owned, sliced = _total(g.owned for g in groups), _total(g.sliced for g in groups)
    trained = _total(g.owned_trainable for g in groups)
    slices = _total(g.sliced_trainable for g in groups)
    # Frozen weights are kept as they are gathered, owned ones in the leaders' copies if there are.
    frozen = sliced - slices + (owned - trained) * (replicas == 1)
    everything = int(_total(g.led for g in groups).sum())
    if zero_stage == 1:
        resident = np.full(shape, everything)
    else:  # leaders keep a copy of what the owners of their shard publish to them
        resident = np.broadcast_to(owned.sum(axis=0) * (replicas > 1), shape)

    sent = received = np.int64(0)
    for group in groups:
        led, mine = group.led, group.led_trainable
        gathers = (
            1
            if zero_stage == 1
            else micro_batches * (2 if zero_stage == 3 and not group.stays else 1)
        )
        sent = sent + gathers * width * (shards - 1) * led
        received = received + gathers * width * (led.sum() - led)
        sent = sent + micro_batches * reduce_bytes * (mine.sum() - mine)
        received = received + micro_batches * reduce_bytes * (shards - 1) * mine
    others = trained.sum(axis=0) - trained  # owned by the other ranks of the rail
    reduced = micro_batches * reduce_bytes
    ring = 2 * (replicas - 1) * slices * reduced // replicas
    figures = {
        "parameters": (trained + slices) * master_bytes + (frozen + resident) * width,
        "gradients": (trained + slices) * master_bytes,
        "optimizer_state": optimizer_bytes(plan, state),
        "workspace": _workspace(groups, zero_stage, width, reduce_bytes),
        "sent_inside_replicas": sent,
        "received_inside_replicas": received,
        "sent_across_replicas": others * reduced + (replicas - 1) * trained * width + ring,
        "received_across_replicas": (replicas - 1) * trained * reduced + others * width + ring,
    }
    return ResourceEstimate(
        **{
            kind: tuple(int(v) for v in np.broadcast_to(values.reshape(-1, shards), shape).flat)
            for kind, values in figures.items()
        }
    )


_KINDS = tuple(ResourceEstimate.__dataclass_fields__)
