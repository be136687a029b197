"""The measured Newton-Schulz cost of this cluster's device.

Owns the timing of one matrix shape and the median over ranks. Invariant: all ranks end with the
same table, so that all compute the same plan. Tested by ``tests/distributed/test_agreement.py``.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megamuon.matrices import LogicalParameter
from megamuon.optim.muon import MuonConfig
from megamuon.optim.newton_schulz import orthogonalize
from megamuon.ownership.cost import (
    CostFunction,
    CostKey,
    closed_form_cost,
    file_cost,
    measured_costs,
)
from megamuon.ownership.planner import muon_shapes
from megamuon.runtime.config import RuntimeConfig

REPEATS = 5
CACHE = "newton_schulz_times.json"  # in the directory of --ns-cost-cache


def device_name(device: torch.device) -> str:
    """What the cost cache is keyed by: the GPU's name, or "cpu" with its thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def time_newton_schulz(
    shape: tuple[int, int], muon: MuonConfig, device: torch.device, dtype: torch.dtype
) -> float:
    """Median milliseconds of one orthogonalisation of a ``shape`` matrix, after one warm-up."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator).to(device, dtype)
    times = []
    for _ in range(REPEATS + 1):
        _synchronize(device)
        start = time.perf_counter()
        orthogonalize(matrix, muon.newton_schulz)
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


def cost_function(
    parameters: tuple[LogicalParameter, ...],
    config: RuntimeConfig,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> CostFunction:
    """The cost source that ``config.ns_cost`` names, for the Muon matrices among ``parameters``."""
    shapes = muon_shapes(parameters)
    if config.ns_cost == "closed-form":
        return closed_form_cost(config.ns_cost_file)
    if config.ns_cost == "file":
        if config.ns_cost_file is None:
            raise ValueError("ns_cost='file' needs ns_cost_file (--ns-cost-file)")
        return file_cost(config.ns_cost_file, shapes)
    if config.ns_cost != "measured":
        raise ValueError(f"ns_cost={config.ns_cost!r}: choose measured, file or closed-form")
    muon = config.optimizer.muon
    return measured_costs(
        shapes,
        measure=lambda shape: time_newton_schulz(shape, muon, device, config.master_dtype),
        key=CostKey(
            device=device_name(device),
            newton_schulz=f"{muon.newton_schulz!r} of {config.master_dtype}",
            torch_version=torch.__version__,
        ),
        cache_path=None if config.ns_cost_cache is None else Path(config.ns_cost_cache) / CACHE,
        combine=lambda times: median_over_ranks(times, group),
    )
