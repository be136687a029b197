"""What a training run prints and records.

Owns who prints (the first rank what concerns the run, the last rank what concerns the training,
as Megatron-LM does), when a log line is due, and what goes to TensorBoard and W&B.  Invariants:
every collective in here is entered by all ranks; losses of the log line are means since the last
one, scalars are those of their iteration. Tested by ``tests/training/test_loop.py``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import datetime

import torch
import torch.distributed as dist

from megamuon.arguments import Config, format_config, values_from_config
from megamuon.mesh import Mesh
from megamuon.metrics import (
    Interval,
    LogRecord,
    MetricsWriter,
    ProgressDisplay,
    Timers,
    build_writer,
    log_line,
    memory_line,
    memory_sizes,
    slowest,
    tflops_per_gpu,
    timer_summary,
    tokens_per_second,
    validation_block,
    write_line,
)
from megamuon.runtime import TrainableRuntime
from megamuon.training.descriptions import runtime_line

PUBLISH_WAIT = "publish wait (ms)"
FIRST_MEMORY_LINES = 2  # iterations after which memory is always printed


class Console:
    """Standard output of the first and of the last rank."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.display: ProgressDisplay | None = None

    def first(self, text: str) -> None:
        """Print on rank 0."""
        if self.mesh.rank == 0:
            self._write(text)

    def last(self, text: str) -> None:
        """Print on the last rank."""
        if self.mesh.is_last:
            self._write(text)

    def _write(self, text: str) -> None:
        if self.display is not None:
            self.display.write(text)
        else:
            write_line(text, sys.stdout)


def set_logging_level(config: Config) -> None:
    """``--logging-level``: of Python's root logger, on every rank."""
    if config.logging.logging_level is not None:
        logging.getLogger().setLevel(config.logging.logging_level)


def print_config(config: Config, notes: tuple[str, ...], console: Console) -> None:
    """The resolved arguments and what became of mapped and accepted flags."""
    for note in notes:
        console.first(f"note: {note}")
    console.first(format_config(config))


class RunLog:
    """Log lines, scalars, timers and memory of one run."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        console: Console,
        timers: Timers,
        *,
        train_iterations: int,
        first_iteration: int,
        flops_per_token: float | None,
    ) -> None:
        self.config = config
        self.flags = config.logging
        self.mesh = mesh
        self.console = console
        self.timers = timers
        self.train_iterations = train_iterations
        self.flops_per_token = flops_per_token
        self.tokens = (config.training.global_batch_size or 0) * (config.model.seq_length or 0)
        self.interval = Interval()
        self.writer = self._open_writer() if mesh.is_last else MetricsWriter()
        self._waited = 0.0  # what the runtime had waited at the last iteration
        self._printed = False
        self._memory_lines = 0
        if mesh.is_last:
            console.display = ProgressDisplay(
                train_iterations, done=first_iteration, mode=self.flags.progress
            )

    def _open_writer(self) -> MetricsWriter:
        writer = build_writer(
            tensorboard_dir=self.flags.tensorboard_dir,
            tensorboard_queue_size=self.flags.tensorboard_queue_size,
            wandb_project=self.flags.wandb_project,
            wandb_exp_name=self.flags.wandb_exp_name,
            wandb_entity=self.flags.wandb_entity,
            wandb_save_dir=self.flags.wandb_save_dir,
            save=self.config.checkpoint.save,
        )
        writer.config(values_from_config(self.config))
        return writer

    def iteration(
        self,
        *,
        number: int,
        consumed: int,
        skipped_samples: int,
        losses: Mapping[str, float],
        learning_rate: float,
        gradient_norm: float | None,
        zeros: int | None,
        seconds: float,
        skipped: bool,
        skipped_so_far: int,
        nan_so_far: int,
        runtime: TrainableRuntime,
    ) -> None:
        """Everything that follows one iteration.  All ranks call it alike.

        The counts of skipped iterations so far are the run's, over all launches.
        """
        extra = self._publish_wait(runtime)
        self.interval.add(losses, seconds, skipped=skipped, extra=extra)
        due = number % self.flags.log_interval == 0
        norm = None
        if self.flags.log_params_norm and (due or not self._printed):
            norm = runtime.parameter_norm()
        base = LogRecord(
            iteration=number,
            train_iterations=self.train_iterations,
            consumed_samples=consumed,
            skipped_samples=skipped_samples,
            milliseconds_per_iteration=1000.0 * seconds,
            tflops_per_gpu=self._tflops(seconds),
            learning_rate=learning_rate,
            global_batch_size=self.config.training.global_batch_size or 0,
            losses=dict(losses),
            grad_norm=gradient_norm,
            zeros_in_grad=zeros,
            params_norm=norm,
            extra=extra,
        )
        self._scalars(base)
        if due or not self._printed:
            totals = {"skipped so far": skipped_so_far, "nan so far": nan_so_far}
            self._line(base, totals if skipped_so_far else {})
        if due:
            self._timers(number)
            self.interval.reset()
        self._memory(number, runtime)
        if self.console.display is not None:
            loss = next(iter(losses.values()), None)
            self.console.display.update(number, loss, tokens_per_second(self.tokens, seconds))

    def _publish_wait(self, runtime: TrainableRuntime) -> dict[str, float]:
        """What this rank's gathers have waited for published weights in this iteration."""
        total = runtime.publish_wait()
        if total is None:
            return {}
        waited, self._waited = total - self._waited, total
        return {PUBLISH_WAIT: 1000.0 * waited}

    def _tflops(self, seconds: float) -> float | None:
        if self.flops_per_token is None:
            return None
        return tflops_per_gpu(self.flops_per_token * self.tokens, seconds, self.mesh.world_size)

    def _line(self, last: LogRecord, totals: Mapping[str, int]) -> None:
        interval = self.interval
        seconds = interval.milliseconds_per_iteration / 1000.0
        extra: dict[str, float | int | str] = {**interval.mean_extra, **totals}
        if self.flags.log_throughput:
            extra["tokens per second"] = int(tokens_per_second(self.tokens, seconds))
        record = LogRecord(
            iteration=last.iteration,
            train_iterations=last.train_iterations,
            consumed_samples=last.consumed_samples,
            skipped_samples=last.skipped_samples,
            milliseconds_per_iteration=interval.milliseconds_per_iteration,
            tflops_per_gpu=self._tflops(seconds) if self.flags.log_throughput else None,
            learning_rate=last.learning_rate,
            global_batch_size=last.global_batch_size,
            losses=interval.mean_losses,
            grad_norm=last.grad_norm,
            zeros_in_grad=last.zeros_in_grad,
            params_norm=last.params_norm,
            extra=extra,
            skipped_iterations=interval.skipped,
            nan_iterations=interval.nan,
        )
        self._printed = True
        self.console.last(log_line(record, datetime.now()))

    def _scalars(self, record: LogRecord) -> None:
        if not self.writer or record.iteration % self.flags.tensorboard_log_interval:
            return
        self.writer.training(
            record,
            loss_scale=self.flags.log_loss_scale_to_tensorboard,
            world_size=self.mesh.world_size if self.flags.log_world_size_to_tensorboard else None,
            throughput=self.flags.log_timers_to_tensorboard,
        )
        if self.flags.log_memory_to_tensorboard:
            self.writer.memory(_memory_statistics(self.mesh.device), record.iteration)

    def _timers(self, number: int) -> None:
        if self.timers.level == 0:
            return
        mine = self.timers.elapsed(self.interval.iterations)
        everyone = [mine]
        if self.mesh.world_size > 1:
            everyone = [{} for _ in range(self.mesh.world_size)]
            dist.all_gather_object(everyone, mine)
        self.console.last(timer_summary(everyone, self.timers.option))
        if self.flags.log_timers_to_tensorboard:
            self.writer.timers(slowest(everyone), number)

    def _memory(self, number: int, runtime: TrainableRuntime) -> None:
        every = self.flags.log_memory_interval
        first = self._memory_lines < FIRST_MEMORY_LINES
        if first or (every is not None and number % every == 0):
            self._memory_lines += 1
            sizes = memory_sizes(self.mesh.device)
            self.console.first(memory_line(self.mesh.rank, number, sizes))
            self.console.first(runtime_line(runtime))

    def validation(
        self, losses: Mapping[str, float], where: str, *, number: int, consumed: int, kind: str
    ) -> None:
        """A validation or test block; ``kind`` is "validation" or "test"."""
        self.console.last(validation_block(where, losses))
        if kind == "validation":
            self.writer.validation(
                losses,
                number,
                consumed,
                with_perplexity=self.flags.log_validation_ppl_to_tensorboard,
            )
        else:
            self.writer.scalars({f"{name} test": v for name, v in losses.items()}, number)

    def close(self) -> None:
        """Flush the writers and clear the live line."""
        self.writer.close()
        if self.console.display is not None:
            self.console.display.close()
            self.console.display = None


def _memory_statistics(device: torch.device) -> Mapping[str, int]:
    """The allocator's figures, and on a CPU the process's resident set in their place."""
    if device.type == "cuda":
        return torch.cuda.memory_stats(device)
    sizes = memory_sizes(device)
    return {
        "allocated_bytes.all.current": sizes["resident"],
        "allocated_bytes.all.peak": sizes["max resident"],
    }
