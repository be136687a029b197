"""Application of a sharding plan: a model keeps one tp rank's pieces, and boundaries are wrapped.

Owns ``apply_sharding``: it replaces every cut parameter by this rank's piece and wraps the forward
of every boundary module once. Invariants: nothing is planned at a call, the wrapped forwards only
run local code and the collectives of ``boundaries``; model definitions are not touched, tied
parameters stay tied, and random numbers are the same on all ranks where activations are whole and
differ where each rank has its own heads or positions. A wrapped forward lies inside all hooks of
its module, whoever hung them on and when. Source: HyperParallel-FSDP, section 4.2. Tested by
``tests/sharding/test_apply.py`` and ``tests/distributed/test_tensor_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.kernels.linear import linear
from megamuon.placements import Axis, Placement, Shard
from megamuon.sharding import vocabulary
from megamuon.sharding.boundaries import (
    POSITIONS,
    TpAxis,
    check_divides,
    entering,
    gather_vocabulary,
    leaving,
    own_positions,
    replicated_gather,
    replicated_own,
    sum_parts,
)
from megamuon.sharding.roles import Role
from megamuon.sharding.sharding_plan import BoundaryEntry, ShardingPlan
from megamuon.sharding.templates import BoundaryType, Flow, ShardingError

Forward = Callable[..., Any]
_ROW_ROLES = (Role.ATTENTION_OUTPUT, Role.ROW)
_DROPOUTS = ("attention_dropout", "hidden_dropout")


def apply_sharding(
    model: nn.Module, plan: ShardingPlan, *, tp_rank: int, group: dist.ProcessGroup | None
) -> None:
    """Turn the whole ``model`` into what ``tp_rank`` computes, in place; nothing at tp 1.

    Parameters on the meta device stay there; others are copied, so that the whole can be freed.
    A piece keeps its parameter's attributes and says the ``whole_shape``.
    ``group`` is the tp axis, in the order of tp ranks.  Raises ShardingError: a plan of another
    model, a model that has been cut already, a group of another size.
    """
    if plan.tp == 1:
        return
    size = group.size() if group is not None else 1
    if group is None or size != plan.tp or not 0 <= tp_rank < size:
        raise ShardingError(
            f"tp rank {tp_rank} of a group of {size} cannot run a plan for {plan.tp} tp ranks"
        )
    axis = TpAxis(rank=tp_rank, size=size, group=group)
    _check_same_model(model, plan)
    _replace_parameters(model, plan, tp_rank)
    for entry in plan.boundaries:
        _wrap(model, plan, entry, axis)


def _check_same_model(model: nn.Module, plan: ShardingPlan) -> None:
    present = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    planned = {name: placement.shape for name, placement in plan.placements.items()}
    for name in [*planned, *present]:
        if present.get(name) != planned.get(name):
            raise ShardingError(
                f"{name} is {present.get(name, 'missing')} in the model and"
                f" {planned.get(name, 'missing')} in the plan: plan this model as a whole, and cut"
                " it once"
            )


def _replace_parameters(model: nn.Module, plan: ShardingPlan, tp_rank: int) -> None:
    pieces: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for attribute, old in module._parameters.items():
            if old is None:
                continue
            placement = plan.placements[f"{path}.{attribute}" if path else attribute]
            if placement.compute == Placement():
                continue
            if id(old) not in pieces:
                piece = old.detach()[placement.piece(tp_rank).slices]
                new = nn.Parameter(
                    piece.clone(memory_format=torch.contiguous_format),
                    requires_grad=old.requires_grad,
                )
                new.__dict__.update(old.__dict__)
                new.whole_shape = placement.shape  # type: ignore[attr-defined]
                pieces[id(old)] = new
            module._parameters[attribute] = pieces[id(old)]


def _wrap(model: nn.Module, plan: ShardingPlan, entry: BoundaryEntry, axis: TpAxis) -> None:
    module = model.get_submodule(entry.path)
    inner = module.forward
    new: Forward | None = None
    if entry.type in (BoundaryType.ATTENTION, BoundaryType.MLP):
        _wrap_row_maps(model, plan, entry, axis)
        new = _around_block(module, inner, entry, axis)
    elif entry.type is BoundaryType.EXPERTS:
        new = _around_experts(inner, entry, axis)
    elif entry.type is BoundaryType.ROUTER:
        new = _around_router(inner, entry, axis)
    elif entry.type is BoundaryType.EMBEDDING:
        new = _around_table(inner, entry, _row_bounds(plan, entry), axis)
    elif entry.type is BoundaryType.POSITIONS:
        new = _around_positions(inner, entry, axis)
    elif entry.type is BoundaryType.HEAD:
        new = _around_head(inner, entry, axis)
    elif entry.type is BoundaryType.LOSS:
        head = next(b for b in plan.boundaries if b.type is BoundaryType.HEAD)
        new = _around_loss(_row_bounds(plan, head), axis)
    elif entry.type is BoundaryType.MODEL:
        new = _around_model(module, inner, plan, axis)
    if new is not None:
        module.forward = new  # type: ignore[method-assign]


def _row_bounds(plan: ShardingPlan, entry: BoundaryEntry) -> tuple[int, ...]:
    cuts = [p.placement.compute.on(Axis.TP) for p in plan.parameters if p.boundary == entry.path]
    if len(cuts) != 1 or not isinstance(cuts[0], Shard) or cuts[0].bounds is None:
        raise ShardingError(f"{entry.path} should hold one table that is cut by rows")
    return cuts[0].bounds


def _wrap_row_maps(
    model: nn.Module, plan: ShardingPlan, entry: BoundaryEntry, axis: TpAxis
) -> None:
    """The last map of a block gives summands: sum them, then add its bias once."""
    leave = leaving(entry.contract.produced, entry.contract.returned, axis)
    names = [p.name for p in plan.parameters if p.boundary == entry.path and p.role in _ROW_ROLES]
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        module.forward = _row_forward(module, leave)  # type: ignore[method-assign]


def _row_forward(module: nn.Module, leave: Callable[[Tensor], Tensor]) -> Forward:
    def forward(inputs: Tensor) -> Tensor:
        summed = leave(linear(inputs, (module.weight,)))  # type: ignore[arg-type]
        return summed if module.bias is None else summed + module.bias  # type: ignore[operator]

    return forward


def _around_block(module: nn.Module, inner: Forward, entry: BoundaryEntry, axis: TpAxis) -> Forward:
    enter = entering(entry.contract.given, entry.contract.computed, axis)
    draws = entry.type is BoundaryType.ATTENTION and _rate(module, ("attention_dropout",)) > 0

    def forward(hidden: Tensor, *rest: Any, **named: Any) -> Any:
        hidden = enter(hidden)
        if draws and module.training:
            with own_draws(axis, hidden.device):
                return inner(hidden, *rest, **named)
        return inner(hidden, *rest, **named)

    return forward


def _around_experts(inner: Forward, entry: BoundaryEntry, axis: TpAxis) -> Forward:
    enter = entering(entry.contract.given, entry.contract.computed, axis)
    leave = leaving(entry.contract.produced, entry.contract.returned, axis)

    def forward(hidden: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        # Weights enter too: the router's gradient is then complete on every rank.
        return leave(inner(enter(hidden), enter(weights), enter(indices)))

    return forward


def _around_router(inner: Forward, entry: BoundaryEntry, axis: TpAxis) -> Forward | None:
    if entry.contract.given is Flow.WHOLE:
        return None
    if entry.contract.computed is Flow.WHOLE:  # it compares all tokens: each rank does all of it

        def compare_all(
            hidden: Tensor, counted: Tensor | None = None
        ) -> tuple[Tensor, Tensor, Tensor]:
            weights, indices, statistics = inner(replicated_gather(axis, hidden), counted)
            mine = own_positions(axis, indices, POSITIONS)
            return replicated_own(axis, weights), mine, statistics

        return compare_all

    def forward(hidden: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        mine = None if counted is None else own_positions(axis, counted, POSITIONS)
        weights, indices, statistics = inner(hidden, mine)
        return weights, indices, sum_parts(axis, statistics)

    return forward


def _around_table(
    inner: Forward, entry: BoundaryEntry, bounds: tuple[int, ...], axis: TpAxis
) -> Forward:
    leave = leaving(entry.contract.produced, entry.contract.returned, axis)
    cut_positions = entry.contract.returned is Flow.SEQUENCE

    def forward(index: Tensor) -> Tensor:
        if cut_positions:
            check_divides(index.shape[POSITIONS], axis.size)
        return leave(vocabulary.lookup(inner, index, bounds, axis.rank))

    return forward


def _around_positions(inner: Forward, entry: BoundaryEntry, axis: TpAxis) -> Forward | None:
    if entry.contract.computed is Flow.WHOLE:
        return None
    return lambda index: inner(own_positions(axis, index, -1))


def _around_head(inner: Forward, entry: BoundaryEntry, axis: TpAxis) -> Forward:
    enter = entering(entry.contract.given, entry.contract.computed, axis)
    return lambda hidden: inner(enter(hidden))


def _around_loss(bounds: tuple[int, ...], axis: TpAxis) -> Forward:
    def forward(logits: Tensor, labels: Tensor | None) -> Tensor:
        if labels is None:
            return gather_vocabulary(axis, logits, bounds)
        return vocabulary.cross_entropy(logits, labels, axis, bounds)

    return forward


def _around_model(
    module: nn.Module, inner: Forward, plan: ShardingPlan, axis: TpAxis
) -> Forward | None:
    """Under sequence parallelism every activation that dropout meets is a rank's own."""
    if not plan.sequence_parallel or _rate(module, _DROPOUTS) == 0:
        return None

    def forward(*args: Any, **named: Any) -> Any:
        if not module.training:
            return inner(*args, **named)
        device = next(module.parameters()).device
        with own_draws(axis, device):
            return inner(*args, **named)

    return forward


def _rate(module: nn.Module, names: tuple[str, ...]) -> float:
    """The highest of the dropout rates that the module's config names."""
    config = getattr(module, "config", None)
    return max(float(getattr(config, name, 0.0)) for name in names)


@contextmanager
def own_draws(axis: TpAxis, device: torch.device) -> Iterator[None]:
    """Random numbers of this rank's own, seeded by one number of the common stream, which then
    goes on at the same place on every rank; recomputation repeats both.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + axis.rank)
        yield
