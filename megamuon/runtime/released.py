"""Guards of released weights: reading or writing one raises an error that says what to call.

Owns ``Guard``, which opens and closes the parameters of one layer group, and the class that a
closed parameter has. Invariants: outside of the modules that compute with it, a sharded parameter
answers questions about its shape and kind, never reads memory that another group may use, and
never takes a value that would be lost: it raises ``ReleasedWeightError``, which says what to call.
An open parameter is a plain ``nn.Parameter``, so an operation on gathered weights costs nothing
more; opening and closing assign a class, some 35 ns for each parameter. Tested by
``tests/distributed/test_released.py``.

[Note: how a closed parameter notices]

torch asks the class of an argument for ``__torch_function__`` before every Python-level operation,
methods, attributes and collectives included. A closed parameter's class has one that refuses; the
tensor behind it, its storage, its hooks and what autograd saved of it stay as they are, so the
backward pass, which reads it in C++, sees no difference.

Weights may be gathered and yet closed: at ZeRO-1 and 2 between the passes. Then they can be read,
since a loss may want them, and not written: their owners would never hear of it. A write while a
module computes is found by the version counter when the group closes; one through ``.data`` inside
a forward is the only kind that stays unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

READ = (
    "read it inside `with runtime.gathered():`, or iterate over runtime.full_parameters(); both are"
    " collectives"
)
WRITE = (
    "give new values to runtime.load_parameters({name: tensor}), or write inside"
    " `with runtime.gathered(write=True):`"
)
GRADIENT = (
    "its gradient is reduced to its owner and never lies in .grad: runtime.step() clips"
    " (OptimizerSettings.clip) and returns gradient_norm, runtime.clear_gradients() forgets"
)
TRAINABLE = (
    "requires_grad is read once, by shard: to freeze or unfreeze, save, rebuild the model and load"
)
PLACE = "device and dtypes are settled by shard: pass device=, and RuntimeConfig(compute_dtype=...)"
COPY = (
    "for a copy of the weights use runtime.full_parameters(); for a moving average"
    " runtime.masters() and runtime.swapped(); to save, runtime.state() with megamuon.checkpoint"
)
OPEN_HOOKS = (
    "gradients are written to the layer group's buffer and no hook on the weight sees them: hook"
    " the module or its outputs"
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_QUESTIONS = _words(
    """
    shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse
    is_quantized is_mps is_xpu is_mkldnn is_nested is_sparse_csr itemsize nbytes names _version
    output_nr _backward_hooks _post_accumulate_grad_hooks retains_grad _is_view is_inference
    size dim ndimension numel nelement element_size stride storage_offset is_contiguous
    is_floating_point is_complex is_signed get_device is_same_size type __hash__ __len__ is_tensor
    is_conj is_neg has_names _is_zerotensor is_coalesced result_type
    register_post_accumulate_grad_hook
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like
    new_zeros new_ones new_empty new_full new_tensor new_empty_strided
    """
)
_ALIASES = _words("data numpy __array__ storage untyped_storage data_ptr __dlpack__")
_COPIES = _words("__deepcopy__ __reduce_ex__ share_memory_")
_PLACES = _words("to cuda cpu half float double bfloat16 xpu type type_as pin_memory")
_IN_PLACE_OPERATORS = _words(
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift idiv"
)


class ReleasedWeightError(RuntimeError):
    """An operation on a sharded weight that would read or write what is not there."""


class ReleasedParameter(nn.Parameter):
    """The class of a parameter while its group is closed; see [Note: how a closed parameter
    notices].
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        raise ReleasedWeightError(_text(self, "deepcopy", COPY))

    def __reduce_ex__(self, proto: Any) -> Any:
        raise ReleasedWeightError(_text(self, "pickling", COPY))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Parameter of shape {tuple(self.shape)}, {self.dtype}, sharded: {READ}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name, action = _name_of(func)
        if action != "set" and name in _QUESTIONS:
            if name == "type" and (len(args) > 1 or kwargs):
                name = "to"
            else:
                return _plain(func, args, kwargs)
        parameter = _first_closed(args, kwargs)
        if name == "grad" and (
            torch._C._current_graph_task_id() != -1 or not _plain_value(parameter, "requires_grad")
        ):
            return _plain(func, args, kwargs)  # the engine's own hooks, and what has no gradient
        if name in ("requires_grad", "requires_grad_"):
            value = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if value == _plain_value(parameter, "requires_grad"):
                return _plain(func, args, kwargs)
        advice = _advice(func, name, action, parameter, args, kwargs)
        if advice is None:
            return _plain(func, args, kwargs)
        raise ReleasedWeightError(_text(parameter, name, advice))


def _advice(
    func: Callable[..., Any],
    name: str,
    action: str,
    parameter: nn.Parameter,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> str | None:
    """What to do instead of ``func``; None: the weights are gathered and it only reads them."""
    if name in ("grad", "_grad") or name == "backward":
        return GRADIENT
    if name in ("requires_grad", "requires_grad_"):
        return TRAINABLE
    if name in ("register_hook", "retain_grad"):
        return OPEN_HOOKS
    if name in _COPIES:
        return COPY
    if _writes(func, name, action, args, kwargs):
        return WRITE
    guard = _guard_of(parameter)
    if name not in _ALIASES and guard is not None and guard.readable():
        return None
    if name in _PLACES:
        return f"{PLACE}; {READ}"
    return f"{READ}; {WRITE}" if name in _ALIASES else READ


def _writes(
    func: Callable[..., Any],
    name: str,
    action: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> bool:
    """Whether the operation would change a parameter: torch's names for what works in place."""
    if action in ("set", "delete") or name in ("__setitem__", "set_"):
        return True
    if getattr(func, "__module__", "") and func.__module__.startswith("torch.distributed"):
        return True
    dunder = name.startswith("__") and name.endswith("__")
    if dunder:
        return name[2:-2] in _IN_PLACE_OPERATORS
    out = kwargs.get("out")
    given = out if isinstance(out, (tuple, list)) else (out,)
    if any(isinstance(each, ReleasedParameter) for each in given):
        return True
    # `add_(other=p)` on a foreign tensor only reads p.
    first = args[0] if args else None
    many = first if isinstance(first, (tuple, list)) else (first,)
    return name.endswith("_") and (
        not args or any(isinstance(each, ReleasedParameter) for each in many)
    )


def _name_of(func: Callable[..., Any]) -> tuple[str, str]:
    """The operation's name, and what it does with an attribute: get, set, delete, or call."""
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    action = {"__get__": "get", "__set__": "set", "__delete__": "delete"}.get(name)
    if action is not None and hasattr(owner, "__name__"):
        return owner.__name__, action
    return name, "call"


def _first_closed(args: Iterable[Any], kwargs: Mapping[str, Any]) -> nn.Parameter:
    """The first closed parameter among the arguments, also inside of lists."""
    waiting: list[Any] = [*args, *kwargs.values()]
    while waiting:
        value = waiting.pop(0)
        if type(value) is ReleasedParameter:
            return value
        if isinstance(value, (tuple, list)):
            waiting[:0] = value
        elif isinstance(value, dict):
            waiting[:0] = value.values()
    raise AssertionError("torch found a closed parameter that this cannot")


def _plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _plain_value(parameter: nn.Parameter, name: str) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(parameter, name)


def assign_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Assign ``.data``, which closed parameters refuse to everybody else."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = data


_GUARD = "released_guard"  # attributes of a parameter
_NAME = "canonical_name"


def _guard_of(parameter: nn.Parameter) -> Guard | None:
    return parameter.__dict__.get(_GUARD)


def _text(parameter: nn.Parameter, operation: str, advice: str) -> str:
    name = parameter.__dict__.get(_NAME, "a weight")
    return f"{operation} on {name}: the weights of this model are sharded; {advice}"


class Guard:
    """Opens and closes the parameters of one layer group."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], readable: Callable[[], bool] | None = None
    ) -> None:
        """``parameters`` by canonical name. ``readable`` says whether the group's present weights
        are in place while it is closed.
        """
        self.parameters = tuple(parameters.values())
        self.readable = readable or (lambda: False)
        self.opened = True
        self._held = False
        self._name = next(iter(parameters), "")
        self._version: int | None = None
        for name, parameter in parameters.items():
            parameter.__dict__[_GUARD] = self
            parameter.__dict__[_NAME] = name
        self.close()

    def open(self) -> None:
        """A module is about to compute with the weights, which are in place."""
        if not self.opened:
            self.opened = True
            for parameter in self.parameters:
                parameter.__class__ = nn.Parameter
            self._check_version()

    def close(self) -> None:
        """Nobody computes with the weights."""
        if self.opened and not self._held:
            self.opened = False
            for parameter in self.parameters:
                parameter.__class__ = ReleasedParameter
            self._check_version()

    def hold(self) -> None:
        """Open until ``let_go``, whatever passes do in between."""
        self.open()
        self._held = True

    def let_go(self) -> None:
        """Close; what was written since ``hold`` is known."""
        self._held, self._version = False, None
        self.close()

    def _check_version(self) -> None:
        """Raise ReleasedWeightError where somebody has written to a view of the weights: all
        parameters of a group share one version counter, and what gathers write does not move it.
        """
        if not self.parameters:
            return
        before, self._version = self._version, _plain_value(self.parameters[0], "_version")
        if before not in (None, self._version):
            raise ReleasedWeightError(
                f"a weight of the layer group of {self._name} was changed in place, which its owner"
                f" would never hear of: {WRITE}"
            )


def refuse(operation: str, advice: str) -> Callable[..., Any]:
    """A method that raises ReleasedWeightError for ``operation`` and says ``advice``."""

    def refused(*_: Any, **__: Any) -> Any:
        raise ReleasedWeightError(
            f"{operation} of a sharded model, whose weights lie on several ranks: {advice}"
        )

    return refused


def guard_modules(
    model: nn.Module, holders: Iterable[nn.Module], clear: Callable[[], None]
) -> None:
    """What whole modules must not do any more: state dicts, copies, pickles.

    ``holders`` are the modules that have sharded parameters. ``model.zero_grad()`` becomes
    ``clear``, which forgets the gradients since the last step.
    """

    for module in dict.fromkeys([model, *holders]):
        module.register_state_dict_pre_hook(
            refuse("state_dict()", "use runtime.state() or runtime.full_parameters()")
        )
        module.register_load_state_dict_pre_hook(
            refuse("load_state_dict()", "use runtime.load_parameters(state_dict)")
        )
        vars(module)["__reduce_ex__"] = refuse("pickling", COPY)
        vars(module)["__deepcopy__"] = refuse("deepcopy", COPY)
        vars(module)["zero_grad"] = refuse("zero_grad()", "call it on the model itself")
    vars(model)["zero_grad"] = lambda set_to_none=True: clear()
