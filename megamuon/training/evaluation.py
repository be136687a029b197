"""Losses on held-out data.

Owns one evaluation: a number of batches, averaged over all tokens.  Invariants: it changes
neither weights nor random state nor the training mode that it found; ranks leave it together,
after the same micro-batch, also when a signal or the time limit cuts it short.  Tested by
``tests/training/test_loop.py`` and
``tests/distributed/test_pretrain_exits.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megamuon.mesh import Mesh
from megamuon.training.builders import Batches
from megamuon.training.exits import ExitWatch, Pacer, Requests
from megamuon.training.failures import Phase
from megamuon.training.reports import ForwardStep, Sums, micro_batch_loss


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The losses (None when cut short), what was consumed, and why it was cut short."""

    losses: dict[str, float] | None
    samples: int
    requests: Requests


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[Any],
    forward_step: ForwardStep,
    *,
    iterations: int,
    sizes: Batches,
    mesh: Mesh,
    watch: ExitWatch,
    phase: Phase,
) -> Evaluation:
    """Mean losses over ``iterations`` global batches.  A collective; equal on all ranks."""
    sums, training = Sums(), model.training
    pacer = Pacer(watch, mesh, limit=sizes.count)
    model.eval()
    try:
        requests = watch.poll(mesh)
        for done in range(iterations * sizes.count):
            if requests.any:
                whole = done // sizes.count * sizes.total
                return Evaluation(losses=None, samples=whole, requests=requests)
            phase("evaluation")
            output, loss_function = forward_step(batches, model)
            _, report = micro_batch_loss(loss_function(output))
            sums.add(report)
            requests = pacer.between()
        losses, _ = sums.reduced(mesh, [])
    finally:
        model.train(training)
    return Evaluation(losses=losses, samples=iterations * sizes.total, requests=Requests())
