"""A Chrome trace of one step of every rank: when it computes, gathers, reduces and publishes.

Trains a few steps of one line and writes the last one as trace events, which chrome://tracing and
ui.perfetto.dev show: a process for each rank, with lanes for compute, gather, reduce and publish. A
collective runs from its launch to the end of the wait for it; collectives of one kind that overlap
take lanes of their own, ``gather 2`` and on. Clocks of ranks are brought together by barriers.

    python tools/trace.py --model tiny --ranks 4 --line D --sharding hsdp --output trace.json

Tested by ``tests/tools/test_trace.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megamuon.console import run_script  # noqa: E402
from tools.bench.common import run_bench_ranks, warn_if_busy  # noqa: E402
from tools.bench.lines import DTYPES, add_case_flags, cases_of  # noqa: E402
from tools.bench.spans import LANES, Span, Spans, attach  # noqa: E402
from tools.bench.systems import Line, staged_step  # noqa: E402
from tools.sharded_training import LINES, Case  # noqa: E402

BARRIERS = 15
STEP = "step"  # the span that holds all others of the compute lane


def work(
    rank: int,
    world: int,
    case: Case,
    compute: torch.dtype,
    reduce: torch.dtype,
    steps: int,
) -> tuple[float, list[Span]]:
    """Train ``steps`` steps on this rank; its clock, and the spans of the last step."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    line = Line(case, rank, compute=compute, reduce=reduce)
    spans = Spans()
    attach(line, spans)
    clock = barrier_times()
    for step in range(steps):
        start = time.perf_counter()
        staged_step(line, line.tokens(step), spans.mark)
        stop = time.perf_counter()
    spans.add("compute", STEP, start, stop)
    found = spans.step(start, stop)
    line.settle()
    line.runtime.close()
    return clock, found


def barrier_times() -> float:
    """Median of this rank's clock at the end of some barriers: ranks leave each of them at about
    the same moment, so differences of medians are differences of clocks.
    """
    times = []
    for _ in range(BARRIERS):
        dist.barrier()
        times.append(time.perf_counter())
    return statistics.median(times)


def trace_events(ranks: Sequence[tuple[float, list[Span]]], case: Case) -> list[dict[str, Any]]:
    """Trace events of all ranks, microseconds from the first start on rank 0's clock."""
    offsets = [clock - ranks[0][0] for clock, _ in ranks]
    origin = min(
        span.start - offset
        for (_, spans), offset in zip(ranks, offsets, strict=True)
        for span in spans
    )
    events: list[dict[str, Any]] = []
    for rank, ((_, spans), offset) in enumerate(zip(ranks, offsets, strict=True)):
        axes = ("replicate", "shard", "tp")
        replica, shard, tp_rank = (case.shape.index_of(axis, rank) for axis in axes)
        title = f"rank {rank} (replica {replica}, shard {shard}, tp rank {tp_rank})"
        events.append(_metadata("process_name", rank, 0, name=title))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        lanes = lay_out(spans)
        for tid, (name, held) in enumerate(lanes.items()):
            events.append(_metadata("thread_name", rank, tid, name=name))
            events.append(_metadata("thread_sort_index", rank, tid, sort_index=tid))
            events += [_event(span, rank, tid, offset + origin) for span in held]
    return events


def lay_out(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Spans by lane, each lane's in order. Collectives that overlap go to further lanes, because
    the events of one lane must not overlap but by nesting.
    """
    lanes: dict[str, list[Span]] = {name: [] for name in LANES}
    for kind in LANES:
        members = sorted(
            (span for span in spans if span.lane == kind), key=lambda s: (s.start, -s.stop)
        )
        if kind == "compute":
            lanes[kind] = members
            continue
        for span in members:
            place = 1
            while (name := kind if place == 1 else f"{kind} {place}") in lanes and (
                lanes[name] and lanes[name][-1].stop > span.start
            ):
                place += 1
            lanes.setdefault(name, []).append(span)
    order = sorted(lanes, key=lambda name: LANES.index(name.split()[0]))
    return {name: lanes[name] for name in order}


def _metadata(kind: str, pid: int, tid: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": values}


def _event(span: Span, pid: int, tid: int, zero: float) -> dict[str, Any]:
    event = {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": pid,
        "tid": tid,
        "ts": (span.start - zero) * 1e6,
        "dur": (span.stop - span.start) * 1e6,
    }
    return event | ({"args": {"cut": True}} if span.cut else {})


def main(argv: list[str] | None = None) -> int:
    """Train and write the trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_case_flags(parser)
    parser.add_argument("--line", choices=LINES, default="D")
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="the last of them is traced; line D works in its pool from the third on",
    )
    parser.add_argument("--output", type=Path, default=Path("trace.json"), help="the trace")
    options = parser.parse_args(argv)
    try:
        (case,), _ = cases_of(options, [options.line])
    except ValueError as error:
        parser.error(str(error))
    warn_if_busy()
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_bench_ranks(
            work,
            options.ranks,
            case,
            DTYPES[options.dtype],
            DTYPES[options.reduce_dtype],
            options.steps,
            folder=Path(folder),
        )
    events = trace_events(ranks, case)
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"case": case.name, "step": options.steps - 1},
    }
    options.output.write_text(json.dumps(document) + "\n", encoding="utf-8")
    spans = sum(event["ph"] == "X" for event in events)
    print(f"{case.name}: {spans} spans of {options.ranks} ranks in {options.output}")
    print("open it in chrome://tracing or ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
