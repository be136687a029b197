"""The training loop: iterations, logs, evaluations and the decision to leave.

Owns the order of events at a step boundary (``specs`` of Megatron-LM's loop): log, evaluate,
house-keeping, then signal, regular save, duration, interval.  Invariant: all ranks take the same
branch at every boundary. Tested by ``tests/training/test_loop.py`` and
``tests/distributed/test_pretrain_exits.py``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamuon.arguments import Config
from megamuon.mesh import Mesh
from megamuon.metrics import Timers
from megamuon.optim import Schedule
from megamuon.profiling import Profiler
from megamuon.runtime import Runtime
from megamuon.training.batches import BatchStream
from megamuon.training.builders import (
    Batches,
    batches,
    evaluation_batches,
    profiling_settings,
    rate_of,
    train_iterations,
)
from megamuon.training.checkpointing import Progress, RunCheckpoints
from megamuon.training.evaluation import Evaluation, evaluate
from megamuon.training.exits import ExitWatch, Requests
from megamuon.training.failures import Phase
from megamuon.training.logging import Console, RunLog
from megamuon.training.reports import ForwardStep
from megamuon.training.step import Outcome, Stepper


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run consists of."""

    config: Config
    mesh: Mesh
    console: Console
    phase: Phase
    timers: Timers
    runtime: Runtime
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
        self.sizes = batches(parts.config, parts.mesh.data_parallel_size)
        self.evaluation_sizes = evaluation_batches(parts.config, parts.mesh.data_parallel_size)
        self.skip = frozenset(parts.config.fault.iterations_to_skip)
        # Kept over all evaluations: opening a stream is work, and its position is the counter's.
        self._validation: BatchStream | None = None
        self._requests = Requests()

    # --- training --------------------------------------------------------------------------------

    def train(self) -> str | None:
        """Train to the last iteration.  Returns the reason for leaving early, None at the end."""
        parts, config = self.parts, self.config
        consumed = self.progress.consumed_train_samples
        stepper, stream = self._stepper(), self._stream("training", 0, self.sizes, consumed)
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
        if number in self.skip:
            outcome = stepper.skip(stream)
            progress.skipped_train_samples += self.sizes.total
        else:
            outcome = stepper(stream)
            progress.floating_point_operations += self._flops()
        seconds = time.perf_counter() - started
        progress.iteration = number
        progress.consumed_train_samples += self.sizes.total
        self._requests = outcome.requests
        parts.phase("logging")
        for line in parts.runtime.notes():
            parts.console.last(line)
        if outcome.problem is not None:
            parts.console.last(f"iteration {number} skipped: {outcome.problem}")
        if number not in self.skip:
            self._report(outcome, seconds)

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
        if reason is not None:
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
            consumed = 0 if alone else self.progress.consumed_valid_samples
            self._validation = self._stream("validation", 1, self.evaluation_sizes, consumed)
        result = self._evaluate(self._validation, where, "validation")
        self.progress.consumed_valid_samples += result.samples

    def test(self, where: str) -> None:
        """Evaluate the test set from its beginning, and print the block."""
        if self.parts.datasets[2] is not None:
            self._evaluate(self._stream("test", 2, self.evaluation_sizes, 0), where, "test")

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
        return result

    @property
    def requests(self) -> Requests:
        """What ranks asked for at the last look."""
        return self._requests

    # --- parts -----------------------------------------------------------------------------------

    def _stream(self, split: str, index: int, sizes: Batches, consumed: int) -> BatchStream:
        parts = self.parts
        return BatchStream(
            parts.datasets[index],
            split=split,
            consumed=consumed,
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
            rate_of=lambda schedule: rate_of(self.config, schedule),
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
