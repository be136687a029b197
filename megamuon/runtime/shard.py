"""The public way in: shard a model over its owners.

Owns ``shard`` and the construction of a ``Runtime``: parameters are collected, planned, placed in
layer groups, filled and hooked. Invariant: everything that decides where a byte lives is derived
from the logical parameters and the plan, both equal on all ranks, and compared before training
starts. Tested by the equivalence tests and ``tests/distributed/test_runtime_rules.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.collectives import build_transport
from megamuon.matrices import Layout, LogicalParameter, Route, RouteFunction, collect
from megamuon.optim.adamw import AdamW, Sgd, SgdConfig
from megamuon.optim.muon import Muon
from megamuon.optim.optimizer import OwnerOptimizer
from megamuon.ownership.plan import OwnershipPlan
from megamuon.ownership.planner import build_plan, muon_shapes
from megamuon.ownership.settings import Topology
from megamuon.ownership.units import build_units
from megamuon.runtime import hooks
from megamuon.runtime.agreement import exchange_plan, exchange_settings, integers_of_rank_zero
from megamuon.runtime.config import OptimizerSettings, RuntimeConfig
from megamuon.runtime.engine import Engine
from megamuon.runtime.layer_group import ROOT_GROUP, LayerGroup
from megamuon.runtime.measure import cost_function
from megamuon.runtime.runtime import Runtime
from megamuon.runtime.step import OwnerStep

Fill = Callable[[str, Tensor, torch.Generator], None]


def shard(
    model: nn.Module,
    *,
    layers: Sequence[type[nn.Module]],
    config: RuntimeConfig | None = None,
    route: RouteFunction | None = None,
    initial: Fill | None = None,
    plan: OwnershipPlan | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Runtime:
    """Shard ``model`` over the ranks of ``process_group`` (default: all) with one owner per matrix.

    ``layers``: classes whose outermost instances become layer groups.  ``route(name, parameter,
    module)`` may send a parameter elsewhere than its module declares.  ``initial(name, whole
    tensor, generator)`` fills the weights, each from a generator of its own, so that they do not
    depend on the ranks; without it the model's present weights are taken, and it must not be on
    the meta device.  ``plan`` is a stored plan: it is reused if it is for these parameters,
    routes, ranks and planner settings, and a new one is made if not.

    Works without a process group as one rank. Raises RoutingError, PlanMismatchError and
    ValueError.
    """
    hooks.check_hook_contract()
    config = config or RuntimeConfig()
    device = device or _device_of(model)
    group = process_group
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    matrices_to = Route.MUON if config.optimizer.matrices == "muon" else Route.ADAMW_OWNER
    parameters = collect(
        model,
        layers=layers,
        route=route,
        matrices_to=matrices_to,
        owner_layout=config.owner_layout,
    )
    exchange_settings(_agreed_settings(config, parameters, plan), group)
    plan = _plan(parameters, plan, config, world, device, group)
    exchange_plan(plan, group)
    tensors = _parameters_by_name(model, parameters)
    groups = _build_groups(plan, rank, config, device)
    _fill_masters(groups, tensors, config, initial)
    _place_parameters(model, groups, tensors)
    engine = _build_engine(groups, config, group, device, _kept_groups(groups))
    _attach(engine, model, groups, layers)
    step = OwnerStep(
        groups,
        _optimizers(config.optimizer),
        group=group if world > 1 else None,
        clip=config.optimizer.clip,
        decays=config.optimizer.decays,
        count_zeros=config.optimizer.count_zeros,
    )
    return Runtime(
        model=model, plan=plan, rank=rank, config=config, groups=groups, engine=engine, step=step
    )


def _device_of(model: nn.Module) -> torch.device:
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _plan(
    parameters: tuple[LogicalParameter, ...],
    stored: OwnershipPlan | None,
    config: RuntimeConfig,
    world: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> OwnershipPlan:
    topology = Topology(rows=1, columns=world)
    planner = replace(config.planner, bytes_per_element=config.compute_dtype.itemsize)
    if planner.policy == "lpt" and not muon_shapes(parameters):
        # Without Newton-Schulz every unit costs nothing and time cannot tell ranks apart.
        planner = replace(planner, policy="numel")
    if stored is not None:
        units = build_units(
            parameters, threshold=config.unit_threshold, merge_experts=config.merge_experts
        )
        wanted = (topology, parameters, planner, units)
        # All but the costs: measured again they would differ a little, and owners with them.
        if wanted == (stored.topology, stored.parameters, stored.settings, stored.units):
            return stored
    return build_plan(
        parameters,
        topology,
        cost_function(parameters, config, device, group),
        planner,
        threshold=config.unit_threshold,
        merge_experts=config.merge_experts,
    )


def _agreed_settings(
    config: RuntimeConfig,
    parameters: tuple[LogicalParameter, ...],
    stored: OwnershipPlan | None,
) -> dict[str, str]:
    """What must be equal beside the plan: all that decides which collectives run, their order, size
    and dtype, and the optimizers' formulas.
    """
    settings = {
        "parameters": hashlib.sha256(repr(parameters).encode()).hexdigest()[:16],
        "stored_plan": "none" if stored is None else stored.digest[:16],
        "ns_cost": config.ns_cost,
        "zero_stage": str(config.zero_stage),
        "collectives": config.collectives,
        "compute": str(config.compute_dtype),
        "reduce": str(config.reduce_dtype),
        "master": str(config.master_dtype),
        "seed": str(config.seed),
    }
    optimizer = config.optimizer
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        parts = fields(value) if is_dataclass(value) else ()
        settings |= {
            f"{field.name}.{part.name}": repr(getattr(value, part.name)) for part in parts
        } or {field.name: repr(value)}
    return settings


def _parameters_by_name(
    model: nn.Module, parameters: Sequence[LogicalParameter]
) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {parameter.name: named[parameter.name] for parameter in parameters}


def group_names(parameters: Sequence[LogicalParameter]) -> dict[str, list[LogicalParameter]]:
    """Parameters by layer group: the root's loose ones, then layers, token tables and heads as
    registered.
    """
    names: dict[str, list[LogicalParameter]] = {ROOT_GROUP: []}
    for parameter in parameters:
        key = parameter.layer
        if not key and parameter.layout is Layout.EVEN and len(parameter.shape) > 1:
            key = f"table:{parameter.name}"
        names.setdefault(key, []).append(parameter)
    return {name: members for name, members in names.items() if members}


def _build_groups(
    plan: OwnershipPlan, rank: int, config: RuntimeConfig, device: torch.device
) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(
            index=index,
            name=name,
            parameters=members,
            plan=plan,
            rank=rank,
            compute_dtype=config.compute_dtype,
            master_dtype=config.master_dtype,
            device=device,
        )
        for index, (name, members) in enumerate(group_names(plan.parameters).items())
    )


def parameter_seed(seed: int, name: str) -> int:
    """Seed of one parameter's initial values: a function of its name, so no layout can change
    it.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _fill_masters(
    groups: Sequence[LayerGroup],
    tensors: dict[str, nn.Parameter],
    config: RuntimeConfig,
    initial: Fill | None,
) -> None:
    """Write the local segments; a whole parameter exists only while its segments are cut from
    it.
    """
    for group in groups:
        for segment in group.local:
            name, shape = segment.parameter.name, segment.parameter.shape
            present = tensors[name]
            if initial is not None:
                whole = torch.empty(shape, dtype=config.master_dtype)
                initial(
                    name, whole, torch.Generator().manual_seed(parameter_seed(config.seed, name))
                )
            elif present.is_meta:
                raise ValueError(f"{name} is on the meta device: pass initial= to fill it")
            else:
                whole = present.detach()
            segment.master.copy_(whole.reshape(-1)[segment.start : segment.stop])


def _place_parameters(
    model: nn.Module, groups: Sequence[LayerGroup], tensors: dict[str, nn.Parameter]
) -> None:
    """Replace every parameter, under all of its names, by a view of its group's buffer."""
    views: dict[int, nn.Parameter] = {}
    for group in groups:
        for parameter in group.parameters:
            view = group.weights.view(parameter.name, parameter.shape)
            old = tensors[parameter.name]
            new = nn.Parameter(view, requires_grad=parameter.trainable)
            new.__dict__.update(old.__dict__)
            views[id(old)] = new
            tensors[parameter.name] = new
    for module in model.modules():
        for attribute, old in module._parameters.items():
            if old is not None and id(old) in views:
                module._parameters[attribute] = views[id(old)]


def _kept_groups(groups: Sequence[LayerGroup]) -> set[int]:
    """The root's loose parameters, and token tables that are tied to a head."""
    return {
        g.index
        for g in groups
        if g.name == ROOT_GROUP or (g.name.startswith("table:") and g.parameters[0].aliases)
    }


def _build_engine(
    groups: Sequence[LayerGroup],
    config: RuntimeConfig,
    group: dist.ProcessGroup | None,
    device: torch.device,
    kept: set[int],
) -> Engine:
    ranks = dist.get_process_group_ranks(group) if group is not None else []
    gather_group = reduce_group = None
    if len(ranks) > 1:
        gather_group, reduce_group = dist.new_group(ranks), dist.new_group(ranks)
    transport = build_transport(
        config.collectives,
        gather_group=gather_group,
        reduce_group=reduce_group,
        wire_dtype=config.reduce_dtype,
    )
    return Engine(
        groups,
        transport,
        zero_stage=config.zero_stage,
        kept=kept,
        agree=lambda values: integers_of_rank_zero(values, gather_group, device),
    )


def _attach(
    engine: Engine,
    model: nn.Module,
    groups: Sequence[LayerGroup],
    layers: Sequence[type[nn.Module]],
) -> None:
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
        group.install(parameters, engine.need_backward)
        using = [m for p in parameters.values() for m in owners[id(p)]]
        holders.extend(using)
        if group.name == ROOT_GROUP:
            modules: list[nn.Module] = [model]
        elif group.name.startswith("table:"):
            modules = list(dict.fromkeys(using))
        else:
            layer = model.get_submodule(group.name)
            inside = set(layer.modules())
            # Modules elsewhere that share a weight with the layer compute without calling it.
            modules = [layer, *(m for m in dict.fromkeys(using) if m not in inside)]
        hooks.attach_group(engine, group, modules)
        hooks.attach_parameters(engine, group, parameters)
    hooks.attach_root_end(engine, model)
    hooks.guard_state_dict(list(dict.fromkeys([model, *holders])))


def _optimizers(settings: OptimizerSettings) -> dict[Route, OwnerOptimizer]:
    elementwise: OwnerOptimizer
    if settings.matrices == "sgd":
        elementwise = Sgd(SgdConfig(momentum=settings.sgd_momentum))
    else:
        elementwise = AdamW(settings.adamw)
    return {
        Route.MUON: Muon(settings.muon),
        Route.ADAMW_OWNER: elementwise,
        Route.ADAMW_SHARDED: elementwise,
    }
