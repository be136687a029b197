"""The text that a training run prints: log line, validation block, memory line.

Owns the formats. Invariant: fields, order and spelling are those of Megatron-LM's log (so that
regular expressions written for it work), with two differences: losses that are NaN or negative are
printed instead of dropped, and extra fields stand between the norms and the counters of skipped
iterations. Pure: values in, text out; no clock, no rank. Tested by
``tests/metrics/test_log_line.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

MEBIBYTE = 1024 * 1024
BALANCING_LOSS = "load_balancing_loss"  # Megatron's name for the auxiliary loss of routers


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """What one log line says; ``None`` leaves an optional field out."""

    iteration: int
    train_iterations: int
    consumed_samples: int
    skipped_samples: int = 0
    milliseconds_per_iteration: float  # mean over the interval, evaluation excluded
    tflops_per_gpu: float | None = None
    learning_rate: float | None = None
    global_batch_size: int
    losses: Mapping[str, float] = field(default_factory=dict)  # means over the advanced iterations
    loss_scale: float = 1.0
    grad_norm: float | None = None
    zeros_in_grad: int | None = None
    params_norm: float | None = None
    extra: Mapping[str, float | int | str] = field(default_factory=dict)  # e.g. "muon update rms"
    skipped_iterations: int = 0
    nan_iterations: int = 0


def log_line(record: LogRecord, now: datetime) -> str:
    """One line without a newline; it is printed on the last rank.

    The timestamp has whole seconds: that is what most parsers of this line expect.
    """
    fields = [f"iteration {record.iteration:8d}/{record.train_iterations:8d}"]
    fields.append(f"consumed samples: {record.consumed_samples:12d}")
    if record.skipped_samples > 0:
        fields.append(f"skipped samples: {record.skipped_samples:12d}")
    fields.append(f"elapsed time per iteration (ms): {record.milliseconds_per_iteration:.1f}")
    if record.tflops_per_gpu is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {record.tflops_per_gpu:.1f}")
    if record.learning_rate is not None:
        fields.append(f"learning rate: {record.learning_rate:.6E}")
    fields.append(f"global batch size: {record.global_batch_size:5d}")
    fields += [f"{name}: {value:.6E}" for name, value in record.losses.items()]
    fields.append(f"loss scale: {record.loss_scale:.1f}")
    if record.grad_norm is not None:
        fields.append(f"grad norm: {record.grad_norm:.3f}")
    if record.zeros_in_grad is not None:
        fields.append(f"num zeros: {record.zeros_in_grad}")
    if record.params_norm is not None:
        fields.append(f"params norm: {record.params_norm:.3f}")
    fields += [f"{name}: {extra_text(value)}" for name, value in record.extra.items()]
    fields.append(f"number of skipped iterations: {record.skipped_iterations:3d}")
    fields.append(f"number of nan iterations: {record.nan_iterations:3d}")
    return f" [{now:%Y-%m-%d %H:%M:%S}] " + "".join(f"{text} | " for text in fields).rstrip(" ")


def extra_text(value: float | int | str) -> str:
    """An extra field's value: three decimals, or scientific where those would show only zeros."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value == 0 or not abs(value) < 1e-3 else f"{value:.3E}"


def perplexity(loss: float) -> float:
    """``exp(loss)`` with the exponent capped at 20; NaN stays NaN."""
    return math.nan if math.isnan(loss) else math.exp(min(20.0, loss))


def validation_block(where: str, losses: Mapping[str, float], set_name: str = "") -> str:
    """Three lines: dashes, the losses with their perplexities, dashes.

    ``where`` is e.g. ``iteration 100`` or ``iteration 100 on test set``; ``set_name`` labels one of
    several sets.
    """
    suffix = f"-{set_name}" if set_name else ""
    line = f" validation{suffix} loss at {where} | "
    for name, loss in losses.items():
        line += f"{name} value: {loss:.6E} | "
        if name != BALANCING_LOSS:  # a perplexity is of a loss over tokens
            line += f"{name} PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def memory_line(rank: int, iteration: int, sizes: Mapping[str, int]) -> str:
    """One rank's memory after an iteration; ``sizes`` in bytes, printed in units of 2**20."""
    fields = " | ".join(f"{name}: {size / MEBIBYTE:.2f}" for name, size in sizes.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {fields}"
