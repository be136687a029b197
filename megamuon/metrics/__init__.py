"""What a run reports: log line, averages, timers, scalars, live progress.

Owns text and names, no training state. Tested by ``tests/metrics/``.
"""

from megamuon.console import write_line
from megamuon.metrics.interval import (
    Interval,
    memory_sizes,
    tflops_per_gpu,
    tokens_per_second,
)
from megamuon.metrics.log_line import LogRecord, log_line, memory_line, perplexity, validation_block
from megamuon.metrics.progress import ProgressDisplay
from megamuon.metrics.timers import Timers, slowest, timer_summary
from megamuon.metrics.writers import MetricsWriter, WriterError, build_writer

__all__ = [
    "Interval",
    "LogRecord",
    "MetricsWriter",
    "ProgressDisplay",
    "Timers",
    "WriterError",
    "build_writer",
    "log_line",
    "memory_line",
    "memory_sizes",
    "perplexity",
    "slowest",
    "tflops_per_gpu",
    "timer_summary",
    "tokens_per_second",
    "validation_block",
    "write_line",
]
