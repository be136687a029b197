"""What loss functions report, and how it is averaged.

Owns the two styles of Megatron-LM's loss functions.  A new-style one returns ``(loss_sum,
num_tokens, report)``, an older one ``(loss, report)`` with a loss that is a mean already; a
report maps names to ``tensor([sum, count])`` or to one number, a mean.  Invariant: sums and
counts are added over micro-batches and ranks before they are divided, so the printed loss does
not depend on how samples are dealt to ranks.  Tested by ``tests/training/test_reports.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.mesh import Mesh

LossFunction = Callable[[Tensor], tuple[Any, ...]]
ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Tensor, LossFunction]]


def micro_batch_loss(outputs: tuple[Any, ...]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The mean loss (a scalar to differentiate) and the report of one micro-batch.

    Raises TypeError for what is neither style.
    """
    if len(outputs) == 3:
        loss_sum, tokens, report = outputs
        # Megatron's rule: a micro-batch without a token weighs nothing, and divides by one.
        count = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1)
        return loss_sum / count, report
    if len(outputs) == 2:
        return outputs[0], outputs[1]
    raise TypeError(
        f"the loss function returned {len(outputs)} values: return (loss_sum, num_tokens, report)"
    )


class Sums:
    """Sums and counts of each reported name on this rank."""

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}  # (2,) float64 each
        self._loss: Tensor | None = None  # sum of what was differentiated

    def add(self, report: Mapping[str, Tensor], loss: Tensor | None = None) -> None:
        """One micro-batch's report, and its loss where that decides whether a step is sound.

        Raises ValueError for an entry of another size than 1 or 2.
        """
        if loss is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        for name, value in report.items():
            flat = torch.as_tensor(value).detach().reshape(-1).to(torch.float64)
            if flat.numel() == 1:
                flat = torch.cat([flat, torch.ones_like(flat)])
            if flat.numel() != 2:
                raise ValueError(
                    f"loss report {name!r} has {flat.numel()} numbers: give [sum, count] or a mean"
                )
            self._pairs[name] = self._pairs[name] + flat if name in self._pairs else flat

    def reduced(self, mesh: Mesh, extra: list[float]) -> tuple[dict[str, float], list[float]]:
        """Means over sample ranks by name, and the sums over all ranks of ``extra``.  One
        collective.

        Of the ranks that have seen the same samples one speaks (``Mesh.speaks``). All
        ranks have reported the same names, or none (evaluation that was cut short has).
        """
        numbers = torch.tensor(extra, dtype=torch.float64, device=mesh.device)
        pairs = [pair.to(mesh.device) for pair in self._pairs.values()]
        if not mesh.speaks:
            pairs = [torch.zeros_like(pair) for pair in pairs]
        vector = torch.cat([*pairs, numbers])
        if mesh.world_size > 1:
            dist.all_reduce(vector)
        values = vector.tolist()
        means = {}
        for place, name in enumerate(self._pairs):
            total, count = values[2 * place : 2 * place + 2]
            means[name] = total / count if count else float("nan")
        return means, values[2 * len(self._pairs) :]

    def finite(self) -> bool:
        """Whether the losses and reports of this rank are finite."""
        values = [*self._pairs.values(), *([] if self._loss is None else [self._loss])]
        return all(bool(torch.isfinite(value).all()) for value in values)
