"""tools/trace.py: a trace that chrome://tracing can show, of what really happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import trace
from tools.bench.common import run_bench_ranks
from tools.bench.lines import build_parser, cases_of
from tools.bench.spans import LANES, Span, Spans
from tools.sharded_training import Case

LAYERS = [f"model.layers.{index}" for index in range(3)]
RUNS = {"C": ["--sharding", "hsdp"], "D": ["--sharding", "hsdp"], "A": [], "M": []}
COMMON = ["--model", "nano", "--ranks", "4", "--sequence", "8", "--micro-batch", "1"]
Events = list[dict[str, Any]]


def case_of(line: str) -> Case:
    options = build_parser().parse_args([*COMMON, *RUNS[line]])
    (case,), _ = cases_of(options, [line])
    return case


def all_runs(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Any]:
    kinds = (torch.float32, torch.float32)
    return {line: trace.work(rank, world, case, *kinds, 3) for line, case in cases.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Clock and spans of every rank, of all runs; one start."""
    cases = {line: case_of(line) for line in RUNS}
    return run_bench_ranks(all_runs, 4, cases, folder=tmp_path_factory.mktemp("trace"), timeout=600)


def of_line(ranks: list[dict[str, Any]], line: str) -> Events:
    return trace.trace_events([rank[line] for rank in ranks], case_of(line))


def lanes_of(events: Events, rank: int) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == rank
    }


def spans_of(events: Events, rank: int) -> Events:
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank]


@pytest.mark.parametrize("line", list(RUNS))
def test_events_are_what_the_viewers_read(ranks: list[dict[str, Any]], line: str) -> None:
    events = json.loads(json.dumps(of_line(ranks, line)))
    assert {event["ph"] for event in events} == {"M", "X"}
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    for rank in range(4):
        lanes = lanes_of(events, rank)
        assert list(dict.fromkeys(name.split()[0] for name in lanes.values())) == list(LANES)
        spans = spans_of(events, rank)
        (step,) = [event for event in spans if event["name"] == trace.STEP]
        for event in spans:
            assert event["cat"] == lanes[event["tid"]].split()[0]
            assert event["ts"] >= step["ts"] - 1e-3 >= -1e-3 and event["dur"] >= 0
            assert event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1e-3
        for tid in lanes:
            assert_nested([event for event in spans if event["tid"] == tid])


def assert_nested(spans: Events) -> None:
    """No two overlap but by nesting."""
    open_until: list[float] = []
    for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        stop = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + 1e-3:
            open_until.pop()
        assert not open_until or stop <= open_until[-1] + 1e-3, event
        open_until.append(stop)


@pytest.mark.parametrize("line", list(RUNS))
def test_every_layer_is_seen_in_every_phase(ranks: list[dict[str, Any]], line: str) -> None:
    events = of_line(ranks, line)
    for rank in range(4):
        names = [event["name"] for event in spans_of(events, rank)]
        for phase in ("forward", "backward", "optimizer"):
            assert names.count(phase) == 1
        for layer in LAYERS:
            for what in ("forward", "backward", "reduce"):
                assert f"{what} {layer}" in names
            assert names.count(f"gather {layer}") == 2  # ZeRO-3
        assert "gradient norm" in names


@pytest.mark.parametrize("line", ["C", "D"])
def test_weights_are_published_between_the_replicas(ranks: list[dict[str, Any]], line: str) -> None:
    events = of_line(ranks, line)
    sent: dict[int, set[str]] = {}
    received: dict[int, set[str]] = {}
    for rank in range(4):
        published = [event for event in spans_of(events, rank) if event["cat"] == "publish"]
        for event in published:
            what, name = event["name"].split()
            (sent if what == "send" else received).setdefault(rank, set()).add(name)
        assert any(event.get("args") == {"cut": True} for event in published)  # goes on, or began
    for shard in (0, 1):  # rank = replica * 2 + shard
        upper, lower = shard, 2 + shard
        assert sent.get(upper, set()) == received.get(lower, set())
        assert sent.get(lower, set()) == received.get(upper, set())
    everything = set().union(*sent.values())
    assert all(any(name.startswith(layer) for name in everything) for layer in LAYERS)
    for name in "AM":
        other = of_line(ranks, name)
        assert not [e for r in range(4) for e in spans_of(other, r) if e["cat"] == "publish"]


def test_line_d_moves_the_same_in_the_same_lanes(ranks: list[dict[str, Any]]) -> None:
    def moved(line: str, rank: int) -> dict[str, list[str]]:
        spans = spans_of(of_line(ranks, line), rank)
        return {
            lane: sorted(event["name"] for event in spans if event["cat"] == lane)
            for lane in ("gather", "reduce")
        }

    for rank in range(4):
        assert moved("C", rank) == moved("D", rank)


def test_waits_lie_in_the_compute_lane(ranks: list[dict[str, Any]]) -> None:
    for line in RUNS:
        spans = [event for rank in range(4) for event in spans_of(of_line(ranks, line), rank)]
        waits = [event for event in spans if event["name"].startswith("wait for gather")]
        assert waits and {event["cat"] for event in waits} == {"compute"}
        for wait in waits:  # a collective ends with the wait for it
            name = wait["name"].removeprefix("wait for ")
            stop = wait["ts"] + wait["dur"]
            assert any(
                event["name"] == name and event["ts"] + event["dur"] == pytest.approx(stop)
                for event in spans
                if event["pid"] == wait["pid"]
            )


def test_clocks_are_brought_together() -> None:
    def spans(clock: float) -> list[Span]:
        return [Span(lane="compute", name="step", start=clock + 1.0, stop=clock + 3.0)]

    ranks = [(100.0, spans(100.0)), (7.5, spans(7.5)), (250.0, spans(250.5))]
    case = case_of("A")
    steps = [event for event in trace.trace_events(ranks, case) if event["ph"] == "X"]
    assert [event["ts"] for event in steps] == [0.0, 0.0, 0.5e6]
    assert {event["dur"] for event in steps} == {2e6}


def test_collectives_that_overlap_take_lanes_of_their_own() -> None:
    def gather(name: str, start: float, stop: float) -> Span:
        return Span(lane="gather", name=name, start=start, stop=stop)

    lanes = trace.lay_out([gather("b", 1, 3), gather("a", 0, 2), gather("c", 2, 4)])
    assert list(lanes) == ["compute", "gather", "gather 2", "reduce", "publish"]
    assert [span.name for span in lanes["gather"]] == ["a", "c"]
    assert [span.name for span in lanes["gather 2"]] == ["b"]


def test_what_is_in_flight_at_an_end_of_the_step_is_cut() -> None:
    spans = Spans()
    spans.add("gather", "before", 0.0, 1.0)
    spans.add("gather", "into", 0.0, 2.0)
    spans.add("gather", "inside", 1.5, 2.0)
    spans.launch("publish", 1, "out of", 2.5)
    spans.launch("publish", 2, "after", 3.5)
    found = {span.name: (span.start, span.stop, span.cut) for span in spans.step(1.0, 3.0)}
    assert found == {
        "into": (1.0, 2.0, True),
        "inside": (1.5, 2.0, False),
        "out of": (2.5, 3.0, True),
    }


def test_the_command_writes_the_trace(
    ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trace, "run_bench_ranks", lambda *_, **__: [rank["C"] for rank in ranks])
    path = tmp_path / "trace.json"
    assert trace.main([*COMMON, *RUNS["C"], "--line", "C", "--output", str(path)]) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["traceEvents"] == json.loads(json.dumps(of_line(ranks, "C")))
    titles = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert titles[2] == "rank 2 (replica 1, shard 0, tp rank 0)"


def test_a_line_that_does_not_apply_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        trace.main(["--line", "M", "--sharding", "hsdp"])
    assert "line M is owners on one replica" in capsys.readouterr().err
