"""A symmetric pool over plain memory: what opens it in tests, and what watches it.

Owns ``PlainMemory`` (one tensor in the place of shared memory), ``Opening`` (the runtime's hook),
``watch_closely`` and ``make_late``. ``watch_closely`` poisons a range as soon as it is released and
again when it comes alive, so a read of contents that nobody promised shows as NaN, and checks that
live ranges are disjoint. ``make_late`` lets transfers happen as late as they may: a gather fills
its buffer, and a reduction reads its slots, when somebody waits for it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives import SegmentTable, StagedWork, TwoStageTable, Work
from megamuon.runtime import Runtime
from megamuon.runtime.engine import Engine
from megamuon.runtime.pool_opening import OpenPool, PoolRecording


class PlainMemory:
    """Memory that no other rank sees, full of NaN."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = torch.full((nbytes,), 255, dtype=torch.uint8)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A view ``(numel,)`` from byte ``offset`` on."""
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Bytes from the start, None for a tensor that lies elsewhere."""
        offset = tensor.data_ptr() - self.bytes.data_ptr()
        return offset if 0 <= offset < self.nbytes else None


class Opening:
    """Opens the pool of ``runtime`` as soon as it can."""

    def __init__(self, runtime: Runtime, group: dist.ProcessGroup | None = None) -> None:
        self.runtime = runtime
        self.recording = PoolRecording(runtime.engine, group, replicas=runtime.mesh.replicas)
        self.steps = 0
        runtime.use_pool(self)

    def micro_batch_done(self) -> None:
        """A backward pass has ended."""
        self.recording.micro_batch_done()

    def step_done(self) -> bool:
        """An update has ended."""
        self.steps += 1
        if not self.recording.step_done():
            return False
        plan = self.recording.plan()
        pool = self.runtime.open_pool(plan, PlainMemory(plan.total))
        watch_closely(pool)
        return True


def watch_closely(pool: OpenPool) -> None:
    """Poison ranges that hold nothing, and check at each change that live ranges are disjoint."""
    for group in pool.groups:
        for kind, buffer in group.leased.items():
            if not buffer.bound:
                continue

            def watch(alive: bool, raw: Tensor = buffer.raw, told=buffer.watch) -> None:
                told(alive)
                raw.fill_(float("nan"))
                check_disjoint(pool)

            buffer.watch = watch
            assert pool.plan.sizes[kind, group.index] >= buffer.nbytes


def check_disjoint(pool: OpenPool) -> None:
    """No two live leases share a byte."""
    plan = pool.plan
    spans = sorted((plan.offsets[key], plan.sizes[key], key) for key in pool.live)
    for (start, size, key), (following, _, other) in zip(spans, spans[1:], strict=False):
        assert start + size <= following, (key, other)


def make_late(engine: Engine) -> None:
    """Transfers of one rank, each at the latest moment and in place."""
    gather, reduce = engine.transport.all_gather_v, engine.reductions.reduce_unsharded

    def late_gather(buffer: Tensor, table: SegmentTable) -> Work:
        contents = buffer.clone()
        buffer.fill_(float("nan"))

        def finish() -> None:
            gather(contents, table).wait()
            buffer.copy_(contents)

        return Work(finish=finish)

    def late_reduction(
        slots: Tensor, table: TwoStageTable, window: Tensor, **how: Any
    ) -> StagedWork:
        def finish() -> None:
            reduce(slots, table, window, **how).wait()

        return StagedWork(Work(finish=finish, borrows=True), (), deque())

    engine.transport.all_gather_v = late_gather  # type: ignore[method-assign]
    engine.reductions.reduce_unsharded = late_reduction
