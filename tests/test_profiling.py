"""When profiles start and stop, what they leave behind, and what is refused at the start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megamuon.profiling import Profiler, ProfilingError, ProfilingSettings

CPU = torch.device("cpu")


def trace_settings(folder: Path, start: int = 2, end: int = 3) -> ProfilingSettings:
    return ProfilingSettings(
        profile=True,
        step_start=start,
        step_end=end,
        ranks=(0, 2),
        use_pytorch_profiler=True,
        trace_dir=str(folder),
    )


def recorded(profiler: Profiler, first: int, last: int) -> list[int]:
    steps = []
    for iteration in range(first, last + 1):
        profiler.on_step(iteration)
        torch.ones(4) @ torch.ones(4)
        steps += [iteration] if profiler.active else []
    profiler.close()
    profiler.close()
    return steps


def test_the_window_is_recorded_into_one_trace(tmp_path: Path) -> None:
    profiler = Profiler(trace_settings(tmp_path), rank=2, device=CPU)
    assert recorded(profiler, 1, 5) == [2, 3]
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("rank2.")
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::dot" for event in events) == 2


def test_other_ranks_record_nothing(tmp_path: Path) -> None:
    assert recorded(Profiler(trace_settings(tmp_path), rank=1, device=CPU), 1, 5) == []
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_records_the_rest_of_the_window(tmp_path: Path) -> None:
    assert recorded(Profiler(trace_settings(tmp_path, 2, 9), rank=0, device=CPU), 4, 5) == [4, 5]
    assert len(list(tmp_path.iterdir())) == 1
    assert recorded(Profiler(trace_settings(tmp_path, 2, 3), rank=0, device=CPU), 4, 5) == []


def test_the_cuda_profiler_is_started_and_stopped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: calls.append("start"),
        cudaProfilerStop=lambda: calls.append("stop"),
    )
    ranges = SimpleNamespace(
        __enter__=lambda: calls.append("enter"), __exit__=lambda *_: calls.append("exit")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda **_: ranges)
    settings = ProfilingSettings(profile=True, step_start=2, step_end=2)
    profiler = Profiler(settings, rank=0, device=torch.device("cuda", 0))
    assert recorded(profiler, 1, 4) == [2]
    assert calls == ["start", "enter", "exit", "stop"]


def test_memory_snapshots_carry_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    history: list[dict[str, object]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **k: history.append(k))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    settings = ProfilingSettings(
        record_memory_history=True, memory_snapshot_path=str(tmp_path / "new" / "snapshot.pickle")
    )
    profiler = Profiler(settings, rank=3, device=torch.device("cuda", 0))
    profiler.close()
    profiler.close()
    assert written == [str(tmp_path / "new" / "snapshot_3.pickle")]
    assert history[-1] == {"enabled": None}


def test_nothing_is_recorded_by_default() -> None:
    profiler = Profiler(ProfilingSettings(), rank=0, device=CPU)
    assert recorded(profiler, 1, 20) == []
    assert profiler.snapshot() is None


def test_all_problems_are_reported_at_once() -> None:
    settings = ProfilingSettings(profile=True, step_start=5, step_end=4, record_memory_history=True)
    with pytest.raises(ProfilingError) as caught:
        Profiler(settings, rank=0, device=CPU)
    for words in ("--profile-step-start 5", "needs --use-pytorch-profiler", "--record-memory-hist"):
        assert words in str(caught.value)
    with pytest.raises(ProfilingError, match="--tensorboard-dir, which is not set"):
        Profiler(ProfilingSettings(profile=True, use_pytorch_profiler=True), rank=0, device=CPU)
    with pytest.raises(ProfilingError, match="without --profile"):
        Profiler(ProfilingSettings(use_pytorch_profiler=True), rank=0, device=CPU)
