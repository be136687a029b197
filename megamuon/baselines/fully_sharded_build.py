"""Construction of a model under FSDP2: mesh, initial weights, ``fully_shard`` per group.

Owns the construction of ``FullyShardedRuntime``. Invariants: whole weights exist for one FSDP2
group at a time; the initial weights are those of ``shard``, whatever the ranks; ranks that disagree
stop with a message before the first collective of FSDP2. Tested by
``tests/distributed/test_fully_sharded.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megamuon.agreement import exchange_plan, exchange_settings
from megamuon.baselines.fully_sharded_step import ShardedPiece
from megamuon.matrices import (
    Kind,
    LogicalParameter,
    Route,
    collect,
    layer_paths,
)
from megamuon.mesh import Mesh
from megamuon.ownership.cost import closed_form_cost
from megamuon.ownership.groups import group_of
from megamuon.ownership.holdings import speaks
from megamuon.ownership.plan import OwnershipPlan
from megamuon.ownership.planner import build_plan
from megamuon.ownership.settings import Topology
from megamuon.placements import Placed
from megamuon.runtime.config import RuntimeConfig, config_texts
from megamuon.runtime.initial import Fill, parameter_seed
from megamuon.runtime.released import COPY, PLACE, ReleasedWeightError, refuse

Holders = dict[
    str, list[tuple[nn.Module, str]]
]  # parameter -> (module, attribute) of all its names


def plan_of(
    model: nn.Module,
    layers: Sequence[type[nn.Module]],
    config: RuntimeConfig,
    mesh: Mesh,
    placements: Mapping[str, Placed] | None,
) -> OwnershipPlan:
    """Every parameter in even slices of dim 0, which is FSDP2's ``Shard(0)``.

    Raises RoutingError, and ValueError that names 0-d parameters.
    """
    parameters = collect(
        model,
        layers=layers,
        matrices_to=Route.ADAMW_OWNER,
        owner_layout=False,
        placements=placements,
    )
    scalars = [p.name for p in parameters if not p.shape]
    if scalars:
        raise ValueError(f"FSDP2 cannot shard 0-d parameters: {', '.join(scalars)}; make them 1-D")
    settings = replace(config.planner, bytes_per_element=config.compute_dtype.itemsize)
    topology = Topology(replicas=mesh.replicas, shards=mesh.shards, tp=mesh.tp)
    return build_plan(parameters, topology, closed_form_cost(None), settings)


def exchange(
    config: RuntimeConfig,
    plan: OwnershipPlan,
    group: dist.ProcessGroup,
    more: Mapping[str, str],
) -> None:
    """Compare settings, ``more`` among them, and plan over all ranks. Raises PlanMismatchError."""
    settings = {
        "line": "A",
        "parameters": hashlib.sha256(repr(plan.parameters).encode()).hexdigest()[:16],
    }
    exchange_settings(settings | config_texts(config) | dict(more), group)
    exchange_plan(plan, group)


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """``mesh`` as torch's, with the axes replicate, shard and tp; an axis of size 1 is left out,
    but for shard.  A collective.
    """
    sizes = {"replicate": mesh.replicas, "shard": mesh.shards, "tp": mesh.tp}
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(mesh.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def pieces_of(
    plan: OwnershipPlan, tensors: Mapping[str, DTensor], mesh: Mesh
) -> tuple[ShardedPiece, ...]:
    """What FSDP2 left on this rank of each parameter, in the order of the plan."""
    pieces = []
    for parameter in plan.parameters:
        rows = parameter.piece_shape(mesh.tp_rank)[0]
        share = -(-rows // mesh.shards)
        pieces.append(
            ShardedPiece(
                parameter=parameter,
                tensor=tensors[parameter.name],
                first_row=min(mesh.shard * share, rows),
                tp_rank=mesh.tp_rank,
                counts=speaks(parameter.storage, mesh.coordinates),
            )
        )
    return tuple(pieces)


def wrap(
    model: nn.Module,
    layers: Sequence[type[nn.Module]],
    parameters: Sequence[LogicalParameter],
    config: RuntimeConfig,
    mesh: Mesh,
    grids: DeviceMesh,
    initial: Fill | None,
) -> tuple[dict[str, DTensor], tuple[FSDPModule, ...]]:
    """Fill the weights and apply ``fully_shard``, group by group, the root last.

    Returns the sharded parameters by canonical name, and the modules of the groups. Raises
    ValueError for a weight that only layers share, and where weights are to be taken from the meta
    device.
    """
    data = grids["replicate", "shard"] if mesh.replicas > 1 else grids["shard"]
    holders = _holders(model, parameters)
    # Before FSDP2's own hook, which warns of an output that is a view.
    model.register_forward_hook(_without_views)
    modules = []
    for path, members in _groups(model, layers, parameters).items():
        for parameter in members:
            _fill(parameter, holders[parameter.name], config, mesh, initial)
        module = model.get_submodule(path)
        mine = {_held(holders[parameter.name]) for parameter in members}
        key = group_of(members[0]) if members else None
        wrapped = fully_shard(
            module,
            mesh=data,
            reshard_after_forward=bool(path and key and not key.kept) and config.zero_stage == 3,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=config.dtypes_of(key.dtype if key else "")[0],
                reduce_dtype=config.reduce_dtype,
                # As in the owner runtime, the model decides the dtype of what is no parameter.
                cast_forward_inputs=False,
            ),
            # Weights that the group shares with modules outside are the root's.
            ignored_params={p for p in module.parameters() if p not in mine} if path else None,
        )
        modules.append(wrapped)
    return {p.name: _sharded(p.name, holders[p.name]) for p in parameters}, tuple(modules)


def _without_views(_: nn.Module, args: object, output: object) -> object:
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def guard(model: nn.Module, clear: Callable[[], None]) -> None:
    """Refuse what would lose values without an error: whole tensors as a state dict, copies,
    another place. Other reads, writes and state dicts of DTensors are torch's own and work.
    ``model.zero_grad()`` becomes ``clear``.
    """

    def check(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for attribute, parameter in module._parameters.items():
            given = state_dict.get(prefix + attribute)
            if isinstance(given, Tensor) and type(given) is not type(parameter.data):
                raise ReleasedWeightError(
                    f"load_state_dict() with whole tensors ({prefix}{attribute}): the weights of"
                    " this model are sharded; use runtime.load_parameters(state_dict)"
                )

    for module in model.modules():
        if module._parameters:
            module.register_load_state_dict_pre_hook(check)
        if module._parameters or isinstance(module, FSDPModule):
            vars(module)["__deepcopy__"] = refuse("deepcopy", COPY)
            vars(module)["__reduce_ex__"] = refuse("pickling", COPY)
        vars(module)["_apply"] = refuse("to(), half(), cuda() and the like", PLACE)
    vars(model)["zero_grad"] = lambda set_to_none=True: clear()


def present(model: nn.Module, parameters: Sequence[LogicalParameter]) -> dict[str, nn.Parameter]:
    """The parameters that the model has now, by canonical name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {parameter.name: named[parameter.name] for parameter in parameters}


def _holders(model: nn.Module, parameters: Sequence[LogicalParameter]) -> Holders:
    holders: Holders = {}
    for parameter in parameters:
        for name in (parameter.name, *parameter.aliases):
            path, _, attribute = name.rpartition(".")
            holders.setdefault(parameter.name, []).append((model.get_submodule(path), attribute))
    return holders


def _held(places: Sequence[tuple[nn.Module, str]]) -> nn.Parameter:
    module, attribute = places[0]
    return module.get_parameter(attribute)


def _sharded(name: str, places: Sequence[tuple[nn.Module, str]]) -> DTensor:
    held = _held(places)
    if not isinstance(held, DTensor):
        raise ValueError(f"{name}: fully_shard left a {type(held).__name__}, not a DTensor")
    return held


def _groups(
    model: nn.Module,
    layers: Sequence[type[nn.Module]],
    parameters: Sequence[LogicalParameter],
) -> dict[str, list[LogicalParameter]]:
    """Parameters by the path of the module that is wrapped for them: modules with a dtype of their
    own, which may lie inside layers, layers, token tables and heads that are not shared, and the
    root ("") for the rest, last.
    """
    paths = [path for path in layer_paths(model, layers) if path]
    groups: dict[str, list[LogicalParameter]] = {path: [] for path in paths}
    inside: dict[str, str] = {}
    for parameter in parameters:
        found = {_layer_of(name, paths) for name in (parameter.name, *parameter.aliases)}
        if len(found) > 1 and "" not in found:
            raise ValueError(
                f"{parameter.name} is shared by the layers {', '.join(sorted(found))} alone: FSDP2"
                " has no group for it; share it with a module outside of the layers too, or give"
                " each layer its own"
            )
        inside[parameter.name] = found.pop() if len(found) == 1 else ""
    tables = {
        _module_of(parameter)
        for parameter in parameters
        if parameter.kind in (Kind.EMBEDDING, Kind.HEAD)
        and not (inside[parameter.name] or parameter.aliases)
        and not list(model.get_submodule(_module_of(parameter)).children())
    }
    rest: list[LogicalParameter] = []
    islands: dict[str, list[LogicalParameter]] = {}
    for parameter in parameters:
        path, module = inside[parameter.name], _module_of(parameter)
        if parameter.dtype and (island := _island(model, module, path)) not in ("", path):
            islands.setdefault(island, []).append(parameter)
            continue
        if not path and not parameter.aliases and module in tables:
            path = module
        (groups.setdefault(path, []) if path else rest).append(parameter)
    return {**islands, **groups, "": rest}


def _island(model: nn.Module, module: str, layer: str) -> str:
    """Path of the outermost module around ``module``, inside ``layer``, that declares a dtype."""
    steps = module.split(".")
    paths = (".".join(steps[: end + 1]) for end in range(len(steps)))
    inner = (
        path for path in paths if path == layer or path.startswith(f"{layer}." if layer else "")
    )
    declared = (p for p in inner if getattr(model.get_submodule(p), "logical_dtype", None))
    return next(declared, layer)


def _layer_of(name: str, paths: Sequence[str]) -> str:
    return next((path for path in paths if name.startswith(f"{path}.")), "")


def _module_of(parameter: LogicalParameter) -> str:
    return parameter.name.rpartition(".")[0]


def _fill(
    parameter: LogicalParameter,
    places: Sequence[tuple[nn.Module, str]],
    config: RuntimeConfig,
    mesh: Mesh,
    initial: Fill | None,
) -> None:
    """Replace a parameter, under all of its names, by this tensor-parallel rank's piece of its
    initial values in the master dtype.
    """
    old = _held(places)
    if initial is not None:
        whole = torch.empty(parameter.shape, dtype=config.master_dtype)
        seed = parameter_seed(config.seed, parameter.name)
        initial(parameter.name, whole, torch.Generator().manual_seed(seed))
        piece = whole[parameter.piece(mesh.tp_rank).slices]
    else:
        piece = old.detach()
    value = piece.to(mesh.device, config.master_dtype).contiguous()
    new = nn.Parameter(value, requires_grad=parameter.trainable)
    new.__dict__.update(old.__dict__)
    for module, attribute in places:
        module._parameters[attribute] = new
