"""What the benches share: ranks on this machine, a look at the load.

Owns ``run_bench_ranks`` (processes of one Gloo group), ``warn_if_busy`` and ``machine_facts``.
Invariant: of ranks that fail, the first is named and the others end. Tested by
``tests/tools/test_bench_common.py``.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import queue
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported once by the server that ranks are forked from, so that a start is cheap.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "tools.bench.systems",
)


def warn_if_busy() -> None:
    """Absolute times are noise on a busy machine; ratios of interleaved runs suffer less, but say
    so.
    """
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    if load > 0.7 * cores:
        print(f"note: load {load:.1f} on {cores} cores; times are too high", file=sys.stderr)


def machine_facts() -> dict[str, Any]:
    """What times depend on, for the files that hold them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def _main(
    function: Callable[..., Any],
    rank: int,
    world: int,
    folder: str,
    arguments: tuple[Any, ...],
    results: Any,
) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
        )
        results.put((rank, function(rank, world, *arguments), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def run_bench_ranks(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    folder: Path,
    timeout: float = 3600.0,
) -> list[Any]:
    """``function(rank, world, *arguments)`` on ``world`` fresh processes of one Gloo group; values
    by rank.

    Raises RuntimeError with the traceback of the first rank that failed, after ending the others.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    results = context.Queue()
    processes = [
        context.Process(
            target=_main, args=(function, rank, world, str(folder), arguments, results), daemon=True
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    values: dict[int, Any] = {}
    try:
        while len(values) < world:
            try:
                rank, value, problem = results.get(timeout=timeout)
            except queue.Empty:
                missing = sorted(set(range(world)) - set(values))
                raise RuntimeError(f"ranks {missing} gave no result in {timeout:.0f} s") from None
            if problem:
                raise RuntimeError(f"rank {rank} failed:\n{problem}")
            values[rank] = value
        for process in processes:
            process.join(timeout=30)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    return [values[rank] for rank in range(world)]
