"""Measured costs of matrix updates on this cluster's device, for the planner.

Owns the timing of one matrix shape, Newton-Schulz for optimizers that are made of it and whole
updates of all others, and the median over ranks. Invariant: all ranks end with the
same table, so that all compute the same plan. Tested by ``tests/distributed/test_agreement.py``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megamuon.matrices import LogicalParameter
from megamuon.optim.newton_schulz import NewtonSchulzConfig, orthogonalize
from megamuon.ownership.cost import (
    CostFunction,
    CostKey,
    closed_form_cost,
    file_cost,
    measured_costs,
)
from megamuon.ownership.planner import muon_shapes
from megamuon.runtime.config import OptimizerSettings, RuntimeConfig

REPEATS = 5
CACHE = "newton_schulz_times.json"  # in the directory of --ns-cost-cache


def device_name(device: torch.device) -> str:
    """What the cost cache is keyed by: the GPU's name, or "cpu" with its thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def time_newton_schulz(
    shape: tuple[int, int], schulz: NewtonSchulzConfig, device: torch.device, dtype: torch.dtype
) -> float:
    """Median milliseconds of one orthogonalisation of a ``shape`` matrix, after one warm-up."""
    matrix = _sample(shape, device, dtype)
    return _median_time(lambda: orthogonalize(matrix, schulz), device)


def time_update(
    shape: tuple[int, int], optimizer: OptimizerSettings, device: torch.device, dtype: torch.dtype
) -> float:
    """Median milliseconds of one update of a ``shape`` matrix, its share of what happens every few
    updates included.  The warm-up is one period: the first updates may do less.
    """
    recipe, settings = optimizer.recipe, optimizer.matrix
    matrix = _sample(shape, device, dtype)
    update, period = recipe.trial(settings, matrix), recipe.period(settings)

    def updates() -> None:
        for _ in range(period):
            update()

    return _median_time(updates, device, max(1, REPEATS // period)) / period


def _sample(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _median_time(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Milliseconds, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_over_ranks(times: list[float], group: dist.ProcessGroup | None) -> list[float]:
    """Per entry the median over the ranks of ``group``; the same list on every rank."""
    if group is None:
        return times
    everyone: list[list[float] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, times, group=group)
    return [statistics.median(column) for column in zip(*everyone, strict=True)]  # type: ignore[arg-type]


def planned_cost(optimizer: OptimizerSettings, path: str | None = None) -> CostFunction:
    """The closed form of an update, with the constants of ``path`` (None: an H100's)."""
    form, recipe = closed_form_cost(path), optimizer.recipe
    if recipe.work is None:
        return form  # Newton-Schulz, or nothing that is needed whole
    return form.of_work(partial(recipe.work, optimizer.matrix))


def cost_function(
    parameters: tuple[LogicalParameter, ...],
    config: RuntimeConfig,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> CostFunction:
    """The cost source that ``config.ns_cost`` names, for the matrices among ``parameters`` that an
    optimizer takes whole.
    """
    shapes = muon_shapes(parameters)
    if config.ns_cost == "closed-form":
        return planned_cost(config.optimizer, config.ns_cost_file)
    if config.ns_cost == "file":
        if config.ns_cost_file is None:
            raise ValueError("ns_cost='file' needs ns_cost_file (--ns-cost-file)")
        return file_cost(config.ns_cost_file, shapes)
    if config.ns_cost != "measured":
        raise ValueError(f"ns_cost={config.ns_cost!r}: choose measured, file or closed-form")
    optimizer, dtype = config.optimizer, config.master_dtype
    schulz = optimizer.newton_schulz
    if schulz is not None:
        measure = lambda shape: time_newton_schulz(shape, schulz, device, dtype)  # noqa: E731
    else:
        measure = lambda shape: time_update(shape, optimizer, device, dtype)  # noqa: E731
    timed = schulz if schulz is not None else optimizer.matrix
    return measured_costs(
        shapes,
        measure=measure,
        key=CostKey(
            device=device_name(device),
            newton_schulz=f"{timed!r} of {dtype}",
            torch_version=torch.__version__,
        ),
        cache_path=None if config.ns_cost_cache is None else Path(config.ns_cost_cache) / CACHE,
        combine=lambda times: median_over_ranks(times, group),
    )
