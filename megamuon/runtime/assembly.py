"""Construction of a runtime's parts: process groups, transport, engine, step.

Owns the process groups of a runtime and the choice of what each part is made of: transport,
reduction, publication, optimizers, engine and step. Invariant: all ranks make the same process
groups in the same order, whatever their place; each kind of traffic has a communicator of its own,
because their orders may interleave differently from rank to rank. Tested by the equivalence tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megamuon.agreement import WorldAgreement
from megamuon.collectives import (
    Transport,
    TransportSettings,
    TwoStageReducer,
    build_transport,
)
from megamuon.collectives.base import Reducer
from megamuon.collectives.call_check import CallCheck
from megamuon.collectives.operator_settings import OperatorGrid, ReadySettings
from megamuon.collectives.traffic import Traffic
from megamuon.mesh import Mesh, new_group
from megamuon.ownership.plan import OwnershipPlan
from megamuon.ownership.update_plan import UpdatePlan, compile_update, matrices_of
from megamuon.placements import Axis
from megamuon.runtime.config import RuntimeConfig
from megamuon.runtime.engine import Engine
from megamuon.runtime.exchange import Exchange, build_exchange, moves_along, sum_in_order
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.matrix_update import MatrixUpdate
from megamuon.runtime.owner_step import OwnerStep
from megamuon.runtime.publication import Publication, rails, sent_dtypes
from megamuon.runtime.reductions import Reductions
from megamuon.runtime.rounds import Rounds


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The mesh and the process group under it."""

    mesh: Mesh
    world: dist.ProcessGroup | None  # None: one rank

    @staticmethod
    def of(mesh: Mesh | None, group: dist.ProcessGroup | None, device: torch.device) -> Grid:
        """The grid of ``mesh``, or one replica of all ranks of ``group``.

        Raises ValueError where the mesh is not for as many ranks as the group has.
        """
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        if mesh is None:
            mesh = Mesh(
                world_size=world,
                rank=rank,
                local_rank=rank,
                replicas=1,
                shards=world,
                device=device,
                backend=dist.get_backend(group) if group else "none",
            )
        if (mesh.world_size, mesh.rank) != (world, rank):
            raise ValueError(
                f"the mesh places rank {mesh.rank} of {mesh.world_size}, but this is rank {rank} of"
                f" {world}"
            )
        return Grid(mesh=mesh, world=group if world > 1 else None)

    def new_group(self, axis: str) -> dist.ProcessGroup | None:
        """A fresh communicator along ``axis``; every rank calls this in the same order."""
        if self.world is None:
            return None
        return new_group(self.mesh, axis, ranks=dist.get_process_group_ranks(self.world))


def device_of(model: nn.Module) -> torch.device:
    """Where a model trains: where it is, or from the meta device on the GPU if there is one."""
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a runtime is made of."""

    engine: Engine
    step: OwnerStep
    exchange: Exchange
    publication: Publication | None
    transport: Transport


def build_parts(
    groups: Sequence[LayerGroup],
    plan: OwnershipPlan,
    grid: Grid,
    config: RuntimeConfig,
    device: torch.device,
) -> Parts:
    """All parts for ``groups``.  A collective: it makes process groups."""
    mesh, traffic = grid.mesh, Traffic()
    transport, reducer = _transports(groups, plan, grid, config, device, traffic)
    publication = None
    publish_group = grid.new_group("replicate")
    if mesh.replicas > 1:
        publication = Publication(
            groups,
            plan,
            mesh,
            replicate_group=publish_group,
            device=device,
            traffic=traffic,
            synchronous=config.publish == "sync",
            fabric=transport.fabric,
        )
    gradient_group = grid.new_group("tp")
    updates = update_plans(groups, plan, config)
    # Moves along shard have their place in the order of the gathers, so they share a communicator.
    moves = {Axis.SHARD: transport} | moves_along(Axis.TP, grid.new_group("tp"), traffic)
    if any(Axis.REPLICATE in update.axes for update in updates):
        moves |= moves_along(Axis.REPLICATE, grid.new_group("replicate"), traffic)
    exchange = build_exchange(mesh, moves, device)
    names, checked = [group.name for group in groups], config.check_collective_order
    reductions = Reductions(
        reducer.reduce,
        schedule=config.schedule,
        several_replicas=mesh.replicas > 1,
        divisor=mesh.sample_ranks,
        sum_over_tp=(lambda parts: sum_in_order(parts, gradient_group, traffic))
        if mesh.tp > 1
        else None,
        check=CallCheck("reduction", transport.reduce_group, names) if checked else None,
    )
    shard_group = transport.gather_group  # the rounds have their place in the order of the gathers
    engine = Engine(
        groups,
        transport,
        reductions=reductions,
        zero_stage=config.zero_stage,
        kept={group.index for group in groups if group.key.kept},
        agreement=WorldAgreement(group=grid.world, device=device),
        rounds=Rounds(shard_group, len(groups), traffic) if shard_group is not None else None,
        publication=publication,
        check=CallCheck("gather", transport.gather_group, names) if checked else None,
    )
    matrices = None
    if config.optimizer.whole_matrices:
        matrices = MatrixUpdate(
            groups,
            updates,
            config.optimizer.matrix_optimizer(),
            exchange=exchange,
            dtype=config.master_dtype,
            device=device,
        )
    step = OwnerStep(
        groups,
        config.optimizer.elementwise_optimizer(),
        mesh=mesh,
        group=grid.world,
        clip=config.optimizer.clip,
        decays=config.optimizer.decays,
        count_zeros=config.optimizer.count_zeros,
        matrices=matrices,
        publication=publication,
        traffic=traffic,
        riders=engine,
    )
    return Parts(
        engine=engine,
        step=step,
        exchange=exchange,
        publication=publication,
        transport=transport,
    )


def update_plans(
    groups: Sequence[LayerGroup], plan: OwnershipPlan, config: RuntimeConfig
) -> list[UpdatePlan]:
    """The moves of each group's matrices; empty where no optimizer needs them whole."""
    if not config.optimizer.whole_matrices:
        return []
    sizes, dtype = plan.topology.sizes, config.master_dtype
    return [compile_update(matrices_of(group.trainable), sizes, dtype) for group in groups]


def _transports(
    groups: Sequence[LayerGroup],
    plan: OwnershipPlan,
    grid: Grid,
    config: RuntimeConfig,
    device: torch.device,
    traffic: Traffic,
) -> tuple[Transport, Reducer]:
    """What gathers and what reduces."""
    mesh = grid.mesh
    ready = ReadySettings(
        slots=config.ring_slots,
        chunk_bytes=config.chunk_bytes,
        tile_bytes=config.publish_tile_bytes,
        deadline=config.collective_deadline,
    )
    transport = build_transport(
        config.collectives,
        TransportSettings(
            gather_group=grid.new_group("shard"),
            reduce_group=grid.new_group("shard"),
            wire_dtype=config.reduce_dtype,
            traffic=traffic,
            grid=OperatorGrid(
                mesh=mesh,
                device=device,
                fabric=config.fabric,
                settings=ready,
                new_group=lambda: grid.new_group("places"),
                rails=rails(plan, mesh, sent_dtypes(groups), ready.tile_bytes),
            ),
        ),
    )
    transport.check_schedules([t for g in groups for t in (g.gather_table, g.reduce_table.shards)])
    reducer = TwoStageReducer(
        transport,
        grid.new_group("replicate"),
        shard=mesh.shard,
        replica=mesh.replica,
        replicas=mesh.replicas,
        shards=mesh.shards,
        wire_dtype=config.reduce_dtype,
        traffic=traffic,
    )
    return transport, transport.over_grid(reducer)
