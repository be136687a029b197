"""The training loop: iterations, logs, evaluations and the decision to leave.

Owns the order of events at a step boundary (``specs`` of Megatron-LM's loop): log, evaluate,
house-keeping, then signal, regular save, duration, interval; and when there have been too many
faults to go on.  Invariant: all ranks take the same branch at every boundary. Tested by
``tests/training/test_loop.py`` and
``tests/distributed/test_pretrain_exits.py``.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamuon.arguments import Config
from megamuon.mesh import Mesh
from megamuon.metrics import Timers
from megamuon.optim import Schedule
from megamuon.profiling import Profiler
from megamuon.runtime import TrainableRuntime
from megamuon.training.batches import BatchStream
from megamuon.training.builders import (
    Batches,
    batches,
    evaluation_batches,
    profiling_settings,
    rate_of,
    train_iterations,
)
from megamuon.training.checkpointing import RunCheckpoints
from megamuon.training.evaluation import Evaluation, evaluate
from megamuon.training.exits import ExitWatch, Requests
from megamuon.training.failures import Phase, TrainingError
from megamuon.training.logging import Console, RunLog
from megamuon.training.progress import DataOrder, Progress
from megamuon.training.reports import ForwardStep
from megamuon.training.train_step import Outcome, Stepper


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run consists of."""

    config: Config
    mesh: Mesh
    console: Console
    phase: Phase
    timers: Timers
    runtime: TrainableRuntime
    schedule: Schedule
    progress: Progress
    checkpoints: RunCheckpoints
    watch: ExitWatch
    log: RunLog
    datasets: tuple[Any, Any, Any]
    forward_step: ForwardStep
    flops_per_token: float | None


class Loop:
    """One run of ``parts``."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config
        self.progress = parts.progress
        self.steps = train_iterations(parts.config)
        self.sizes = batches(parts.config, parts.mesh.sample_ranks)
        self.evaluation_sizes = evaluation_batches(parts.config, parts.mesh.sample_ranks)
        self.skip = frozenset(parts.config.fault.iterations_to_skip)
        # Kept over all evaluations: opening a stream is work, and its position is the counter's.
        self._validation: BatchStream | None = None
        self._requests = Requests()
        self._begun_skipped = parts.progress.skipped_iterations  # by the launches before
        self._begun_at = parts.progress.iteration

    # --- training --------------------------------------------------------------------------------

    def train(self) -> str | None:
        """Train to the last iteration.  Returns the reason for leaving early, None at the end."""
        parts, config = self.parts, self.config
        progress = self.progress
        stepper = self._stepper()
        stream = self._stream(
            "training", 0, self.sizes, progress.consumed_train_samples, progress.train_order
        )
        profiler = Profiler(
            profiling_settings(config), rank=parts.mesh.rank, device=parts.mesh.device
        )
        parts.runtime.model.train()
        if config.training.manual_gc:
            gc.disable()
            gc.collect()
        try:
            while self.progress.iteration < self.steps:
                profiler.on_step(self.progress.iteration + 1)
                self._iteration(stepper, stream)
                reason = self._boundary()
                if reason is not None:
                    return reason
            self._check_end()
        finally:
            profiler.close()
            if config.training.manual_gc:
                gc.enable()
        return None

    def _iteration(self, stepper: Stepper, stream: Iterator[Any]) -> None:
        parts, progress = self.parts, self.progress
        number = progress.iteration + 1
        parts.phase("forward", number)
        started = time.perf_counter()
        on_purpose = number in self.skip
        outcome = stepper.skip(stream) if on_purpose else stepper(stream)
        seconds = time.perf_counter() - started
        self._requests = outcome.requests
        if outcome.dropped:
            parts.console.last(f"iteration {number} was cut short and dropped")
            return
        progress.iteration = number
        progress.consumed_train_samples += self.sizes.total
        if on_purpose:
            progress.skipped_train_samples += self.sizes.total
        else:
            progress.floating_point_operations += self._flops()
            self._count(outcome)
        parts.phase("logging")
        for line in parts.runtime.notes():
            parts.console.last(line)
        if outcome.problem is not None:
            parts.console.last(f"iteration {number} skipped: {outcome.problem}")
        if not on_purpose:
            self._report(outcome, seconds)
            self._check_streak(outcome)

    def _count(self, outcome: Outcome) -> None:
        if outcome.skipped:
            self.progress.skipped(nan=not all(map(math.isfinite, outcome.losses.values())))
        else:
            self.progress.applied()
            self.parts.checkpoints.applied()

    def _check_streak(self, outcome: Outcome) -> None:
        """Raise TrainingError after too many skipped steps in a row, the same on all ranks."""
        streak, limit = self.progress.skipped_in_a_row, self.config.fault.max_skipped_iterations
        if outcome.skipped and streak >= limit:
            raise TrainingError(
                f"{streak} iterations in a row were skipped (--max-skipped-iterations {limit});"
                f" iteration {self.progress.iteration}: {outcome.problem}. {self._way_back()}"
            )

    def _check_end(self) -> None:
        """Raise TrainingError where the run ends in a streak of skipped steps, and they are most of
        this launch's: its last state is not what the user wants.
        """
        progress = self.progress
        skipped = progress.skipped_iterations - self._begun_skipped
        if progress.skipped_in_a_row and 2 * skipped > progress.iteration - self._begun_at:
            raise TrainingError(
                f"the run ends at iteration {progress.iteration} after"
                f" {progress.skipped_in_a_row} skipped iterations in a row. {self._way_back()}"
            )

    def _way_back(self) -> str:
        return (
            f"What the run has saved since may be of no use: {self.parts.checkpoints.last_good()}"
            " (--ckpt-step loads an older one). Lower --lr, raise the warm-up, or leave bad data"
            " out by --iterations-to-skip"
        )

    def _report(self, outcome: Outcome, seconds: float) -> None:
        parts, progress = self.parts, self.progress
        parts.log.iteration(
            number=progress.iteration,
            consumed=progress.consumed_train_samples,
            skipped_samples=progress.skipped_train_samples,
            losses=outcome.losses,
            learning_rate=parts.schedule.lr(),
            gradient_norm=outcome.gradient_norm,
            zeros=outcome.zeros,
            seconds=seconds,
            skipped=outcome.skipped,
            skipped_so_far=progress.skipped_iterations,
            nan_so_far=progress.nan_iterations,
            runtime=parts.runtime,
        )

    def _flops(self) -> float:
        tokens = self.sizes.total * (self.config.model.seq_length or 0)
        return (self.parts.flops_per_token or 0.0) * tokens

    # --- boundary --------------------------------------------------------------------------------

    def _boundary(self) -> str | None:
        """Evaluate, keep house, save; the reason for leaving if there is one."""
        parts, number = self.parts, self.progress.iteration
        flags = self.config.validation
        due = flags.eval_interval is not None and number % flags.eval_interval == 0
        due = due and number >= (flags.start_eval_at_iter or 0) and flags.eval_iters > 0
        if due and not self._requests.any:
            self.validate(f"iteration {number}")
        self._keep_house(number)
        parts.phase("saving a checkpoint")
        parts.checkpoints.poll()
        requests = self._requests
        interval = self.config.checkpoint.save_interval
        if not requests.signal and interval is not None and number % interval == 0:
            self.save()
        reason = parts.watch.reason(requests, number, minutes=parts.watch.elapsed_minutes)
        if reason is not None and number > 0:
            self.save()
        return reason

    def save(self) -> None:
        """Save now, unless this iteration is saved."""
        parts = self.parts
        parts.phase("saving a checkpoint")
        with parts.timers.time("save-checkpoint"):
            parts.checkpoints.save(self.progress, parts.runtime, parts.schedule)

    def _keep_house(self, number: int) -> None:
        training = self.config.training
        every = training.manual_gc_interval
        if training.manual_gc and every and number % every == 0:
            gc.collect()
        if self.parts.mesh.device.type != "cuda":
            return
        if training.empty_unused_memory_level >= 1:
            torch.cuda.empty_cache()
        if training.train_sync_interval and number % training.train_sync_interval == 0:
            torch.cuda.synchronize()

    # --- evaluation ------------------------------------------------------------------------------

    def validate(self, where: str) -> None:
        """Evaluate the validation set from where the last evaluation stopped, and print the
        block.

        With ``--skip-train`` it starts at the set's beginning (Megatron-LM's rule): the set is
        built for this one evaluation, and the same samples are seen whatever the checkpoint.
        """
        if self.parts.datasets[1] is None:
            return
        if self._validation is None:
            alone = self.config.training.skip_train
            progress = self.progress
            consumed = 0 if alone else progress.consumed_valid_samples
            order = DataOrder() if alone else progress.valid_order
            self._validation = self._stream("validation", 1, self.evaluation_sizes, consumed, order)
        result = self._evaluate(self._validation, where, "validation")
        self.progress.consumed_valid_samples += result.samples

    def test(self, where: str) -> None:
        """Evaluate the test set from its beginning, and print the block."""
        if self.parts.datasets[2] is not None:
            stream = self._stream("test", 2, self.evaluation_sizes, 0, DataOrder())
            self._evaluate(stream, where, "test")

    def _evaluate(self, stream: BatchStream, where: str, kind: str) -> Evaluation:
        parts = self.parts
        with parts.timers.time("eval-time"):
            result = evaluate(
                parts.runtime.model,
                stream,
                parts.forward_step,
                iterations=self.config.validation.eval_iters,
                sizes=self.evaluation_sizes,
                mesh=parts.mesh,
                watch=parts.watch,
                phase=parts.phase,
            )
        if result.losses is None:
            parts.console.last(f"{kind} at {where} was cut short")
            self._requests = replace(
                self._requests,
                signal=self._requests.signal or result.requests.signal,
                expired=self._requests.expired or result.requests.expired,
            )
        else:
            parts.log.validation(
                result.losses,
                where,
                number=self.progress.iteration,
                consumed=self.progress.consumed_train_samples,
                kind=kind,
            )
            self._check_losses(result.losses, f"{kind} at {where}")
        return result

    def _check_losses(self, losses: Mapping[str, float], where: str) -> None:
        """Count and name what is not finite: the steps have a bound of their own."""
        bad = [f"{name} {value}" for name, value in losses.items() if not math.isfinite(value)]
        if bad:
            self.progress.nan_evaluations += 1
            self.parts.console.last(
                f"WARNING: {where}: {', '.join(bad)} is not finite"
                f" ({self.progress.nan_evaluations} such evaluations so far)"
            )

    @property
    def requests(self) -> Requests:
        """What ranks asked for at the last look."""
        return self._requests

    # --- parts -----------------------------------------------------------------------------------

    def _stream(
        self, split: str, index: int, sizes: Batches, consumed: int, order: DataOrder
    ) -> BatchStream:
        parts = self.parts
        order.begin((sizes.micro, parts.mesh.sample_ranks))
        return BatchStream(
            parts.datasets[index],
            split=split,
            consumed=consumed - order.start,
            layout=(order.layout[0], order.layout[1]),
            micro_batch=sizes.micro,
            kind=self.config.data.dataloader_type or "single",
            mesh=parts.mesh,
            phase=parts.phase,
            timers=parts.timers,
        )

    def _stepper(self) -> Stepper:
        parts = self.parts
        return Stepper(
            runtime=parts.runtime,
            schedule=parts.schedule,
            rate_of=rate_of,
            forward_step=parts.forward_step,
            mesh=parts.mesh,
            watch=parts.watch,
            timers=parts.timers,
            phase=parts.phase,
            micro_batches=self.sizes.count,
            global_batch=self.sizes.total,
            reduce_once=self.config.parallel.gradient_reduction == "step",
            empty_cache=self.config.training.empty_unused_memory_level >= 2,
        )
