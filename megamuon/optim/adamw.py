"""AdamW and SGD on an owner's items, through torch's functional optimizers.

Owns ``AdamW`` and ``Sgd``, with their settings, flags and recipes. Invariant: both give bit for bit
what ``torch.optim.AdamW`` and ``torch.optim.SGD`` give with the same learning rate and decay, on
tensors of any shape, flat slices of a matrix included (the rules are elementwise, so a slice's
result is the slice of the result).
Tested by ``tests/optim/test_adamw.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megamuon.flags import flag
from megamuon.optim.ns_plan import CpuDtype
from megamuon.optim.optimizer import Item, check_master
from megamuon.optim.recipe import Recipe

_AVERAGE, _SQUARE, _STEP = "exp_avg", "exp_avg_sq", "step"
_MOMENTUM = "momentum_buffer"


def _groups(items: Sequence[Item], state_names: Sequence[str]) -> Iterable[list[Item]]:
    """Items that one functional call may take together: equal lr, wd, device and dtype.
    ValueError for an item whose state lacks a name.
    """
    groups: dict[tuple[object, ...], list[Item]] = defaultdict(list)
    for item in items:
        missing = [name for name in state_names if name not in item.state]
        if missing:
            raise ValueError(
                f"item {item.name!r}: its state has no {', '.join(missing)}; make it with "
                "init_state"
            )
        parameter = item.parameter
        groups[(item.lr, item.wd, parameter.device, parameter.dtype)].append(item)
    return groups.values()


def _tell(group: Sequence[Item], updated: Callable[[Item], None] | None) -> None:
    if updated is not None:
        for item in group:
            updated(item)


_SMALL = 1 << 15  # elements per tensor below which call overhead outweighs temporaries on a CPU


def _foreach(group: Sequence[Item]) -> bool:
    """Whether torch's multi-tensor path is faster for this group. Both paths give the same bits."""
    if group[0].parameter.is_cuda:
        return True
    return len(group) > 1 and sum(item.parameter.numel() for item in group) < _SMALL * len(group)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter): decoupled decay, bias-corrected moments. Megatron's defaults.
    ``fused`` takes torch's fused kernel: the bits of ``torch.optim.AdamW(fused=True)``, which
    differ in the last place from the default's, in one pass over memory.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    fused: bool = False

    def __post_init__(self) -> None:
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"AdamWConfig.{name} = {value}: it lies in [0, 1)")
        if not self.eps >= 0.0:
            raise ValueError(f"AdamWConfig.eps = {self.eps}: it is not negative")


@dataclass(frozen=True, kw_only=True)
class AdamFlags:
    """The command line's names of ``AdamWConfig``."""

    adam_beta1: float = flag(AdamWConfig.beta1, "decay of AdamW's first moment", low=0.0, below=1.0)
    adam_beta2: float = flag(
        AdamWConfig.beta2, "decay of AdamW's second moment", low=0.0, below=1.0
    )
    adam_eps: float = flag(AdamWConfig.eps, "added to AdamW's denominator", above=0.0)


class AdamW:
    """AdamW. State: both moments in the parameter's dtype, and ``step``, a 0-d FP32 tensor on
    the CPU.
    """

    state_names: tuple[str, ...] = (_AVERAGE, _SQUARE, _STEP)

    def __init__(self, config: AdamWConfig) -> None:
        self.config = config

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        check_master("of new state", parameter)
        return {
            _AVERAGE: torch.zeros_like(parameter, memory_format=torch.contiguous_format),
            _SQUARE: torch.zeros_like(parameter, memory_format=torch.contiguous_format),
            _STEP: torch.zeros(
                (), dtype=torch.float32, device=parameter.device if self.config.fused else "cpu"
            ),
        }

    @torch.no_grad()
    def update(self, items: Sequence[Item], updated: Callable[[Item], None] | None = None) -> None:
        """One step for each item, in place; ``updated`` follows once for each, group by group.
        ValueError for state that init_state did not make.
        """
        for group in _groups(items, self.state_names):
            adamw(
                [item.parameter for item in group],
                [item.gradient for item in group],
                [item.state[_AVERAGE] for item in group],
                [item.state[_SQUARE] for item in group],
                [],
                [item.state[_STEP] for item in group],
                foreach=not self.config.fused and _foreach(group),
                fused=self.config.fused,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=group[0].lr,
                weight_decay=group[0].wd,
                eps=self.config.eps,
                maximize=False,
            )
            _tell(group, updated)


@dataclass(frozen=True, kw_only=True)
class SgdConfig:
    """SGD with momentum, as torch.optim.SGD and Megatron's ``--optimizer sgd``: the decay enters
    the gradient.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"SgdConfig.momentum = {self.momentum}: it lies in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class SgdFlags:
    """The command line's names of ``SgdConfig``."""

    sgd_momentum: float = flag(SgdConfig.momentum, "momentum of SGD", low=0.0, below=1.0)


class Sgd:
    """SGD.  State: the momentum buffer, or nothing when momentum is 0."""

    def __init__(self, config: SgdConfig) -> None:
        self.config = config
        self.state_names: tuple[str, ...] = (_MOMENTUM,) if config.momentum else ()

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        check_master("of new state", parameter)
        return {
            name: torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            for name in self.state_names
        }

    @torch.no_grad()
    def update(self, items: Sequence[Item], updated: Callable[[Item], None] | None = None) -> None:
        """One step for each item, in place; ``updated`` follows once for each, group by group.
        ValueError for state that init_state did not make.
        """
        for group in _groups(items, self.state_names):
            sgd(
                [item.parameter for item in group],
                [item.gradient for item in group],
                [item.state.get(_MOMENTUM) for item in group],
                foreach=_foreach(group),
                weight_decay=group[0].wd,
                momentum=self.config.momentum,
                lr=group[0].lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            _tell(group, updated)


def _adam_from_flags(flags: AdamFlags, cpu_dtype: CpuDtype) -> AdamWConfig:
    return AdamWConfig(beta1=flags.adam_beta1, beta2=flags.adam_beta2, eps=flags.adam_eps)


def _sgd_from_flags(flags: SgdFlags, cpu_dtype: CpuDtype) -> SgdConfig:
    return SgdConfig(momentum=flags.sgd_momentum)


ADAM = Recipe(
    name="adam",
    settings=AdamWConfig,
    build=AdamW,
    whole=False,
    flags=AdamFlags,
    from_flags=_adam_from_flags,
)
SGD = Recipe(
    name="sgd",
    settings=SgdConfig,
    build=Sgd,
    whole=False,
    flags=SgdFlags,
    from_flags=_sgd_from_flags,
)
