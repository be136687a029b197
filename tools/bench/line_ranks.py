"""What ``lines.py`` does on each rank: steps of all lines in turn, counted bytes, resident bytes.

Owns ``work``. Invariants: lines take turns step by step on the same tokens; time is measured in
steps of their own, in which nothing is counted; bytes are those of real calls and real storages.
Tested by ``tests/tools/test_lines.py``.

A line's turn is a barrier, then steps back to back. With several replicas the first step of a turn
is not recorded: the next one's forward pass is what the publish of weights overlaps, and another
line's step in between would hide the wait for it. Line D opens its symmetric pool after its second
step, so all of that lies in the warm-up.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megamuon.collectives.traffic import Traffic
from megamuon.ownership import OwnershipPlan
from megamuon.ownership.estimate import (
    Key,
    LineShape,
    resident_formula,
    traffic_formula,
)
from megamuon.ownership.estimate import resident as resident_of_plan
from megamuon.ownership.report import summarize
from megamuon.runtime import Runtime
from tools.bench.blocked import Blocked
from tools.bench.footprint import Shared, peak_growth, shared_of, storage_bytes
from tools.bench.systems import Line, newton_schulz_share, staged_step
from tools.bench.wire import count_bytes
from tools.sharded_training import Case

PHASES = ("forward", "backward", "optimizer", "exposed_communication", "publish_wait")
# Rounds: the first freezes orders, the second opens line D's pool, the third makes its operators'
# tables; and caches fill.
WARM_UP = 3
INSIDE, ACROSS, TP, WORLD = "inside_rows", "across_rows", "tp", "world"
CLASSES = (INSIDE, ACROSS, TP, WORLD)  # of links
CLASS_OF = {
    "shard": INSIDE,
    "replicate": ACROSS,
    "tp": TP,
    "world": WORLD,
}  # by axis of ``Traffic``


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How often lines take turns, and the dtypes of what moves."""

    rounds: int
    steps: int  # recorded steps of a turn
    compute: torch.dtype
    reduce: torch.dtype

    def shape(self, case: Case) -> LineShape:
        """What the forms of a line depend on."""
        return LineShape(
            line=case.line,
            zero_stage=case.zero_stage,
            compute=self.compute.itemsize,
            reduce=self.reduce.itemsize,
        )


def by_name(cases: Sequence[Case]) -> dict[str, Case]:
    """Cases by the name of their line; a second one of a line has AdamW for its matrices."""
    found: dict[str, Case] = {}
    for case in cases:
        found[f"{case.line} adamw" if case.line in found else case.line] = case
    return found


def work(rank: int, world: int, cases: Sequence[Case], schedule: Schedule) -> dict[str, Any]:
    """All lines on one rank: name of the line -> what it measured."""
    torch.set_num_threads(1)
    # FSDP2 warns of in-place operations on a model output that is a view; nobody does any here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    lines = {
        name: Line(case, rank, compute=schedule.compute, reduce=schedule.reduce)
        for name, case in by_name(cases).items()
    }
    timed = time_lines(lines, schedule)
    found = {}
    for name, line in lines.items():
        shape = schedule.shape(line.case)
        found[name] = timed[name] | sent(line, shape) | resident(line, shape)
    for line in lines.values():
        line.runtime.close()
    return found


# --- time ----------------------------------------------------------------------------------------


def time_lines(lines: dict[str, Line], schedule: Schedule) -> dict[str, dict[str, Any]]:
    """Seconds of each recorded step on this rank by phase, and its losses (means over ranks)."""
    blocked = Blocked()
    for line in lines.values():
        if line.publication is not None:
            blocked.follow(line.publication.publisher)
    found: dict[str, dict[str, Any]] = {name: {"steps": [], "losses": []} for name in lines}
    order = list(lines)
    with blocked.watch():
        for turn in range(WARM_UP + schedule.rounds):
            for name in order:
                line = lines[name]
                lead = int(line.mesh.replicas > 1)
                dist.barrier()
                taken = [
                    timed_step(line, turn * (lead + schedule.steps) + index, blocked)
                    for index in range(lead + schedule.steps)
                ]
                line.settle()
                if turn >= WARM_UP:
                    found[name]["steps"].extend(seconds for seconds, _ in taken[lead:])
                found[name]["losses"].extend(mean_over_ranks(loss) for _, loss in taken)
            order = order[1:] + order[:1]  # nobody always runs after the same other
    return found


def timed_step(line: Line, step: int, blocked: Blocked) -> tuple[dict[str, float], float]:
    """Seconds of ``PHASES``, which add up to the step: work by the phase it belongs to, waits by
    what for.  ``optimizer_with_waits`` is the whole optimizer phase.
    """
    marks: list[tuple[float, float, float]] = []
    loss = staged_step(line, line.tokens(step), lambda _: marks.append(blocked.now()))
    seconds: dict[str, float] = {}
    for name, before, after in zip(PHASES[:3], marks, marks[1:], strict=False):
        clock, communication, publish = (b - a for a, b in zip(before, after, strict=True))
        seconds[name] = clock - communication - publish
    clock, communication, publish = (b - a for a, b in zip(marks[0], marks[-1], strict=True))
    return {
        **seconds,
        "exposed_communication": communication,
        "publish_wait": publish,
        "step": clock,
        "optimizer_with_waits": marks[3][0] - marks[2][0],
    }, loss


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


# --- bytes that move -----------------------------------------------------------------------------


def sent(line: Line, shape: LineShape) -> dict[str, Any]:
    """Bytes that this rank sends in a step, by kind and link class, as the runtime counts them;
    what Gloo sends; the closed forms.

    What tensor parallelism sends is read off torch's calls, because layers send it without a
    runtime, and so is what Gloo sends beyond what a call needs.
    """
    traffic, phases = line.runtime.traffic, dict[str, dict[Key, int]]()
    traffic.reset()
    with count_bytes() as counter:

        def mark(phase: str) -> None:
            counter.phase = phase
            phases[phase] = by_class(traffic)

        staged_step(line, line.tokens(10_000), mark)
        line.settle()
    moved = by_class(traffic)
    before, after = phases["optimizer"], phases["end"]
    at_the_step = {key[0]: after[key] - before.get(key, 0) for key in after}
    wire, called = dict(moved), 0
    for call in counter.calls:
        optimizer, key = call.phase in ("optimizer", "end"), ("more", link_of(line, call.ranks))
        if key[1] == TP:
            key = ("tp_matrices" if optimizer else "tp_activations", TP)
            moved[key] = moved.get(key, 0) + call.nbytes
            if call.phase == "optimizer":
                at_the_step[key[0]] = at_the_step.get(key[0], 0) + call.nbytes
            wire[key] = wire.get(key, 0) + call.wire
        else:
            wire[key] = wire.get(key, 0) + call.wire - call.nbytes
            called += call.nbytes
    plan: OwnershipPlan = line.runtime.plan
    return {
        "sent": moved,
        "wire": wire,
        "called": called,
        "optimizer_step_sent": {kind: nbytes for kind, nbytes in at_the_step.items() if nbytes},
        "traffic_formula": classes_of(traffic_formula(plan, shape)),
        "traffic_formula_unpadded": classes_of(traffic_formula(plan, shape, padding=False)),
        "elements": sum(p.numel for p in plan.parameters),
        "collectives": counter.by_operation(),
        "newton_schulz_share": newton_schulz_share(line.case, plan),
        "busiest_owner_over_mean": summarize(plan).busiest_over_mean_ns,
    }


def by_class(traffic: Traffic) -> dict[Key, int]:
    """Bytes by kind and link class; a few bytes of control at a pass's end are, as the norm, not of
    the weights of a replica.
    """
    found: dict[Key, int] = {}
    for operation, axes in traffic.as_dict().items():
        for axis, counted in axes.items():
            if axis != "tp":
                link = WORLD if operation == "pass_end" else CLASS_OF[axis]
                found[operation, link] = counted["bytes"]
    return found


def classes_of(forms: dict[Key, int]) -> dict[Key, int]:
    """Forms by kind and link class."""
    return {(kind, CLASS_OF[axis]): nbytes for (kind, axis), nbytes in forms.items()}


def link_of(line: Line, ranks: tuple[int, ...]) -> str:
    """The link class of a call between ``ranks``."""
    mesh = line.mesh
    if mesh.tp > 1 and ranks in mesh.groups_along("tp"):
        return TP
    if ranks in mesh.groups_along("shard"):
        return INSIDE
    return ACROSS if ranks in mesh.groups_along("replicate") else WORLD


# --- bytes that stay -----------------------------------------------------------------------------


def resident(line: Line, shape: LineShape) -> dict[str, Any]:
    """Bytes that this rank holds when all gradients are reduced, before the step, by kind; what the
    plan gives it; the mean that the closed form gives.

    ``overhead`` are headers of leader copies, AdamW's step counters and, at ZeRO-1, the alignment
    of weights; ``transient`` is what should be gone by then; ``unaccounted`` the difference to all
    tensor storages that the runtime and the model lead to, with an open pool as one of them.
    ``pool`` and ``control`` are what line D keeps for its transfers; reduced gradients in the pool,
    and weights that stay there, count as what they are. ``peak`` adds to what lies there between
    two steps the most that torch's allocator has on top in one: activations and send buffers too.
    """
    runtime, found, shared = line.runtime, dict[str, int](), Shared()
    between_steps = _stored(line)

    def look(phase: str) -> None:
        nonlocal shared
        if phase == "optimizer":
            shared = shared_of(runtime)
            found.update(runtime.memory(), storages=_stored(line))

    staged_step(line, line.tokens(10_001), look)
    line.settle()
    growth = peak_growth(lambda: staged_step(line, line.tokens(10_002), lambda _: None))
    line.settle()
    headers = 0
    if line.publication is not None:
        copies = line.publication.copies
        payloads = (copies.payload(index) for index in copies.indices)
        headers = copies.resident_bytes - sum(p.numel() * p.element_size() for p in payloads)
    counters = sum(
        stored.data.element_size()
        for stored in runtime.state(everywhere=True)
        if stored.name.startswith("optimizer.") and not stored.data.ndim
    )
    stored = found.pop("storages")
    unaccounted = stored - sum(found.values())
    gathered, pooled, kept, alignment = found["gathered_weights"], 0, 0, 0
    if shape.zero_stage == 1:
        whole = (group.weights for group in runtime.groups)
        pooled = sum(weights.nbytes for weights in whole if weights.alive and weights.bound)
        gathered += pooled
        alignment = sum(
            group.weights.layout.numel - sum(p.piece_numel(group.tp_rank) for p in group.parameters)
            for group in runtime.groups
        )
        alignment *= shape.compute
        kept = gathered - alignment
    held = {
        "parameters": found["masters"] + found["leader_copies"] - headers + kept,
        "gradients": found["sharded_gradients"] + shared.sharded,
        "optimizer_state": found["optimizer_state"] - counters,
        "overhead": headers + counters + alignment,
        "transient": gathered
        - kept
        - alignment
        + found["unsharded_gradients"]
        + found["accumulators"],
        "pool": shared.leases - pooled,
        "control": shared.control,
        "unaccounted": unaccounted,
    }
    mesh = line.mesh
    replica, shard = divmod(mesh.place, runtime.plan.topology.shards)
    planned = resident_of_plan(runtime.plan, shape, mesh.tp_rank)
    return {
        "pool": pool_of(line),
        "resident": held,
        "memory": found,
        "resident_plan": {kind: int(held[replica, shard]) for kind, held in planned.items()},
        "resident_formula": resident_formula(runtime.plan, shape),
        "peak": between_steps + shared.control + growth,
    }


def _stored(line: Line) -> int:
    """Bytes of all storages of a line, and of the pool that it shares on the host fabric."""
    shared = shared_of(line.runtime)
    return storage_bytes(line.tensors(), shared.pool_at) + shared.pool


def pool_of(line: Line) -> dict[str, Any] | None:
    """Line D's symmetric pool beside its plan: bytes of the segment and by kind, and what the
    buffers would take if none shared memory. None on lines that have none; ``open`` says whether a
    line that should have one does, ``notes`` why not.
    """
    runtime = line.runtime
    if line.case.transport != "ready":
        return None
    notes = runtime.notes()
    opened = runtime.opened if isinstance(runtime, Runtime) else None
    if opened is None:
        return {"open": False, "notes": notes}
    plan, shared = opened.plan, shared_of(runtime)
    return {
        "open": True,
        "notes": notes,
        "bytes": shared.pool,
        "plan_bytes": plan.total,
        "by_kind": plan.nbytes,
        "unshared_bytes": sum(plan.sizes.values()) + plan.nbytes["windows"],
        "own_windows_bytes": shared.sharded,
        "control_bytes": shared.control,
        "groups_left_out": sorted(runtime.left_out_of_pool()),
    }
