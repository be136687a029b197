"""``shard``: builds a runtime over a model, the counterpart of ``fully_shard``.

Owns ``shard`` and the construction of a ``Runtime``: parameters are collected, planned, placed in
layer groups, filled and hooked. Invariant: everything that decides where a byte lives is derived
from the logical parameters and the plan, both equal on all ranks, and compared before training
starts. Tested by the equivalence tests and ``tests/distributed/test_runtime_rules.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.agreement import exchange_plan, exchange_settings
from megamuon.matrices import (
    LogicalParameter,
    Route,
    RouteFunction,
    collect,
)
from megamuon.mesh import Mesh
from megamuon.ownership.groups import GroupKind, grouped
from megamuon.ownership.owners import without_owners
from megamuon.ownership.plan import OwnershipPlan
from megamuon.ownership.planner import build_plan, muon_shapes, planned_units
from megamuon.ownership.settings import Topology
from megamuon.placements import Placed
from megamuon.runtime import hooks
from megamuon.runtime.assembly import Grid, build_parts, device_of
from megamuon.runtime.config import RuntimeConfig, config_texts
from megamuon.runtime.engine import Engine
from megamuon.runtime.initial import (
    CheckedFill,
    Fill,
    check_present_weights,
    parameter_seed,
    weights_from,
)
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.measure import cost_function
from megamuon.runtime.module_buffers import ModuleBuffers
from megamuon.runtime.pool_opener import PoolOpener
from megamuon.runtime.publication import Publication
from megamuon.runtime.released import guard_modules
from megamuon.runtime.runtime import Runtime


def shard(
    model: nn.Module,
    *,
    layers: Sequence[type[nn.Module]],
    config: RuntimeConfig | None = None,
    mesh: Mesh | None = None,
    placements: Mapping[str, Placed] | None = None,
    route: RouteFunction | None = None,
    initial: Fill | None = None,
    plan: OwnershipPlan | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Runtime:
    """Shard ``model`` over a grid of ranks with one owner per matrix.

    ``layers``: classes whose outermost instances become layer groups.  ``mesh``: the grid, replicas
    by shards by tp; without it all ranks of ``process_group`` (default: all there are) form one
    replica. ``placements``: where tensor parallelism has put each parameter of a model that holds
    the pieces of one tp rank (``megamuon.sharding``). ``route(name, parameter, module)`` may send a
    parameter elsewhere than its module declares.  ``initial(name, whole tensor, generator)`` fills
    the weights, each from a generator of its own, so that they do not depend on the ranks; without
    it the model's present weights are taken, and it must not be on the meta device.  Modules that
    say ``logical_dtype = torch.float32`` have weights and gradients in it under a narrower
    ``config.compute_dtype``, and cast what they are given; reductions send ``reduce_dtype`` of
    theirs too.  ``plan`` is a
    stored plan: it is reused if it is for these parameters, routes, ranks and planner settings, and
    a new one is made if not.

    Works without a process group as one rank. Raises RoutingError, PlanMismatchError and
    ValueError.
    """
    hooks.check_hook_contract()
    config = config or RuntimeConfig()
    device = device or device_of(model)
    grid = Grid.of(mesh, process_group, device)
    matrix = config.optimizer.whole_matrices
    parameters = collect(
        model,
        layers=layers,
        route=route,
        matrices_to=Route.MATRIX if matrix else Route.ADAMW_OWNER,
        owner_layout=config.owner_layout,
        gathered_update=config.matrix_update == "gather",
        placements=placements,
    )
    buffers = ModuleBuffers(model)
    settings = _agreed_settings(config, grid.mesh, parameters, plan) | buffers.texts()
    tensors = _parameters_by_name(model, parameters)
    settings |= {"weights": weights_from(tensors, initial)}
    exchange_settings(settings, grid.world)
    plan = _plan(parameters, plan, config, grid, device)
    exchange_plan(plan, grid.world)
    buffers.prepare(mesh=grid.mesh, group=grid.world, device=device)
    if initial is None:
        check_present_weights(tensors, parameters, grid.mesh, grid.world, device)
    else:
        initial = filled = CheckedFill(initial)
    groups = _build_groups(plan, grid.mesh, config, device)
    parts = build_parts(groups, plan, grid, config, device)
    _fill_masters(groups, tensors, config, initial, parts.publication)
    if initial is not None:
        filled.check(parameters, grid.mesh, grid.world, device)
    _place_parameters(model, groups, tensors)
    holders = _attach(parts.engine, model, groups, layers)
    parts.transport.notes[:0] = frozen_note(plan, config)
    runtime = Runtime(
        model=model,
        plan=plan,
        mesh=grid.mesh,
        config=config,
        groups=groups,
        engine=parts.engine,
        step=parts.step,
        exchange=parts.exchange,
        buffers=buffers,
        notes=parts.transport.notes,
    )
    guard_modules(model, holders, runtime.clear_gradients)
    if (fabric := parts.transport.fabric) is not None:
        required = config.fabric != "auto"
        runtime.use_pool(PoolOpener(runtime, parts.transport, fabric, required=required))
    return runtime


def _plan(
    parameters: tuple[LogicalParameter, ...],
    stored: OwnershipPlan | None,
    config: RuntimeConfig,
    grid: Grid,
    device: torch.device,
) -> OwnershipPlan:
    mesh = grid.mesh
    topology = Topology(replicas=mesh.replicas, shards=mesh.shards, tp=mesh.tp)
    planner = replace(config.planner, bytes_per_element=config.sent_dtype.itemsize)
    if planner.policy == "lpt" and not muon_shapes(parameters):
        # Without Newton-Schulz every unit costs nothing and time cannot tell ranks apart.
        planner = replace(planner, policy="numel")
    if stored is not None:
        units = planned_units(parameters, planner, config.unit_threshold, config.merge_experts)
        wanted = (topology, parameters, planner, units)
        asked = without_owners(stored.parameters)
        # All but the costs, which differ a little from one measurement to the next, and the owners,
        # which follow them.
        if wanted == (stored.topology, asked, stored.settings, stored.units):
            return stored
    return build_plan(
        parameters,
        topology,
        cost_function(parameters, config, device, grid.world),
        planner,
        threshold=config.unit_threshold,
        merge_experts=config.merge_experts,
    )


def _agreed_settings(
    config: RuntimeConfig,
    mesh: Mesh,
    parameters: tuple[LogicalParameter, ...],
    stored: OwnershipPlan | None,
) -> dict[str, str]:
    """What must be equal beside the plan: all that decides which collectives run, their order, size
    and dtype, and the optimizers' formulas.
    """
    settings = {
        "parameters": hashlib.sha256(repr(parameters).encode()).hexdigest()[:16],
        "stored_plan": "none" if stored is None else stored.digest[:16],
        "grid": f"{mesh.replicas}x{mesh.shards}x{mesh.tp}",
    }
    return settings | config_texts(config)


def _parameters_by_name(
    model: nn.Module, parameters: Sequence[LogicalParameter]
) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {parameter.name: named[parameter.name] for parameter in parameters}


def _build_groups(
    plan: OwnershipPlan, mesh: Mesh, config: RuntimeConfig, device: torch.device
) -> tuple[LayerGroup, ...]:
    groups = enumerate(grouped(plan.parameters).items())
    return tuple(
        LayerGroup(
            index=index,
            key=key,
            parameters=members,
            plan=plan,
            mesh=mesh,
            dtypes=config.dtypes_of(key.dtype),
            master_dtype=config.master_dtype,
            device=device,
            resident=config.zero_stage == 1,
        )
        for index, (key, members) in groups
    )


def frozen_note(plan: OwnershipPlan, config: RuntimeConfig) -> list[str]:
    """What to tell the user about weights that do not train."""
    frozen = [p for p in plan.parameters if not p.trainable]
    rounded = [p for p in frozen if config.dtypes_of(p.dtype)[1] != config.master_dtype]
    if not rounded:
        return []
    return [
        f"frozen weights: {sum(p.numel for p in rounded):,} elements are kept once, rounded to"
        f" {config.sent_dtype}, without masters"
    ]


def _fill_masters(
    groups: Sequence[LayerGroup],
    tensors: dict[str, nn.Parameter],
    config: RuntimeConfig,
    initial: Fill | None,
    publication: Publication | None,
) -> None:
    """Write the local segments and leader copies; a whole parameter exists only while they are cut
    from it.
    """
    for group in groups:
        segments = {segment.parameter.name: segment for segment in group.local}
        led = {parameter.name for parameter in group.led}
        for parameter in group.parameters:
            name = parameter.name
            if name not in segments and name not in led:
                continue
            values = _initial_piece(parameter, group.tp_rank, tensors[name], config, initial)
            if name in segments:
                segment = segments[name]
                segment.master.copy_(values[segment.start : segment.stop])
            if name in led and publication is not None:
                publication.payload(name).copy_(values)


def _initial_piece(
    parameter: LogicalParameter,
    tp_rank: int,
    present: nn.Parameter,
    config: RuntimeConfig,
    initial: Fill | None,
) -> Tensor:
    """The initial values of this tp rank's piece of a parameter, flat."""
    name = parameter.name
    if initial is not None:
        whole = torch.empty(parameter.shape, dtype=config.master_dtype)
        initial(name, whole, torch.Generator().manual_seed(parameter_seed(config.seed, name)))
        return whole[parameter.piece(tp_rank).slices].reshape(-1)
    return present.detach().reshape(-1)


def _place_parameters(
    model: nn.Module, groups: Sequence[LayerGroup], tensors: dict[str, nn.Parameter]
) -> None:
    """Replace every parameter, under all of its names, by a view of its group's buffer."""
    views: dict[int, nn.Parameter] = {}
    for group in groups:
        for parameter in group.parameters:
            view = group.weights.view(parameter.name, parameter.piece_shape(group.tp_rank))
            old = tensors[parameter.name]
            new = nn.Parameter(view, requires_grad=parameter.trainable)
            new.__dict__.update(old.__dict__)
            views[id(old)] = new
            tensors[parameter.name] = new
    for module in model.modules():
        for attribute, old in module._parameters.items():
            if old is not None and id(old) in views:
                module._parameters[attribute] = views[id(old)]


def _attach(
    engine: Engine,
    model: nn.Module,
    groups: Sequence[LayerGroup],
    layers: Sequence[type[nn.Module]],
) -> list[nn.Module]:
    """All hooks.  Returns the modules that hold parameters."""
    hooks.attach_root(engine, model)
    hooks.route_linears(model)
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(module)
    named = dict(model.named_parameters(remove_duplicate=False))
    holders: list[nn.Module] = []
    for group in groups:
        parameters = {p.name: named[p.name] for p in group.parameters}
        group.install(parameters, engine.need_backward, engine.reductions.before_write)
        using = [m for p in parameters.values() for m in owners[id(p)]]
        holders.extend(using)
        if group.key.kind is GroupKind.ROOT:
            modules: list[nn.Module] = [model]
        elif group.key.kind is GroupKind.TABLE:
            modules = list(dict.fromkeys(using))
        else:
            layer = model.get_submodule(group.key.layer)
            inside = set(layer.modules())
            # Modules elsewhere that share a weight with the layer compute without calling it.
            modules = [layer, *(m for m in dict.fromkeys(using) if m not in inside)]
        hooks.attach_group(engine, group, modules)
        hooks.attach_parameters(engine, group, parameters)
    hooks.attach_root_end(engine, model)
    hooks.attach_guards(engine, model, groups, named)
    return holders
