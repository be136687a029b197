"""Profiles and memory snapshots of chosen iterations on chosen ranks.

Owns when a profiler starts and stops. Invariant: iterations ``step_start`` to ``step_end``, both
included and counted from 1, are recorded; a run that resumes inside that window records the rest of
it; what a device cannot do is an error at the start, not a missing file at the end. Tested by
``tests/test_profiling.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

MEMORY_EVENTS = 100_000  # entries of the allocator's ring of recorded events


@dataclass(frozen=True, kw_only=True)
class ProfilingSettings:
    """Megatron-LM's profiling flags."""

    profile: bool = False
    step_start: int = 10  # --profile-step-start
    step_end: int = 12  # --profile-step-end
    ranks: Sequence[int] = ()  # --profile-ranks; empty: all
    use_pytorch_profiler: bool = (
        False  # else the CUDA profiler API, for nsys --capture-range=cudaProfilerApi
    )
    trace_dir: str | None = None  # --tensorboard-dir
    record_memory_history: bool = False
    memory_snapshot_path: str = "snapshot.pickle"  # becomes name_<rank>.pickle


class ProfilingError(ValueError):
    """The profiling flags contradict each other or the device."""


class Profiler:
    """Call ``on_step(iteration)`` before each iteration and ``close()`` at the end.

    A snapshot of memory is a pickle that torch writes and its own viewer reads; nothing here ever
    loads one.
    """

    def __init__(self, settings: ProfilingSettings, *, rank: int, device: torch.device) -> None:
        _check(settings, device)
        chosen = not settings.ranks or rank in settings.ranks
        self._settings = settings
        self._rank = rank
        self._waiting = settings.profile and chosen
        self._memory = settings.record_memory_history and chosen
        self._trace: torch.profiler.profile | None = None
        self._ranges: AbstractContextManager[object] | None = None
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

    @property
    def active(self) -> bool:
        """Whether a profile is being recorded now."""
        return self._trace is not None or self._ranges is not None

    def on_step(self, iteration: int) -> None:
        """``iteration`` (counted from 1) is about to run."""
        if self.active and iteration > self._settings.step_end:
            self._stop()
        elif self._trace is not None:
            self._trace.step()
        inside = self._settings.step_start <= iteration <= self._settings.step_end
        if self._waiting and inside:
            self._waiting = False
            self._start()

    def snapshot(self) -> Path | None:
        """Write the allocator's history so far; returns the file, None where none is recorded."""
        if not self._memory:
            return None
        base = Path(self._settings.memory_snapshot_path)
        path = base.with_name(f"{base.stem}_{self._rank}{base.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        return path

    def close(self) -> None:
        """Stop what runs and write what was recorded; safe to call twice."""
        if self.active:
            self._stop()
        if self._memory:
            self.snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
            self._memory = False

    def _start(self) -> None:
        if self._settings.use_pytorch_profiler:
            handler = torch.profiler.tensorboard_trace_handler(
                str(self._settings.trace_dir), worker_name=f"rank{self._rank}"
            )
            self._trace = torch.profiler.profile(record_shapes=True, on_trace_ready=handler)
            self._trace.start()
            return
        torch.cuda.cudart().cudaProfilerStart()
        self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=True)
        self._ranges.__enter__()

    def _stop(self) -> None:
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
        if self._ranges is not None:
            self._ranges.__exit__(None, None, None)
            torch.cuda.cudart().cudaProfilerStop()
            self._ranges = None


def _check(settings: ProfilingSettings, device: torch.device) -> None:
    """Raise one ProfilingError that lists every problem."""
    problems: list[str] = []
    if settings.profile:
        if not 0 <= settings.step_start <= settings.step_end or settings.step_end < 1:
            problems.append(
                f"--profile-step-start {settings.step_start} and "
                f"--profile-step-end {settings.step_end}: "
                "iterations count from 1, and the end is not before the start"
            )
        if settings.use_pytorch_profiler and not settings.trace_dir:
            problems.append(
                "--use-pytorch-profiler writes its trace to --tensorboard-dir, which is not set"
            )
        if not settings.use_pytorch_profiler and device.type != "cuda":
            problems.append(
                f"--profile on {device.type} needs --use-pytorch-profiler: "
                "the CUDA profiler needs a GPU"
            )
    elif settings.use_pytorch_profiler:
        problems.append("--use-pytorch-profiler does nothing without --profile: add it")
    if settings.record_memory_history and device.type != "cuda":
        problems.append(
            f"--record-memory-history records CUDA's allocator, "
            f"and this run is on {device.type}: drop the flag"
        )
    if problems:
        raise ProfilingError("; ".join(problems))
