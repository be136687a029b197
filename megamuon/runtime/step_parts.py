"""What the optimizer step of every sharded model has: the norm, clipping, an item per parameter.

Owns ``StepResult``, the one all-reduce of a step (``NormReduction``), the clipping rule and the
making of optimizer items. Invariants: each element counts once in the norm, wherever it lies; a
parameter that no rank touched is left alone (no decay, no momentum), as in PyTorch; a gradient that
is not finite skips the step on all ranks alike and names the parameter. Tested by
``tests/distributed/test_step.py`` and ``tests/distributed/test_fully_sharded.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import named
from megamuon.collectives.traffic import Traffic
from megamuon.matrices import LogicalParameter
from megamuon.optim.optimizer import Item

RateOf = Callable[[LogicalParameter], float]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did; equal on all ranks."""

    gradient_norm: float  # of the averaged gradients, before clipping
    skipped: bool
    nonfinite: tuple[str, ...]  # parameters whose gradient is not finite
    untouched: tuple[str, ...]  # trainable parameters that no rank used since the last step
    zeros: int | None = None  # zero elements of the averaged gradients, where asked for


class LocalGradient(NamedTuple):
    """A reduced gradient on this rank."""

    values: Tensor  # of any shape, with elements
    place: int  # of its parameter among the trainable ones
    counts: bool = True  # whether this rank speaks for these elements in sums over all ranks


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """What all ranks know of the gradients after the all-reduce."""

    norm: float  # nan where a gradient is not finite
    touched: frozenset[str]
    nonfinite: tuple[str, ...]
    zeros: int | None
    riders: tuple[int, ...]  # sums of what each rank sent along

    @property
    def skipped(self) -> bool:
        """Whether the step must not be made."""
        return bool(self.nonfinite) or not math.isfinite(self.norm)

    def result(self, names: Sequence[str]) -> StepResult:
        """The result of a step over the trainable parameters ``names``."""
        return StepResult(
            gradient_norm=self.norm,
            skipped=self.skipped,
            nonfinite=self.nonfinite,
            untouched=tuple(name for name in names if name not in self.touched),
            zeros=self.zeros,
        )


class NormReduction:
    """One all-reduce over all ranks: the squared norm, a zero count (if asked for), what rides
    along, and an entry per trainable parameter.

    An entry sums one per rank that used the parameter; a rank whose gradient is not finite adds
    twice the number of ranks, which no count of uses can reach.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        traffic: Traffic,
        count_zeros: bool,
    ) -> None:
        """``names``: of the trainable parameters, the same on all ranks. ``group``: all ranks;
        None: one.
        """
        self.names = tuple(names)
        self.group = group
        self.device = device
        self.traffic = traffic
        self.count_zeros = count_zeros
        self.place = {name: place for place, name in enumerate(self.names)}

    def __call__(
        self,
        gradients: Sequence[LocalGradient],
        used: Iterable[str],
        riders: Sequence[int] = (),
    ) -> GradientNorm:
        """Reduce over ``gradients``, this rank's. ``used``: parameters that this rank has used."""
        ranks = dist.get_world_size(self.group) if self.group is not None else 1
        entries = [0.0] * len(self.names)  # Python's numbers: a tensor element costs 5 us
        for name in used:
            entries[self.place[name]] += 1
        total, zeros = 0.0, 0.0
        if gradients:
            # In FP64: squares of finite FP32 numbers do not overflow, and the clipping factor does
            # not depend on how the layout cuts the sum.
            norms = torch._foreach_norm([g.values for g in gradients], dtype=torch.float64)
            squares = torch.stack(norms).cpu().square().tolist()
            for gradient, square in zip(gradients, squares, strict=True):
                if not math.isfinite(square):
                    entries[gradient.place] += 2 * ranks
                elif gradient.counts:
                    total += square
        counted = [g.values for g in gradients if g.counts] if self.count_zeros else []
        if counted:
            zeros = float(torch.stack([(values == 0).sum() for values in counted]).sum())
        sums = [total, zeros, *map(float, riders), *entries]
        if self.group is not None:
            sums = self._reduced(sums)
        total, zeros, entries = sums[0], sums[1], sums[2 + len(riders) :]
        named_entries = list(zip(self.names, entries, strict=True))
        nonfinite = tuple(name for name, entry in named_entries if entry >= 2 * ranks)
        return GradientNorm(
            norm=float("nan") if nonfinite else math.sqrt(total),
            touched=frozenset(name for name, entry in named_entries if entry > 0),
            nonfinite=nonfinite,
            zeros=int(zeros) if self.count_zeros else None,
            riders=tuple(int(value) for value in sums[2 : 2 + len(riders)]),
        )

    def _reduced(self, sums: Sequence[float]) -> list[float]:
        vector = torch.tensor(sums, dtype=torch.float64, device=self.device)
        with named("gradient norm"):
            dist.all_reduce(vector, group=self.group)
        ranks, nbytes = dist.get_world_size(self.group), vector.numel() * vector.element_size()
        self.traffic.sent("norm", "world", 2 * (ranks - 1) * nbytes // ranks)
        return vector.tolist()


def clip_(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale ``gradients`` in place so that their norm, ``norm`` now, is at most ``limit``; a limit
    of 0 is none. Megatron's and PyTorch's rule.
    """
    if limit <= 0 or not gradients:
        return
    factor = limit / (norm + 1e-6)
    if factor < 1:
        torch._foreach_mul_(list(gradients), factor)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Learning rates and decay of one step."""

    lr_of: RateOf
    wd: float
    decayed: frozenset[str]  # parameters that decay

    def item(
        self,
        parameter: LogicalParameter,
        *,
        master: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
    ) -> Item:
        """What the optimizer gets of this rank's part of ``parameter``; all in its shape."""
        return Item(
            name=parameter.name,
            parameter=master,
            gradient=gradient,
            state=state,
            lr=self.lr_of(parameter),
            wd=self.wd if parameter.name in self.decayed else 0.0,
            logical_shape=parameter.shape,
        )


def norm_over_ranks(
    parts: Iterable[Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> float:
    """L2 norm of all ``parts`` of all ranks, in FP64. A collective of one scalar."""
    total = torch.zeros(1, dtype=torch.float64)
    for part in parts:
        total += part.detach().to("cpu", torch.float64).square().sum()
    if group is not None:
        total = total.to(device)
        dist.all_reduce(total, group=group)
    return float(total.sqrt())
