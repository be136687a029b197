"""What is averaged between two log lines, and throughput.

Owns the meaning of the averages: losses over the iterations that advanced (a skipped iteration
gives none), time over all iterations of the interval, evaluation and saving left out because the
caller times only training steps. Invariant: an interval in which nothing advanced has loss NaN,
never a comfortable zero. Tested by ``tests/metrics/test_interval.py``.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping

import psutil
import torch


class Interval:
    """Sums since the last reset; printing resets nothing, so a first line may be an extra one."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        self.seconds = 0.0
        self.iterations = 0
        self.skipped = 0
        self.nan = 0
        self._sums: dict[str, float] = {}
        self._extra: dict[str, float] = {}

    def add(
        self,
        losses: Mapping[str, float],
        seconds: float,
        *,
        skipped: bool = False,
        extra: Mapping[str, float] | None = None,
    ) -> None:
        """One training iteration; ``extra`` are further numbers, averaged over all iterations.

        ``losses`` are this iteration's (nats, or whatever the loss function reports), also of a
        skipped one: if one of them is not finite the iteration counts as a NaN iteration, and only
        iterations that advanced enter the mean.
        """
        self.iterations += 1
        self.seconds += seconds
        self.skipped += skipped
        self.nan += any(not math.isfinite(value) for value in losses.values())
        for name, value in (extra or {}).items():
            self._extra[name] = self._extra.get(name, 0.0) + value
        for name, value in losses.items():
            self._sums.setdefault(name, 0.0)
            if not skipped:
                self._sums[name] += value

    @property
    def mean_losses(self) -> dict[str, float]:
        """Mean of each loss over the advanced iterations; NaN where none advanced."""
        advanced = self.iterations - self.skipped
        return {
            name: total / advanced if advanced else math.nan for name, total in self._sums.items()
        }

    @property
    def mean_extra(self) -> dict[str, float]:
        """Mean of each further number over the iterations."""
        return {name: total / max(1, self.iterations) for name, total in self._extra.items()}

    @property
    def milliseconds_per_iteration(self) -> float:
        """Mean wall time of an iteration."""
        return 1000.0 * self.seconds / max(1, self.iterations)


def tokens_per_second(tokens: int, seconds: float) -> float:
    """Training throughput; 0 where no time has passed."""
    return tokens / seconds if seconds > 0 else 0.0


def tflops_per_gpu(flops: float, seconds: float, world_size: int) -> float:
    """Model TFLOP/s per rank, from the model FLOPs of all ranks; 0 where no time has passed."""
    return flops / seconds / world_size / 1e12 if seconds > 0 else 0.0


def memory_sizes(device: torch.device) -> dict[str, int]:
    """Bytes for ``memory_line``: the allocator's on CUDA, the process's resident set on the CPU."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "max allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max reserved": torch.cuda.max_memory_reserved(device),
        }
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"resident": psutil.Process().memory_info().rss, "max resident": peak}
