"""Scalars for TensorBoard and Weights & Biases, under Megatron-LM's names.

Owns which scalar has which name and step. Invariant: each destination works without the other; in
TensorBoard the names marked as paired are also written as ``<name> vs samples`` with the consumed
samples as the step. A destination that was asked for and cannot be opened is an error that names
its flag, never a silent loss of the record. Tested by ``tests/metrics/test_writers.py``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megamuon.metrics.log_line import LogRecord, perplexity


class WriterError(RuntimeError):
    """A destination of the metrics cannot be opened."""


class ScalarWriter(Protocol):
    """One destination."""

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """Write values of one iteration; with ``samples``, also against consumed samples where that
        is kept.
        """

    def config(self, values: Mapping[str, Any]) -> None:
        """Write the resolved arguments of the run."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoardWriter:
    """Event files in ``directory``; ``queue_size`` events wait before a flush."""

    def __init__(self, directory: str | os.PathLike[str], *, queue_size: int = 1000) -> None:
        module = _optional_import(
            "torch.utils.tensorboard", "tensorboard", f"--tensorboard-dir {directory}"
        )
        self._writer = module.SummaryWriter(log_dir=os.fspath(directory), max_queue=queue_size)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """Each value at ``iteration`` and, with ``samples``, again as ``<name> vs samples``."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{name} vs samples", value, samples)

    def config(self, values: Mapping[str, Any]) -> None:
        """One text entry per argument."""
        for name, value in values.items():
            self._writer.add_text(name, str(value))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbWriter:
    """A Weights & Biases run; ``name`` None or "" lets the service choose one."""

    def __init__(
        self,
        project: str,
        *,
        name: str | None,
        entity: str | None,
        directory: str | os.PathLike[str],
    ) -> None:
        wandb = _optional_import("wandb", "wandb", f"--wandb-project {project}")
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project, name=name or None, entity=entity or None, dir=os.fspath(directory)
        )

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None) -> None:
        """All values in one record; the samples are a scalar of their own to plot against."""
        record = dict(values)
        if samples is not None:
            record["samples vs steps"] = samples
        self._run.log(record, step=iteration)

    def config(self, values: Mapping[str, Any]) -> None:
        """The run's configuration; values that are not plain become text."""
        plain = (bool, int, float, str, type(None))
        self._run.config.update(
            {
                name: value if isinstance(value, plain) else str(value)
                for name, value in values.items()
            }
        )

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MetricsWriter:
    """All destinations of one run; with none, every call does nothing."""

    def __init__(self, destinations: tuple[ScalarWriter, ...] = ()) -> None:
        self._destinations = destinations

    def __bool__(self) -> bool:
        return bool(self._destinations)

    def training(
        self,
        record: LogRecord,
        *,
        loss_scale: bool = True,
        world_size: int | None = None,
        throughput: bool = False,
    ) -> None:
        """The scalars of one training iteration.

        ``loss_scale`` False drops that scalar, ``world_size`` adds one, ``throughput`` adds time
        and TFLOP/s (``--log-timers-to-tensorboard``).
        """
        paired: dict[str, float] = {"batch-size": record.global_batch_size, **record.losses}
        if record.learning_rate is not None:
            paired["learning-rate"] = record.learning_rate
        if loss_scale:
            paired["loss-scale"] = record.loss_scale
        if world_size is not None:
            paired["world-size"] = world_size
        if record.grad_norm is not None:
            paired["grad-norm"] = record.grad_norm
        if record.zeros_in_grad is not None:
            paired["num-zeros"] = record.zeros_in_grad
        if record.params_norm is not None:
            paired["params-norm"] = record.params_norm
        numbers = (int, float)
        paired |= {
            name: value for name, value in record.extra.items() if isinstance(value, numbers)
        }
        self.scalars(paired, record.iteration, record.consumed_samples)
        single: dict[str, float] = {}
        if record.skipped_samples > 0:
            single["skipped-train-samples"] = record.skipped_samples
        if throughput:
            single["iteration-time"] = record.milliseconds_per_iteration / 1000.0
            if record.tflops_per_gpu is not None:
                single["throughput"] = record.tflops_per_gpu
        self.scalars(single, record.iteration)

    def validation(
        self,
        losses: Mapping[str, float],
        iteration: int,
        samples: int,
        *,
        set_name: str = "",
        with_perplexity: bool = False,
    ) -> None:
        """``<loss> validation[-set]`` and, on request, its perplexity."""
        suffix = f"-{set_name}" if set_name else ""
        values: dict[str, float] = {}
        for name, loss in losses.items():
            values[f"{name} validation{suffix}"] = loss
            if with_perplexity:
                values[f"{name} validation{suffix} ppl"] = perplexity(loss)
        self.scalars(values, iteration, samples)

    def timers(self, slowest: Mapping[str, float], iteration: int) -> None:
        """``<timer>-time`` in seconds, the maximum over ranks; input in milliseconds."""
        self.scalars({f"{name}-time": value / 1000.0 for name, value in slowest.items()}, iteration)

    def memory(self, statistics: Mapping[str, int], iteration: int) -> None:
        """Allocator bytes from ``torch.cuda.memory_stats``; missing fields are left out."""
        names = {
            "mem-reserved-bytes": "reserved_bytes.all.current",
            "mem-allocated-bytes": "allocated_bytes.all.current",
            "mem-max-allocated-bytes": "allocated_bytes.all.peak",
            "mem-allocated-count": "allocation.all.current",
        }
        found = {name: statistics[key] for name, key in names.items() if key in statistics}
        self.scalars(found, iteration)

    def scalars(
        self, values: Mapping[str, float], iteration: int, samples: int | None = None
    ) -> None:
        """Any further scalars; with ``samples`` also against consumed samples."""
        if values:
            for destination in self._destinations:
                destination.scalars(values, iteration, samples)

    def config(self, values: Mapping[str, Any]) -> None:
        """Write the resolved arguments everywhere."""
        for destination in self._destinations:
            destination.config(values)

    def close(self) -> None:
        """Flush and close every destination."""
        for destination in self._destinations:
            destination.close()


def build_writer(
    *,
    tensorboard_dir: str | None = None,
    tensorboard_queue_size: int = 1000,
    wandb_project: str | None = None,
    wandb_exp_name: str | None = None,
    wandb_entity: str | None = None,
    wandb_save_dir: str | None = None,
    save: str | None = None,
) -> MetricsWriter:
    """Open what the flags ask for; call it on the last rank only.

    W&B files go to ``wandb_save_dir``, else ``<save>/wandb``, else ``wandb``. Raises WriterError.
    """
    destinations: list[ScalarWriter] = []
    if tensorboard_dir:
        destinations.append(TensorBoardWriter(tensorboard_dir, queue_size=tensorboard_queue_size))
    if wandb_project:
        directory = wandb_save_dir or (os.path.join(save, "wandb") if save else "wandb")
        destinations.append(
            WandbWriter(
                wandb_project, name=wandb_exp_name, entity=wandb_entity, directory=directory
            )
        )
    return MetricsWriter(tuple(destinations))


def _optional_import(module: str, package: str, flag: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise WriterError(
            f"{flag} needs the Python package {package}, which does not import ({error}): "
            f"pip install {package}, or drop the flag"
        ) from error
