"""Ranks of NCCL's device interface on the GPUs that are there: their results and their times.

Owns the part of ``gpu_checks.py`` that needs torch: one rank for each GPU, rank modulo their
number, or two ranks on the only one, where NCCL allows that. Invariants: a wrong element is a
failure; ranks that cannot run are "not run", with the reason; times stand beside NCCL's own calls
of the same bytes. What it makes of the ranks' results is tested by
``tests/tools/test_gpu_checks.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megamuon.collectives.device_engine import DeviceEngine

PROGRAM = Path(__file__).with_name("gpu_checks.py")  # starts a rank
MIB = 1 << 20
BLOCKS = 16  # of a call
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
TIMED_BYTES = (MIB // 4, 4 * MIB, 64 * MIB)  # of a group's gather, and of its gradients
REPEATS = 20

Report = dict[str, Any]


def nccl_rank(rank: int, ranks: int, store_path: str, multicast: bool) -> dict[str, object]:
    """Communicator, windows, gathers and reductions at one rank of 1 x ``ranks``, checked, then
    timed beside NCCL's own calls.
    """
    import torch
    import torch.distributed as dist

    from megamuon.collectives.device_engine import DeviceEngine
    from megamuon.collectives.device_library import DeviceLibrary, available

    if reason := available():
        return {"stage": "library", "error": reason}
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(store_path, ranks)
    library = DeviceLibrary()
    if rank == 0:
        store.set("id", DeviceEngine.unique_id(library))
    engine = DeviceEngine(
        library,
        bytes(store.get("id")),
        rank=rank,
        nodes=1,
        columns=ranks,
        device=device.index,
        operators=2,
        multimem=multicast,
        deadline=15.0,
    )
    found = engine.capability()
    capability = {name: getattr(found, name) for name, _ in type(found)._fields_}
    if multicast and not engine.multimem:
        engine.close()
        reason = "the GPUs have no common multicast address"
        return {"stage": "multicast", "error": reason, "capability": capability}
    bench = RankBench(engine, rank, ranks, device)
    differs = bench.check_gather(), bench.check_reduction()
    dist.init_process_group(
        "nccl", store=dist.PrefixStore("nccl", store), rank=rank, world_size=ranks
    )
    times = [bench.time(nbytes) for nbytes in TIMED_BYTES]
    engine.check()
    dist.destroy_process_group()
    engine.close()
    return {
        "stage": "done",
        "error": "",
        "device": device.index,
        "capability": capability,
        "gather_differs": differs[0],
        "reduction_differs": differs[1],
        "times": times,
    }


class RankBench:
    """The two operators of one rank over a pool of gathered bytes, gradients and a window."""

    def __init__(self, engine: DeviceEngine, rank: int, ranks: int, device: torch.device) -> None:
        import torch

        from megamuon.collectives.device_streams import CudaStreams
        from megamuon.collectives.operator_settings import OperatorConfig

        self.engine, self.rank, self.ranks = engine, rank, ranks
        self.span = max(TIMED_BYTES)
        self.stream = torch.cuda.current_stream().cuda_stream
        self.places = tuple(range(ranks))
        gather = OperatorConfig(
            kind="all_gather",
            nodes=1,
            columns=ranks,
            ranks=self.places,
            control_offset=0,
            groups=BLOCKS,
        )
        reduce = replace(gather, kind="reduce_scatter", control_offset=engine.control_bytes(gather))
        pool = engine.open(reduce.control_offset + engine.control_bytes(reduce), 3 * self.span)
        memory = CudaStreams(device).memory(pool, 3 * self.span)
        self.gathered, self.slots, self.window = memory.split(self.span)
        self.gather_op = engine.operator(gather, "gather")
        self.reduce_op = engine.operator(reduce, "reduce")
        self.tables = {nbytes: self._tables(nbytes) for nbytes in TIMED_BYTES}
        engine.upload()

    def share(self, nbytes: int) -> int:
        """Bytes of a rank's part; a multiple of what a multicast store moves."""
        return nbytes // self.ranks // 16 * 16

    def _tables(self, nbytes: int) -> tuple[int, int]:
        import torch

        share, name = self.share(nbytes), f"{nbytes} bytes"
        gathers = [(0, k, k * share, share) for k in self.places]
        sums = [(0, k, k * share // 4, share // 4, 0) for k in self.places]
        f32 = {"slot": torch.float32, "wire": torch.float32, "window": torch.float32}
        return (
            self.engine.gather_table(self.gather_op, gathers, name),
            self.engine.reduce_table(self.reduce_op, sums, name, **f32),
        )

    def gather(self, nbytes: int) -> None:
        """One call."""
        self.engine.gather(self.gather_op, self.tables[nbytes][0], 0, self.stream)

    def reduce(self, nbytes: int) -> None:
        """One call: means of the gradients."""
        self.engine.reduce(
            self.reduce_op,
            self.tables[nbytes][1],
            self.span,
            2 * self.span,
            self.stream,
            first=True,
            divisor=float(self.ranks),
        )

    def check_gather(self) -> int:
        """Bytes that differ after three calls."""
        import torch

        share = self.share(self.span)
        torch.manual_seed(1)
        expected = torch.randint(0, 255, (share * self.ranks,), dtype=torch.uint8, device="cuda")
        mine = slice(self.rank * share, (self.rank + 1) * share)
        self.gathered.fill_(0xEE)
        self.gathered[mine] = expected[mine]
        for _ in range(3):
            self.gather(self.span)
        torch.cuda.synchronize()
        self.engine.check()
        return int((self.gathered[: expected.numel()] != expected).sum())

    def check_reduction(self) -> int:
        """Elements of the window that differ: sums of small integers are exact in any order."""
        import torch

        share = self.share(self.span) // 4
        pattern = torch.arange(share * self.ranks, device="cuda") % 1000
        self.slots.view(torch.float32)[: pattern.numel()] = pattern + self.rank
        self.reduce(self.span)
        torch.cuda.synchronize()
        self.engine.check()
        mean = pattern.float() + (self.ranks - 1) / 2
        window = self.window.view(torch.float32)[:share]
        return int((window != mean[self.rank * share : (self.rank + 1) * share]).sum())

    def time(self, nbytes: int) -> dict[str, float]:
        """Microseconds of a call of each kind, by the operators and by NCCL's own."""
        import torch
        import torch.distributed as dist

        whole = self.share(nbytes) * self.ranks
        mine = slice(self.rank * self.share(nbytes), (self.rank + 1) * self.share(nbytes))
        gathered, window = self.gathered[:whole], self.window[: self.share(nbytes)]
        slots = self.slots[:whole].view(torch.float32)
        calls = {
            "gather": lambda: self.gather(nbytes),
            "nccl_gather": lambda: dist.all_gather_into_tensor(gathered, gathered[mine]),
            "reduce": lambda: self.reduce(nbytes),
            "nccl_reduce": lambda: dist.reduce_scatter_tensor(window.view(torch.float32), slots),
        }
        found: dict[str, float] = {"bytes": nbytes}
        for name, call in calls.items():
            call()  # once before: the first call of NCCL connects
            dist.barrier()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPEATS):
                call()
            stop.record()
            stop.synchronize()
            found[f"{name}_us"] = round(start.elapsed_time(stop) * 1000 / REPEATS, 2)
        return found


def nccl(multicast: bool) -> Report:
    """Try it with a rank for each GPU, or two on the only one, and say what happened."""
    import tempfile

    import torch

    ranks = max(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(PROGRAM), "rank"]
        environment = {**os.environ, "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), f"{folder}/store", str(int(multicast))],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + 75
        results = [_read_rank(process, deadline) for process in processes]
    for rank, result in enumerate(results):
        print(f"gpu_checks: nccl rank {rank}: {json.dumps(result)}")
    return judge_ranks(results)


def judge_ranks(results: Sequence[dict[str, object]]) -> Report:
    """A wrong result is a failure; where the ranks could not run, the reason of the first."""
    wrong = sum(
        int(result.get("gather_differs", 0)) + int(result.get("reduction_differs", 0))
        for result in results
    )
    halted = [(rank, held) for rank, held in enumerate(results) if held.get("stage") != "done"]
    status, reason = PASSED, ""
    if wrong:
        status, reason = FAILED, f"{wrong} elements differ"
    elif halted:
        rank, held = halted[0]
        status, reason = NOT_RUN, f"rank {rank}, at stage {held.get('stage')!r}: {held['error']}"
    return {"status": status, "reason": reason, "ranks": list(results)}


def _read_rank(process: subprocess.Popen[str], deadline: float) -> dict[str, object]:
    try:
        output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return {"stage": "timeout", "error": output.strip()[-600:]}
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {"stage": "crash", "error": output.strip()[-600:]}


def run_rank(rank: int, ranks: int, store_path: str, multicast: bool) -> dict[str, object]:
    """``nccl_rank``, with what it raises as its result."""
    try:
        return nccl_rank(rank, ranks, store_path, multicast)
    except Exception as error:  # the finding of the attempt, whatever it is
        return {"stage": "error", "error": f"{type(error).__name__}: {error}"}
