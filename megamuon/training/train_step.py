"""One training iteration: micro-batches, agreement, optimizer step, schedule.

Owns the order of these and what a bad step means.  Invariants: whether a step is applied is
decided from reduced numbers, so all ranks decide alike; a loss that is not finite anywhere skips
the step before the optimizer sees a gradient; the schedule advances by the global batch after a
step that was applied, and never otherwise; a signal that arrives between micro-batches drops the
step, as if it had not begun, on all ranks at the same micro-batch. Tested by
``tests/training/test_loop.py`` and ``tests/distributed/test_pretrain_ranks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megamuon.checkpoint import capture_rng, restore_rng
from megamuon.matrices import LogicalParameter
from megamuon.mesh import Mesh
from megamuon.metrics import Timers
from megamuon.optim import Schedule
from megamuon.runtime import TrainableRuntime
from megamuon.training.exits import ExitWatch, Pacer, Requests
from megamuon.training.failures import Phase
from megamuon.training.reports import ForwardStep, Sums, micro_batch_loss

RateOf = Callable[[LogicalParameter], float]


@dataclass(kw_only=True)
class Outcome:
    """What one iteration came to; equal on all ranks."""

    losses: dict[str, float] = field(default_factory=dict)
    gradient_norm: float | None = None
    zeros: int | None = None  # zero elements of the gradients, where asked for
    skipped: bool = False
    dropped: bool = False  # a signal came in the middle: nothing has happened
    problem: str | None = None  # why it was skipped, for the log
    requests: Requests = field(default_factory=Requests)


class Stepper:
    """Runs iterations of one run."""

    def __init__(
        self,
        *,
        runtime: TrainableRuntime,
        schedule: Schedule,
        rate_of: Callable[[Schedule], RateOf],
        forward_step: ForwardStep,
        mesh: Mesh,
        watch: ExitWatch,
        timers: Timers,
        phase: Phase,
        micro_batches: int,
        global_batch: int,
        reduce_once: bool,
        empty_cache: bool = False,
    ) -> None:
        self.runtime = runtime
        self.schedule = schedule
        self.rate_of = rate_of
        self.forward_step = forward_step
        self.mesh = mesh
        self.watch = watch
        self.timers = timers
        self.phase = phase
        self.micro_batches = micro_batches
        self.global_batch = global_batch
        self.reduce_once = reduce_once  # --gradient-reduction step
        self.empty_cache = empty_cache
        self.pacer = Pacer(watch, mesh, limit=micro_batches)

    def skip(self, batches: Iterator[Any]) -> Outcome:
        """Consume the data of an iteration without training on it."""
        self.phase("reading a batch")
        for _ in range(self.micro_batches):
            next(batches)
        return Outcome(
            skipped=True,
            problem="its data was consumed without training (--iterations-to-skip)",
            requests=self.watch.poll(self.mesh),
        )

    def __call__(self, batches: Iterator[Any]) -> Outcome:
        """One iteration."""
        sums = Sums()
        interruptible = self.watch.signal_name is not None and self.micro_batches > 1
        random_state = capture_rng() if interruptible else None
        with self.timers.time("forward-backward", 1):
            for index in range(self.micro_batches):
                last = index == self.micro_batches - 1
                waits = self.reduce_once and not last
                with self.runtime.accumulate() if waits else nullcontext():
                    self._micro_batch(batches, sums)
                requests = Requests() if last else self.pacer.between()
                if requests.signal:
                    return self._drop(requests, random_state)
        if self.empty_cache and self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        self.phase("averaging the loss")
        losses, flags = sums.reduced(
            self.mesh, [float(not sums.finite()), *self.watch.local_flags()]
        )
        bad_ranks = int(flags[0])
        requests = Requests(signal=flags[1] > 0, expired=flags[2] > 0)
        if bad_ranks:
            return self._refuse(losses, bad_ranks, requests)
        return self._update(losses, requests)

    def _drop(self, requests: Requests, random_state: dict[str, Any] | None) -> Outcome:
        """Undo a step that has not come to its end: a resume makes it from its start."""
        self.phase("dropping a step that a signal cut short")
        self.runtime.clear_gradients()
        if random_state is not None:
            restore_rng(random_state)
        return Outcome(dropped=True, requests=requests)

    def _micro_batch(self, batches: Iterator[Any], sums: Sums) -> None:
        self.phase("forward")
        with self.timers.time("forward-compute", 2):
            output, loss_function = self.forward_step(batches, self.runtime.model)
            self.phase("loss")
            loss, report = micro_batch_loss(loss_function(output))
        sums.add(report, loss)
        self.phase("backward")
        with self.timers.time("backward-compute", 2):
            (loss / self.micro_batches).backward()

    def _refuse(self, losses: dict[str, float], bad_ranks: int, requests: Requests) -> Outcome:
        """A loss is not finite: drop the gradients, and say whether the weights are to blame."""
        self.runtime.clear_gradients()
        names = nonfinite_weights(self.runtime, self.mesh)
        blame = f"weights that are not finite: {_listed(names)}" if names else "all weights finite"
        shown = ", ".join(f"{name} {value}" for name, value in losses.items())
        problem = f"loss is not finite on {bad_ranks} of {self.mesh.world_size} ranks"
        return Outcome(
            losses=losses,
            gradient_norm=float("nan"),
            skipped=True,
            problem=f"{problem} ({shown}; {blame})",
            requests=requests,
        )

    def _update(self, losses: dict[str, float], requests: Requests) -> Outcome:
        self.phase("optimizer step")
        with self.timers.time("optimizer", 1):
            result = self.runtime.step(
                self.schedule.lr(), self.schedule.wd(), lr_of=self.rate_of(self.schedule)
            )
        problem = None
        if result.skipped:
            names = result.nonfinite
            problem = (
                f"gradients are not finite in {len(names)} parameters: {_listed(names)}"
                if names
                else f"gradient norm is {result.gradient_norm}"
            )
        else:
            self.schedule.advance(self.global_batch)
        return Outcome(
            losses=losses,
            gradient_norm=result.gradient_norm,
            zeros=result.zeros,
            skipped=result.skipped,
            problem=problem,
            requests=requests,
        )


def nonfinite_weights(runtime: TrainableRuntime, mesh: Mesh) -> tuple[str, ...]:
    """Names of parameters with a master weight that is not finite, the same on all ranks."""
    local = sorted(
        {
            p.name
            for p in runtime.state(optimizer=False, buffers=False)
            if not torch.isfinite(p.data).all()
        }
    )
    if mesh.world_size == 1:
        return tuple(local)
    everyone: list[list[str]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(everyone, local)
    return tuple(sorted({name for names in everyone for name in names}))


def _listed(names: tuple[str, ...], shown: int = 3) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
