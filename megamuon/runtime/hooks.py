"""Hooks that tie the engine to a model's modules and parameters.

Owns all forward, backward and gradient hooks. Invariant: a forward that stops early (recomputation,
an exception) leaves nothing behind that the next one does not replace. Foreign ``nn.Linear``
modules compute through our gradient-writing function, so that their gradients need no copy either.
Tested by ``tests/distributed/test_runtime_rules.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megamuon.collectives import CollectiveError
from megamuon.kernels.linear import UNSHARDED, UnshardedGradient, linear
from megamuon.matrices import Kind, declared_kind
from megamuon.runtime.engine import Engine, backward_running
from megamuon.runtime.frozen import may_pass_gradients
from megamuon.runtime.layer_group import LayerGroup, Use
from megamuon.runtime.released import Guard


def _gradient_tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and registered containers that require a
    gradient.
    """
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _is_table(module: nn.Module) -> bool:
    """Whether a module only looks rows up: the backward of that reads no weights."""
    own = module._parameters.items()
    kinds = {declared_kind(module, name, p) for name, p in own if p is not None}
    return kinds == {Kind.EMBEDDING} and not any(module.children())


# Attribute of a module's output: what to call first when its gradient is there, one entry for each
# use that has it as an input. Those uses are over by then, and make room for the one that starts.
READERS = "megamuon_readers"


def attach_root(engine: Engine, model: nn.Module) -> None:
    """Start and end of a forward pass. Call before ``attach_group``: the root's pre-hook runs
    first.
    """
    model.register_forward_pre_hook(lambda *_: engine.root_enter(), prepend=True)


def attach_root_end(engine: Engine, model: nn.Module) -> None:
    """Call after ``attach_group``: the root's post-hook runs last, after an exception too."""

    def leave(*_: Any) -> None:
        engine.root_leave(lost=isinstance(sys.exc_info()[1], CollectiveError))

    model.register_forward_hook(leave, always_call=True)


def attach_group(engine: Engine, group: LayerGroup, modules: Iterable[nn.Module]) -> None:
    """Gather before any of ``modules`` computes, release after it, and again for the backward
    pass.
    """

    latest: list[Use | None] = [None]  # of the call that is computing

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        engine.need(group)
        latest[0] = None
        if not torch.is_grad_enabled() or backward_running():
            return
        inputs = {id(tensor): tensor for tensor in _gradient_tensors((args, kwargs))}
        if not inputs:
            group.unseen_use = True
            return
        latest[0] = use = Use(len(inputs))
        group.uses.add(use)
        for place, tensor in enumerate(inputs.values()):

            def heard(_: Tensor | None = None, place: int = place) -> None:
                if use.hears(place):
                    engine.use_over(group, use)

            readers = getattr(tensor, READERS, None)
            if readers is None:
                tensor.register_hook(heard)
            else:
                readers.append(heard)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs: list[Tensor] = []
        if torch.is_grad_enabled() and not backward_running():
            outputs = _gradient_tensors(output)
        returns = bool(outputs) or not torch.is_grad_enabled()
        # Where nothing trains and no gradient will come, nobody reads the weights again.
        returns = returns or not (group.trainable or may_pass_gradients(output))
        engine.leave(group, returns=returns)
        if group.frozen_uses and torch.is_grad_enabled() and not backward_running():
            group.frozen_uses.saw(output)
        use, latest[0] = latest[0], None
        reads = module not in tables
        for tensor in outputs:
            readers: list[Callable[[], None]] = []

            def reached(_: Tensor, readers: list[Callable[[], None]] = readers) -> None:
                for over in readers:
                    over()
                engine.enter_backward(group, use, reads=reads)

            tensor.register_hook(reached)
            setattr(tensor, READERS, readers)

    modules = tuple(modules)
    tables = {module for module in modules if _is_table(module)}
    for module in modules:
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def check_hook_contract() -> None:
    """Raise RuntimeError where torch does not call a post-accumulate hook for a parameter whose
    function returned no gradient: groups would never know that they are complete.
    """
    weight, fired = nn.Parameter(torch.ones(1, 1)), []
    weight.register_post_accumulate_grad_hook(lambda _: fired.append(True))
    unsharded = UnshardedGradient(torch.empty(1, 1), lambda: None, lambda: None)
    setattr(weight, UNSHARDED, unsharded)
    with torch.enable_grad():
        linear(torch.ones(1, 1), [weight]).sum().backward()
    if fired != [True] or not unsharded.written:
        raise RuntimeError(
            f"torch {torch.__version__} does not report parameters whose gradients are written in"
            " place (post-accumulate hooks): 2.11 and 2.13 do"
        )


def attach_parameters(
    engine: Engine, group: LayerGroup, parameters: dict[str, nn.Parameter]
) -> None:
    """Tell the engine when a parameter of ``group`` has its gradient of this backward pass.

    The hook of torch fires once per backward, when all uses of the parameter have contributed, and
    also when they all wrote to the group's buffer and returned None.
    """
    for logical in group.trainable:
        parameter = parameters[logical.name]
        group.accumulators[logical.name] = torch.autograd.graph.get_gradient_edge(parameter).node
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=logical.name: engine.gradient(group, name, parameter)
        )


def route_linears(model: nn.Module) -> None:
    """Let plain ``nn.Linear`` modules compute through ``kernels.linear``; subclasses, and modules
    whose forward somebody has wrapped, keep theirs.
    """
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = _unsharded_forward(module)  # type: ignore[method-assign]


def _unsharded_forward(module: nn.Linear) -> Any:
    def forward(input: Tensor) -> Tensor:
        return linear(input, [module.weight], [module.bias])

    return forward


def attach_guards(
    engine: Engine, model: nn.Module, groups: Sequence[LayerGroup], named: dict[str, nn.Parameter]
) -> None:
    """Close all parameters, and those that stay gathered again after each forward pass.  Call last:
    closed parameters take no hooks.
    """
    for group in groups:
        group.guard = Guard(
            {p.name: named[p.name] for p in group.parameters},
            # Weights that stayed gathered are read in peace, until an update makes them old.
            readable=lambda group=group: (
                group.weights.alive and group.gathering is None and group.version == engine.version
            ),
        )
        group.weights.released = group.guard.close

    def close(module: nn.Module, args: object, output: Any) -> None:
        if backward_running():
            return
        for group in groups:
            if group.guard is not None:
                group.guard.close()
        if torch.is_grad_enabled():
            for tensor in _gradient_tensors(output):
                tensor.register_hook(_refuse_double_backward)

    model.register_forward_hook(close)


def _refuse_double_backward(gradient: Tensor) -> None:
    """Autograd records in a backward pass only where create_graph asks it to."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "backward(create_graph=True): gradients of a sharded model are written to a buffer"
            " and reduced, not recorded; second derivatives need the model unsharded"
        )
