"""Line A: a model under torch's FSDP2 with AdamW, behind the interface of the owner runtime.

Owns ``fully_shard_model``, the second public way in (line A).
Invariants: initial weights, updates, results and stored state are those of ``shard`` with AdamW
(names, whole shapes, dtypes), so that training, checkpoints and comparisons use either; sharding,
gathers and reductions are FSDP2's alone. Tested by ``tests/distributed/test_fully_sharded.py``.

What FSDP2 asks for beyond the owner runtime: all data-parallel ranks use the same parameters in a
backward pass (a branch that one rank skips stops the run); a layer's outputs show their tensors to
``torch.utils._pytree`` at ZeRO-3; no weight is shared by layers alone; no parameter is 0-d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from megamuon import mesh as grid
from megamuon.baselines.fully_sharded_build import (
    device_mesh,
    exchange,
    guard,
    pieces_of,
    plan_of,
    present,
    wrap,
)
from megamuon.baselines.fully_sharded_runtime import FullyShardedRuntime
from megamuon.baselines.fully_sharded_step import FullyShardedStep
from megamuon.baselines.fully_sharded_traffic import count_traffic
from megamuon.collectives.traffic import Traffic
from megamuon.mesh import Mesh
from megamuon.placements import Axis, Placed
from megamuon.runtime.assembly import device_of
from megamuon.runtime.config import OptimizerSettings, RuntimeConfig
from megamuon.runtime.exchange import build_exchange, moves_along
from megamuon.runtime.initial import CheckedFill, Fill, check_present_weights, weights_from
from megamuon.runtime.module_buffers import ModuleBuffers


def fully_shard_model(
    model: nn.Module,
    *,
    layers: Sequence[type[nn.Module]],
    config: RuntimeConfig,
    mesh: Mesh | None = None,
    placements: Mapping[str, Placed] | None = None,
    initial: Fill | None = None,
    device: torch.device | None = None,
) -> FullyShardedRuntime:
    """Put ``model`` under ``fully_shard``: one FSDP2 group per layer, per untied token table and
    head, and one for the rest.

    ``mesh``: the grid of all ranks (default: one replica of them); more than one replica is FSDP2's
    hybrid sharding. ``layers``, ``initial`` as for ``shard``; ``placements`` say what part of the
    whole parameters the modules hold on this tensor-parallel rank. ``config.zero_stage`` 2 keeps
    gathered weights from forward to backward, 3 gathers twice; settings of owners and transports
    are not used.

    Without a process group, one of this process alone is started; ``close`` ends it. Raises
    RoutingError, PlanMismatchError, and ValueError for another optimizer than AdamW and SGD, for
    another ZeRO stage, and for what FSDP2 cannot shard.
    """
    _check_optimizer(config.optimizer)
    if config.zero_stage not in (2, 3):
        raise ValueError(f"zero_stage={config.zero_stage}: line A shards parameters, choose 2 or 3")
    device = device or (mesh.device if mesh is not None else device_of(model))
    alone = not dist.is_initialized()
    mesh = _checked(mesh or _one_replica(device))
    if alone:
        grid.initialise(mesh)
    try:
        return _build(model, layers, config, mesh, placements, initial, alone)
    except BaseException:
        if alone:
            grid.destroy()
        raise


def _build(
    model: nn.Module,
    layers: Sequence[type[nn.Module]],
    config: RuntimeConfig,
    mesh: Mesh,
    placements: Mapping[str, Placed] | None,
    initial: Fill | None,
    owns_process_group: bool,
) -> FullyShardedRuntime:
    plan = plan_of(model, layers, config, mesh, placements)
    buffers, held = ModuleBuffers(model), present(model, plan.parameters)
    exchange(
        config,
        plan,
        dist.group.WORLD,
        {**buffers.texts(), "weights": weights_from(held, initial)},
    )
    buffers.prepare(mesh=mesh, group=dist.group.WORLD, device=mesh.device)
    if initial is None:
        check_present_weights(held, plan.parameters, mesh, dist.group.WORLD, mesh.device)
    else:
        initial = filled = CheckedFill(initial)
    grids = device_mesh(mesh)
    tensors, modules = wrap(model, layers, plan.parameters, config, mesh, grids, initial)
    if initial is not None:
        filled.check(plan.parameters, mesh, dist.group.WORLD, mesh.device)
    traffic = Traffic()
    count_traffic(modules, traffic, mesh.replicas)
    tp_group = grids["tp"].get_group() if mesh.tp > 1 else None
    runtime = FullyShardedRuntime(
        model=model,
        plan=plan,
        config=config,
        mesh=mesh,
        shard_group=grids["shard"].get_group(),
        exchange=build_exchange(mesh, moves_along(Axis.TP, tp_group, traffic), mesh.device),
        modules=modules,
        step=FullyShardedStep(
            pieces_of(plan, tensors, mesh),
            config.optimizer.elementwise_optimizer(),
            mesh=mesh,
            world=dist.group.WORLD,
            tp_group=tp_group,
            settings=config.optimizer,
            traffic=traffic,
        ),
        world=dist.group.WORLD,
        traffic=traffic,
        buffers=buffers,
        owns_process_group=owns_process_group,
    )
    guard(model, runtime.clear_gradients)
    return runtime


def _check_optimizer(settings: OptimizerSettings) -> None:
    if settings.whole_matrices:
        raise ValueError(
            f"optimizer.matrices={settings.matrices!r}: line A trains with AdamW (or SGD); choose"
            " adam or sgd, or a line that keeps matrices whole"
        )


def _ranks() -> tuple[int, int]:
    """This rank, and how many there are."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _one_replica(device: torch.device) -> Mesh:
    rank, world = _ranks()
    return Mesh(
        world_size=world,
        rank=rank,
        local_rank=device.index or 0,
        replicas=1,
        shards=world,
        device=device,
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
    )


def _checked(mesh: Mesh) -> Mesh:
    if (mesh.rank, mesh.world_size) != _ranks():
        rank, world = _ranks()
        raise ValueError(
            f"the mesh places rank {mesh.rank} of {mesh.world_size}, but this is rank {rank} of"
            f" {world}"
        )
    return mesh
