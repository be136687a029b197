"""What a rank of ``collectives.py`` does: the same data moved by several systems, in turns.

Owns the shape of the data, the operators over a whole grid, and the timing. Invariants: every
system moves the same values and is compared with them before it is timed; the systems take turns
call by call, and each call starts on all ranks together. Tested by
``tests/tools/test_bench_collectives.py``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives import SegmentTable, TableSegment, Transport, Work
from megamuon.collectives.base import TransportSettings
from megamuon.collectives.grouped import GroupedTransport
from megamuon.collectives.host_engine import HostEngine, HostGather, HostReduce
from megamuon.collectives.host_library import library
from megamuon.collectives.operator_settings import OperatorConfig, ReadySettings
from megamuon.collectives.operators import Ticket
from megamuon.collectives.per_owner import PerOwnerTransport
from megamuon.collectives.symmetric import SymmetricMemory

OPERATIONS = ("gather", "reduce")
RATIO = (1, 2, 3)  # lengths of segments, in turn
ALIGNMENT = 256
LARGE = 16 << 20  # from here on plain copies are timed too
VALUES = 8  # integers below it are summed: exact in BF16 on up to 36 ranks
OTHER = -1  # what a buffer holds before the collective
SYSTEMS = ("ready", "per_owner", "grouped", "equal_length")
COPY = "copy"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is measured; equal on all ranks."""

    replicas: int
    shards: int
    sizes: tuple[int, ...]  # bytes of the whole payload
    operations: tuple[str, ...]
    dtype: torch.dtype
    repeats: int  # of every size; 0: by the size


def repeats_of(nbytes: int) -> int:
    """As many timed calls of each system as keep the whole run short."""
    return max(5, min(60, (240 << 20) // nbytes))


def cut(numel: int, replicas: int, shards: int) -> SegmentTable:
    """One segment for each owner, lengths 1:2:3:1:...; owners are the first ranks of the nodes, or
    on one node all ranks.
    """
    owners = (
        [replica * shards for replica in range(replicas)] if replicas > 1 else list(range(shards))
    )
    weights = [RATIO[i % len(RATIO)] for i in range(len(owners))]
    bounds = [numel * sum(weights[:i]) // sum(weights) for i in range(len(owners) + 1)]
    return SegmentTable.build(
        replicas * shards,
        [
            TableSegment(rank=owner, offset=start, numel=stop - start)
            for owner, start, stop in zip(owners, bounds, bounds[1:], strict=False)
        ],
    )


# --- the operators -------------------------------------------------------------------------------


def aligned(nbytes: int) -> int:
    """``nbytes`` or a little more."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place_operators(
    replicas: int, shards: int, settings: ReadySettings
) -> tuple[dict[str, OperatorConfig], int]:
    """A gather and a reduction over all ranks of a grid, and the bytes of a control segment."""
    common = OperatorConfig(
        kind="all_gather",
        nodes=replicas,
        columns=shards,
        ranks=tuple(range(replicas * shards)),
        control_offset=aligned(library().engine_control_bytes()),
        slots=settings.slots,
        chunk_bytes=settings.chunk_bytes,
        star_bytes=settings.star_bytes // shards,
    )
    end = common.control_offset + aligned(library().operator_control_bytes(common))
    reduce = replace(common, kind="reduce_scatter", control_offset=end)
    end += aligned(library().operator_control_bytes(reduce))
    return {"gather": common, "reduce": reduce}, end


def gather_table(
    operator: HostGather, table: SegmentTable, shards: int, itemsize: int, name: str
) -> int:
    """The operator's number of ``table``, whose ranks are those of the grid."""
    return operator.all_gather_table(
        nodes=[s.rank // shards for s in table.segments],
        columns=[s.rank % shards for s in table.segments],
        offsets=[s.offset * itemsize for s in table.segments],
        nbytes=[s.numel * itemsize for s in table.segments],
        name=name,
    )


def reduce_table(
    operator: HostReduce, table: SegmentTable, shards: int, dtype: torch.dtype, name: str
) -> int:
    """As ``gather_table``; sums are taken in FP32, each owner's segment at its window's start."""
    return operator.reduce_scatter_table(
        nodes=[s.rank // shards for s in table.segments],
        columns=[s.rank % shards for s in table.segments],
        offsets=[s.offset for s in table.segments],
        numels=[s.numel for s in table.segments],
        windows=[0] * len(table.segments),
        slot_dtype=dtype,
        wire_dtype=dtype,
        window_dtype=torch.float32,
        name=name,
    )


class Operators:
    """Engine, operators and pool of this rank, over all ranks. Making it is collective.

    A run gathers inside a replica alone (``HostFabric``); here a gather crosses nodes as well, as
    in the paper's measurements.
    """

    def __init__(self, replicas: int, shards: int, pool_bytes: int) -> None:
        group = dist.group.WORLD
        configs, control_bytes = place_operators(replicas, shards, ReadySettings())
        self._control = SymmetricMemory(group, control_bytes, label="control")
        self.pool = SymmetricMemory(group, pool_bytes, label="pool")
        self.engine = HostEngine(
            rank=dist.get_rank(),
            control=self._control.bases,
            pids=self._control.pids,
            deadline=60,
            keep=self._control.mapped,
        )
        self.operators = {name: self.engine.operator(configs[name], name) for name in OPERATIONS}
        for operator in self.operators.values():
            operator.set_pool(self.pool.bases, keep=self.pool.mapped)
        dist.barrier()

    def close(self) -> None:
        """Stop the engine; collective."""
        dist.barrier()
        self.engine.close()
        self._control.close()
        self.pool.close()


# --- starting together ---------------------------------------------------------------------------


class Start:
    """A barrier that ranks leave within microseconds of each other. Making it is collective.

    Gloo's own takes a millisecond, and ranks leave it as far apart, which would hide small calls.
    Ranks that come early sleep, so that they take no core from those that still work.
    """

    def __init__(self) -> None:
        group = dist.group.WORLD
        self._memory = SymmetricMemory(group, 2 * ALIGNMENT, label="start")
        self._words = [
            [ctypes.c_int64.from_address(base + place * ALIGNMENT) for base in self._memory.bases]
            for place in range(2)
        ]
        self._count = 0

    def __call__(self) -> None:
        """Return when all ranks have called."""
        self._count += 1
        self._meet(0, lambda: time.sleep(1e-4))
        self._meet(1, os.sched_yield)

    def _meet(self, place: int, idle: Callable[[], None]) -> None:
        words = self._words[place]
        words[self._memory.rank].value = self._count
        while any(word.value < self._count for word in words):
            idle()

    def close(self) -> None:
        """Give the memory up; collective."""
        dist.barrier()
        self._words = []
        self._memory.close()


def in_turns(
    calls: Mapping[str, Callable[[], None]], repeats: int, start: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each call on this rank. Who is first changes from repeat to repeat."""
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            call = calls[name]
            start()
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


# --- one size ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Systems:
    """Everything that moves data."""

    job: Job
    own: Operators
    library: tuple[Transport, ...]
    start: Start


def payload(numel: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Small integers that depend on rank and place."""
    return torch.arange(numel, dtype=torch.int32).add_(7 * rank).remainder_(VALUES).to(dtype)


def gather(systems: Systems, numel: int) -> dict[str, Any]:
    """Time the gathers of ``numel`` elements; see ``measure``."""
    job, rank, world = systems.job, dist.get_rank(), dist.get_world_size()
    table = cut(numel, job.replicas, job.shards)
    whole = payload(numel, 0, job.dtype)
    pooled = systems.own.pool.tensor(0, numel, job.dtype)
    private = torch.empty_like(whole)
    share = numel // world
    mine = whole[rank * share : (rank + 1) * share].clone()
    operator = systems.own.operators["gather"]
    number = gather_table(operator, table, job.shards, job.dtype.itemsize, f"{numel} elements")

    def ready() -> None:
        ticket = operator.all_gather(number, 0)
        Work(handles=[Ticket(operator, ticket)], name="gather").wait()

    calls: dict[str, Callable[[], None]] = {"ready": ready}
    for transport in systems.library:
        calls[transport.name] = lambda t=transport: t.all_gather_v(private, table).wait()
    calls["equal_length"] = lambda: _all_gather(private[: share * world], mine)

    def poison() -> None:
        for buffer in (pooled, private):
            buffer.fill_(OTHER)
            for s in table.of(rank):
                buffer[s.offset : s.offset + s.numel] = whole[s.offset : s.offset + s.numel]

    def right(name: str) -> bool:
        if name == "ready":
            return torch.equal(pooled, whole)
        used = share * world if name == "equal_length" else numel
        return torch.equal(private[:used], whole[:used])

    if numel * job.dtype.itemsize >= LARGE:
        calls[COPY] = lambda: _copy(private, whole)
    return measure(systems, calls, poison, right, numel)


def reduce(systems: Systems, numel: int) -> dict[str, Any]:
    """Time the sums of ``numel`` elements; see ``measure``."""
    job, rank, world = systems.job, dist.get_rank(), dist.get_world_size()
    table = cut(numel, job.replicas, job.shards)
    size = table.sizes[rank]
    pooled = systems.own.pool.tensor(0, numel, job.dtype)
    private = payload(numel, rank, job.dtype)
    pooled.copy_(private)
    windows = {
        "ready": systems.own.pool.tensor(_window_base(numel, job.dtype), size, torch.float32),
        "library": torch.empty(size),
    }
    share = numel // world
    equal = torch.empty(share, dtype=job.dtype)
    operator = systems.own.operators["reduce"]
    number = reduce_table(operator, table, job.shards, job.dtype, f"{numel} elements")
    window_base = _window_base(numel, job.dtype)

    def ready() -> None:
        ticket = operator.reduce_scatter(number, 0, window_base, first=True, divisor=1)
        Work(handles=[Ticket(operator, ticket)], name="reduction").wait()

    calls: dict[str, Callable[[], None]] = {"ready": ready}
    for transport in systems.library:
        calls[transport.name] = lambda t=transport: t.reduce_scatter_v(
            private, table, windows["library"], first=True, divisor=1
        ).wait()
    calls["equal_length"] = lambda: _reduce_scatter(equal, private[: share * world])

    total = torch.zeros(numel)
    for other in range(world):
        total += payload(numel, other, torch.float32)
    owned = total[table.of(rank)[0].offset :][:size].clone() if size else total[:0]
    shared = total[rank * share : (rank + 1) * share].clone()
    del total

    def poison() -> None:
        for buffer in (*windows.values(), equal):
            buffer.fill_(OTHER)

    def right(name: str) -> bool:
        if name == "equal_length":
            return torch.equal(equal.float(), shared)
        return torch.equal(windows["ready" if name == "ready" else "library"], owned)

    return measure(systems, calls, poison, right, numel)


def measure(
    systems: Systems,
    calls: Mapping[str, Callable[[], None]],
    poison: Callable[[], None],
    right: Callable[[str], bool],
    numel: int,
) -> dict[str, Any]:
    """Check every system once, then time them: ``seconds`` by system, and who was ``wrong``."""
    wrong = []
    for name, call in calls.items():
        poison()
        systems.start()  # a rank's memory may be read as soon as another one calls
        call()
        if name != COPY and not right(name):
            wrong.append(name)
        systems.start()
    nbytes = numel * systems.job.dtype.itemsize
    repeats = systems.job.repeats or repeats_of(nbytes)
    in_turns(calls, 1 if nbytes >= LARGE else 5, systems.start)
    gc.collect()
    gc.disable()
    seconds = in_turns(calls, repeats, systems.start)
    gc.enable()
    return {"bytes": nbytes, "seconds": seconds, "wrong": wrong}


def _window_base(numel: int, dtype: torch.dtype) -> int:
    return aligned(numel * dtype.itemsize)


def pool_bytes(job: Job) -> int:
    """Slots and window of the largest payload."""
    numel = max(job.sizes) // job.dtype.itemsize
    most = max(cut(numel, job.replicas, job.shards).sizes)
    return aligned(_window_base(numel, job.dtype) + 4 * most)


def _copy(to: Tensor, source: Tensor) -> None:
    ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)


def _all_gather(received: Tensor, sent: Tensor) -> None:
    """By either of its names: newer torch warns of the older one, older torch lacks the newer."""
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(received, sent)


def _reduce_scatter(received: Tensor, sent: Tensor) -> None:
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(received, sent)


def work(rank: int, world: int, job: Job) -> list[dict[str, Any]]:
    """Measure everything; an entry for each operation and size."""
    everybody: Sequence[int] = range(world)
    groups = {
        "gather_group": dist.new_group(everybody),
        "reduce_group": dist.new_group(everybody),
    }
    systems = Systems(
        job=job,
        own=Operators(job.replicas, job.shards, pool_bytes(job)),
        library=tuple(
            kind(TransportSettings(**groups, wire_dtype=job.dtype))
            for kind in (PerOwnerTransport, GroupedTransport)
        ),
        start=Start(),
    )
    found = []
    for operation in job.operations:
        for nbytes in job.sizes:
            run = gather if operation == "gather" else reduce
            found.append({"operation": operation, **run(systems, nbytes // job.dtype.itemsize)})
    systems.start.close()
    systems.own.close()
    return found
