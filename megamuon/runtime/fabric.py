"""Which fabric moves a runtime's bytes, and the opening of its symmetric pool.

Owns the choice of a fabric, what is said about it, and the hook that opens the pool, freezes all
tables and hands the publish over to its operator. Invariants: all ranks choose alike, because a
fabric is made by all of them together or by none; a fabric that was asked for by name is had or
refused, and only an automatic choice falls back to grouped calls, saying why. Tested by
``tests/distributed/test_ready_training.py`` and ``tests/distributed/test_ready_failures.py``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megamuon.collectives import CollectiveError
from megamuon.collectives.device_fabric import DeviceFabric
from megamuon.collectives.device_library import (
    DeviceLibrary,
    agree_capability,
    environment_problems,
    select_rung,
)
from megamuon.collectives.device_streams import CudaStreams, Streams
from megamuon.collectives.host_fabric import HostFabric
from megamuon.collectives.host_library import CODE_VERSION
from megamuon.collectives.operators import Fabric, ReadySettings, gather_objects
from megamuon.collectives.ready import ReadyReducer, ReadyTransport
from megamuon.matrices import Layout
from megamuon.mesh import Mesh, MeshError, local_world_size
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.agreement import exchange_pool
from megamuon.runtime.config import RuntimeConfig
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.pool import PoolPlan
from megamuon.runtime.pool_opening import PoolRecording
from megamuon.runtime.runtime import Runtime

MIB = 1 << 20
OPERATOR_RUNGS = ("lsa", "multimem")
LOOSE = "loose parameters"  # the name of the group that has none


@dataclass(kw_only=True)
class FabricChoice:
    """A fabric, or why there is none."""

    ready: Fabric | None = None
    reason: str = ""  # why gathers and reductions are grouped calls; "" where they were asked for
    lines: list[str] = field(default_factory=list)  # what to tell the user, in order


def rails(plan: OwnershipPlan, mesh: Mesh, itemsize: int, tile_bytes: int) -> tuple[int, int]:
    """Parameters and publish tiles of the column that has most of each."""
    counts = [[0, 0] for _ in range(mesh.columns)]
    for parameter in plan.parameters:
        if parameter.layout is Layout.OWNER:
            held = counts[plan.topology.column_of(plan.owner_of(parameter.name))]
            held[0] += 1
            held[1] += -(-parameter.piece_numel(mesh.tp_rank) * itemsize // tile_bytes)
    return max(count for count, _ in counts), max(tiles for _, tiles in counts)


def choose_fabric(
    config: RuntimeConfig,
    mesh: Mesh,
    plan: OwnershipPlan,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> FabricChoice:
    """The fabric that ``config`` asks for.  A collective over ``group``, the data-parallel ranks.

    Raises MeshError where ``config.fabric`` names one that cannot be had.
    """
    if config.collectives != "ready":
        return FabricChoice()
    choice = _choose(config, mesh, plan, group, device)
    choice.lines.append(_said(choice))
    return choice


def _choose(
    config: RuntimeConfig,
    mesh: Mesh,
    plan: OwnershipPlan,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> FabricChoice:
    alone = mesh.data_parallel_size == 1
    if config.fabric == "auto" and device.type == "cuda" and not alone:
        return FabricChoice(reason=_unverified(group))
    if alone and (config.fabric != "nccl" or device.type == "cuda"):
        return FabricChoice(reason="one data-parallel rank: nothing moves between ranks")
    settings = ReadySettings(
        slots=config.ring_slots,
        chunk_bytes=config.chunk_bytes,
        tile_bytes=config.publish_tile_bytes,
        deadline=config.collective_deadline,
    )
    of_rails = rails(plan, mesh, config.sent_dtype.itemsize, settings.tile_bytes)
    try:
        if config.fabric == "nccl":
            library, streams = _device_parts(device, group)
            return FabricChoice(
                ready=DeviceFabric(
                    mesh,
                    group,
                    settings,
                    rails=of_rails,
                    library=library,
                    streams=streams,
                    node_size=node_size(mesh),
                )
            )
        if device.type != "cpu":
            raise CollectiveError("the host fabric moves CPU memory, and this run is on GPUs")
        return FabricChoice(ready=HostFabric(mesh, group, settings, rails=of_rails))
    except CollectiveError as error:
        if config.fabric != "auto":
            raise MeshError(
                f"--fabric {config.fabric}: {error}; or use --collectives grouped"
            ) from error
        return FabricChoice(reason=str(error))


def node_size(mesh: Mesh) -> int:
    """Ranks of a row that are on one node, as the launcher says: the row where it fits on a node,
    else the largest part of it that does.
    """
    here = (local_world_size() or mesh.world_size) // mesh.tp
    sizes = (size for size in range(min(here, mesh.columns), 0, -1) if not mesh.columns % size)
    return next(sizes, 1)


def device_parts(device: torch.device) -> tuple[DeviceLibrary, Streams]:
    """What the device operators need of this rank. Raises CollectiveError with all problems."""
    if device.type != "cuda":
        raise CollectiveError("the nccl fabric needs GPUs, and this run is on the CPU")
    if problems := environment_problems(os.environ):
        raise CollectiveError("; ".join(problems))
    return DeviceLibrary(), CudaStreams(device)


def _device_parts(
    device: torch.device, group: dist.ProcessGroup | None
) -> tuple[DeviceLibrary, Streams]:
    """``device_parts`` on every rank, or the same CollectiveError on all."""
    parts, problem = None, ""
    try:
        parts = device_parts(device)
    except CollectiveError as error:
        problem = str(error)
    problems = gather_objects(problem, group)
    found = [rank for rank, text in enumerate(problems) if text]
    if found or parts is None:
        raise CollectiveError(f"rank {found[0]}: {problems[found[0]]}")
    return parts


def _unverified(group: dist.ProcessGroup | None) -> str:
    """Why GPUs do not take the device operators by themselves, and what these ones offer: the
    lowest rung of the capability ladder over all ranks.  A collective over ``group``.
    """
    everyone = gather_objects(select_rung(), group)
    lowest = agree_capability([held.name for held in everyone])
    why = next(held.reason for held in everyone if held.name == lowest)
    agreed = f"the ranks agree on the rung {lowest!r}" + (f": {why}" if why else "")
    if lowest in OPERATOR_RUNGS:
        return (
            "the device operators have not been verified on a GPU, so a run has to ask for them"
            f" with --fabric nccl ({agreed})"
        )
    unused = ", and no transport uses torch's symmetric memory" if lowest == "symmetric" else ""
    return f"the device operators cannot be had here ({agreed}{unused})"


def _said(choice: FabricChoice) -> str:
    """The start-up line about collectives."""
    if choice.ready is None:
        return f"collectives: grouped calls instead of the ready fabric: {choice.reason}"
    return (
        f"collectives: ready on the {choice.ready.label} fabric, {choice.ready.describe()}; grouped"
        " calls until the symmetric pool opens"
    )


class PoolOpener:
    """Opens the pool between two steps, once a micro-batch has been recorded."""

    def __init__(
        self,
        runtime: Runtime,
        choice: FabricChoice,
        reducer: ReadyReducer,
        group: dist.ProcessGroup | None,
        *,
        required: bool,
    ) -> None:
        """``required``: a pool that cannot be had is an error, not a reason to stay grouped."""
        assert choice.ready is not None
        self.runtime, self.choice, self.reducer = runtime, choice, reducer
        self.fabric = choice.ready
        self.group, self.required = group, required
        self.recording = PoolRecording(runtime.engine, group, rows=runtime.mesh.rows)

    def micro_batch_done(self) -> None:
        """See PoolHook."""
        self.recording.micro_batch_done()

    def step_done(self) -> bool:
        """See PoolHook. A collective at the step that opens the pool."""
        if not self.recording.step_done():
            return False
        plan = self.recording.plan()
        self._compare(plan)
        try:
            memory = self.fabric.open(max(plan.total, 1))
        except CollectiveError as error:
            if self.required:
                raise MeshError(f"--fabric {self.fabric.label}: {error}") from error
            self.choice.lines.append(
                f"collectives: grouped calls, the symmetric pool cannot be had: {error}"
            )
            return True
        self.runtime.open_pool(plan, memory)
        transport = self.runtime.engine.transport
        for group in self.runtime.groups:
            if isinstance(transport, ReadyTransport):
                self._refused(transport, group)
            if group.index in plan.windows:
                dtypes = {
                    group.leased[kind].raw.dtype
                    for kind in ("gradients", "accumulated")
                    if (kind, group.index) in plan.offsets
                }
                self.reducer.pool(
                    group.reduce_table,
                    plan.windows[group.index],
                    dtypes,
                    group.window.dtype,
                    name=_name(group),
                )
        self.fabric.upload_tables()
        if self.runtime.engine.publication is not None:
            self.runtime.engine.publication.use_operator(self.runtime.engine.version)
        self.choice.lines.extend(self._report(plan))
        return True

    def _refused(self, transport: ReadyTransport, group: LayerGroup) -> None:
        """Freeze the group's gather, and say so where the operator cannot make it."""
        transport.name_group(group.gather_table, _name(group))
        sent = group.weights if group.sent is None else group.sent
        if reason := transport.refusal(group.gather_table, sent.raw.element_size()):
            self.choice.lines.append(
                f"symmetric pool: gathers of group {_name(group)!r} stay grouped calls: {reason}"
            )

    def _compare(self, plan: PoolPlan) -> None:
        """What the operators are told must be the same everywhere: they trust it from here on.
        Raises PlanMismatchError on all ranks where it is not.
        """
        settings = {name: str(value) for name, value in vars(self.fabric.settings).items()}
        wire = self.reducer.fallback.wire_dtype
        tables = {
            f"tables of {_name(group)!r}": _digest(group, plan, wire)
            for group in self.runtime.groups
        }
        exchange_pool({"code": str(CODE_VERSION), **settings, **tables}, self.group)

    def _report(self, plan: PoolPlan) -> Sequence[str]:
        kinds = ", ".join(
            f"{kind} {nbytes / MIB:.1f}" for kind, nbytes in plan.nbytes.items() if nbytes
        )
        lines = [
            f"symmetric pool open: {plan.total / MIB:.1f} MiB on every rank ({kinds});"
            f" {len(self.runtime.groups) - len(plan.excluded)} of {len(self.runtime.groups)} groups"
        ]
        lines += [
            f"symmetric pool: group {name or LOOSE!r} stays with grouped calls: {reason}"
            for name, reason in self.runtime.left_out_of_pool().items()
        ]
        return lines


def _name(group: LayerGroup) -> str:
    return group.name or LOOSE


def _digest(group: LayerGroup, plan: PoolPlan, wire: torch.dtype) -> str:
    """Of a group's tables, what its buffers hold and where its windows lie: equal on all ranks."""
    facts = (
        group.gather_table.segments,
        group.reduce_table,
        sorted((kind, str(buffer.raw.dtype)) for kind, buffer in group.leased.items()),
        (str(wire), str(group.window.dtype), plan.windows.get(group.index)),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
