"""Averages between log lines, throughput, memory."""

from __future__ import annotations

import math

import pytest
import torch

from megamuon.metrics.interval import (
    Interval,
    memory_sizes,
    tflops_per_gpu,
    tokens_per_second,
)


def test_losses_are_averaged_over_advanced_iterations() -> None:
    interval = Interval()
    interval.add({"lm loss": 4.0}, 0.1)
    interval.add({"lm loss": math.nan}, 0.1, skipped=True)
    interval.add({"lm loss": 100.0}, 0.1, skipped=True)  # e.g. a gradient overflow
    interval.add({"lm loss": 2.0}, 0.3)
    assert interval.mean_losses == {"lm loss": 3.0}
    assert (interval.iterations, interval.skipped, interval.nan) == (4, 2, 1)
    assert interval.milliseconds_per_iteration == pytest.approx(150.0)
    interval.reset()
    assert interval.mean_losses == {}
    assert (interval.iterations, interval.skipped, interval.nan) == (0, 0, 0)


def test_an_interval_without_progress_has_loss_nan() -> None:
    interval = Interval()
    interval.add({"lm loss": math.nan}, 0.1, skipped=True)
    assert math.isnan(interval.mean_losses["lm loss"])


def test_throughput() -> None:
    assert tokens_per_second(4096, 2.0) == 2048.0
    assert tokens_per_second(4096, 0.0) == 0.0
    assert tflops_per_gpu(8e12, 2.0, 4) == 1.0
    assert tflops_per_gpu(8e12, 0.0, 4) == 0.0


def test_memory_of_the_cpu_is_the_process() -> None:
    sizes = memory_sizes(torch.device("cpu"))
    assert list(sizes) == ["resident", "max resident"]
    assert 2**24 < sizes["resident"] < 2**40
    assert sizes["max resident"] > 2**24
