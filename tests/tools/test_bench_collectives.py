"""tools/bench/collectives.py: every system moves the same data, figures are complete, and a wrong
result does not pass.
"""

from __future__ import annotations

import builtins
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamuon.collectives import SegmentTable, TableSegment
from tools.bench import collectives, collectives_latency, publish_replay
from tools.bench.collectives_latency import COLUMNS, RING, STAR, Link, fit
from tools.bench.collectives_ranks import (
    OPERATIONS,
    SYSTEMS,
    Job,
    Operators,
    Start,
    cut,
    in_turns,
    repeats_of,
    work,
)
from tools.bench.collectives_report import chart, figures, merge, size_text, speedup, table
from tools.bench.common import run_bench_ranks

MIB = 1 << 20
SIZES = (16 << 10, 16 * MIB)
GRIDS = {"one node bf16": (1, 2, torch.bfloat16), "nodes": (2, 1, torch.float32)}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on two ranks."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    flags = ["--ranks", "2", "--sizes", "16KiB,16MiB", "--repeats", "2", "--json", str(path)]
    assert collectives.main(flags) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def small_runs(rank: int, world: int) -> dict[str, Any]:
    """Other grids and dtypes; and how far apart ranks leave the start."""
    found: dict[str, Any] = {
        name: work(
            rank,
            world,
            Job(
                replicas=replicas,
                shards=shards,
                sizes=(4096, 256 << 10),
                operations=OPERATIONS,
                dtype=dtype,
                repeats=2,
            ),
        )
        for name, (replicas, shards, dtype) in GRIDS.items()
    }
    start = Start()
    order: list[str] = []
    seconds = in_turns({name: lambda name=name: order.append(name) for name in "ab"}, 3, start)
    start.close()
    found["turns"] = (order, {name: len(times) for name, times in seconds.items()})
    found["spoiled"] = spoiled(rank, world)
    return found


def spoiled(rank: int, world: int) -> list[list[str]]:
    """Who is found wrong where the library's calls and our operators move other data."""
    real = Operators.__init__
    job = Job(
        replicas=1,
        shards=world,
        sizes=(4096,),
        operations=OPERATIONS,
        dtype=torch.float32,
        repeats=1,
    )
    with pytest.MonkeyPatch.context() as patch:

        def swapped(self: Operators, *arguments: Any) -> None:
            real(self, *arguments)
            self.operators["gather"].all_gather = lambda number, base: 1  # type: ignore[method-assign]
            self.operators["gather"].wait = lambda ticket: None  # type: ignore[method-assign]

        patch.setattr(Operators, "__init__", swapped)
        patch.setattr(dist, "reduce", lambda *a, **k: dist.barrier(async_op=True))
        return [entry["wrong"] for entry in work(rank, world, job)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_bench_ranks(small_runs, 2, folder=tmp_path_factory.mktemp("ranks"), timeout=120)


def test_the_document_is_complete(document: dict[str, Any]) -> None:
    assert (document["ranks"], document["grid"], document["dtype"]) == (2, "1x2", "fp32")
    assert list(document["operations"]) == list(OPERATIONS)
    for operation, runs in document["operations"].items():
        assert [run["bytes"] for run in runs] == list(SIZES)
        for run in runs:
            assert run["repeats"] == 2
            assert all(run[f"{system}_ms"] > 0 for system in SYSTEMS)
            copied = operation == "gather" and run["bytes"] == SIZES[1]
            assert ("copy_ms" in run) == copied
    assert document["machine"]["cores"] > 0 and document["wrong"] == []


def test_figures_follow_from_the_times(document: dict[str, Any]) -> None:
    runs = [
        {"operation": operation, **run}
        for operation, of in document["operations"].items()
        for run in of
    ]
    for key, value in figures(runs, 1, 2).items():
        assert document[key] == value
    small = [run for run in runs if run["bytes"] == SIZES[0]]
    for other in SYSTEMS[1:]:
        ratios = [run[f"{other}_ms"] / run["ready_ms"] for run in small]
        assert document[f"speedup_small_vs_{other}"] == pytest.approx(math.sqrt(math.prod(ratios)))
        of_sums = document["by_operation"]["reduce"][f"speedup_small_vs_{other}"]
        assert of_sums == pytest.approx(ratios[1])
    large = runs[1]
    assert document["large_fraction_of_copy_bandwidth"] == pytest.approx(
        large["copy_ms"] / large["ready_ms"]
    )
    assert document["copies_of_payload"] == {"plain": 2, "results": 1, "ring_slots": 0}


def test_ring_slots_count_as_copies() -> None:
    run = {"operation": "gather", "bytes": 16 * MIB, "copy_ms": 3.0}
    run |= {f"{system}_ms": 4.0 for system in SYSTEMS}
    found = figures([run], replicas=3, shards=2)
    assert found["large_fraction_of_copy_bandwidth"] == pytest.approx(0.75)
    with_slots = found["large_fraction_of_copy_bandwidth_with_ring_slots"]
    assert with_slots == pytest.approx(0.75 * 8 / 6)
    assert found["speedup_small_vs_per_owner"] is None


def test_every_grid_and_dtype_is_right(ranks: list[dict[str, Any]]) -> None:
    for name in GRIDS:
        for result in ranks:
            assert [(e["operation"], e["bytes"]) for e in result[name]] == [
                (operation, size) for operation in OPERATIONS for size in (4096, 256 << 10)
            ]
            for entry in result[name]:
                assert entry["wrong"] == []
                assert all(len(times) == 2 for times in entry["seconds"].values())


def test_systems_take_turns(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["turns"] == (list("abbaab"), {"a": 3, "b": 3})


def test_wrong_results_are_found(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["spoiled"] == [["ready"], ["per_owner"]]
    runs, wrong = merge([result["one node bf16"] for result in ranks])
    assert len(runs) == 4 and wrong == []
    spoiled_run = {**ranks[1]["nodes"][0], "wrong": ["grouped"]}
    _, wrong = merge([[ranks[0]["nodes"][0]], [spoiled_run]])
    assert wrong == ["gather of 4096 bytes by grouped: rank 1 holds a wrong result"]


def test_a_wrong_result_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seconds = {system: [0.002, 0.001, 0.004] for system in SYSTEMS}
    entry = {"operation": "gather", "bytes": 4096, "seconds": seconds, "wrong": ["ready"]}
    monkeypatch.setattr(collectives, "run_bench_ranks", lambda *a, **k: [[entry], [entry]])
    path = tmp_path / "figures.json"
    flags = ["--ranks", "2", "--sizes", "4KiB", "--operations", "gather", "--json", str(path)]
    assert collectives.main(flags) == 1
    assert "rank 0 holds a wrong result" in capsys.readouterr().err
    found = json.loads(path.read_text(encoding="utf-8"))
    assert len(found["wrong"]) == 2
    assert found["operations"]["gather"][0]["ready_ms"] == 2.0


def test_segments_are_1_2_3() -> None:
    assert [s.numel for s in cut(700, 1, 4).segments] == [100, 200, 300, 100]
    assert [(s.rank, s.numel) for s in cut(600, 3, 2).segments] == [(0, 100), (2, 200), (4, 300)]
    assert cut(601, 1, 3) == SegmentTable.build(
        3,
        [
            TableSegment(rank=rank, offset=start, numel=stop - start)
            for rank, start, stop in ((0, 0, 100), (1, 100, 300), (2, 300, 601))
        ],
    )


def test_repeats_by_size() -> None:
    assert [repeats_of(size) for size in (16 << 10, MIB, 16 * MIB, 256 * MIB)] == [60, 60, 15, 5]


def test_the_median_is_of_the_slowest_rank() -> None:
    runs, _ = merge(
        [
            [{"operation": "reduce", "bytes": 1, "seconds": {"ready": [1, 5, 2]}, "wrong": []}],
            [{"operation": "reduce", "bytes": 1, "seconds": {"ready": [4, 3, 9]}, "wrong": []}],
        ]
    )
    assert runs == [{"operation": "reduce", "bytes": 1, "ready_ms": 5000, "repeats": 3}]
    assert speedup([], "ready") is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--ranks", "1"], "--ranks 1"),
        (["--ranks", "64"], "choose 2 to 36"),
        (["--ranks", "4", "--grid", "2x3"], "--grid 2x3"),
        (["--grid", "2,2"], "write NODESxRANKS"),
        (["--sizes", "16KiB,many"], "'many'"),
        (["--sizes", "512"], "at least 256 for each rank"),
        (["--operations", "gather,publish"], "gather,publish"),
        (["--repeats", "-1"], "--repeats -1"),
        (["--link-gbps", "10"], "is for --latency-us"),
        (["--latency-us", "0"], "--latency-us 0"),
        (["--latency-us", "5", "--nodes", "4"], "two or more"),
        (["--latency-us", "5", "--png", "x.png"], "--png shows the comparison"),
    ],
)
def test_refused_arguments(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        collectives.main(flags)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


def test_without_the_library_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collectives, "available", lambda: "the host library is not there: build it")
    with pytest.raises(SystemExit):
        collectives.main([])
    assert "not there: build it" in capsys.readouterr().err


# --- an injected link ----------------------------------------------------------------------------


def test_hops_and_columns_of_a_slow_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    flags = ["--latency-us", "3000", "--link-gbps", "100", "--nodes", "2,3", "--repeats", "1"]
    assert collectives.main([*flags, "--json", str(path)]) == 0
    assert "(nodes - 1) x" in capsys.readouterr().out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["link"] == {"latency_us": 3000.0, "gbps": 100.0}
    keys = {(e["nodes"], e["columns"], e["operation"], e["path"]) for e in found["latency"]}
    assert keys == {
        (nodes, columns, operation, way)
        for nodes in (2, 3)
        for columns in COLUMNS
        for operation in OPERATIONS
        for way in (RING, STAR)
    }
    for entry in found["latency"]:
        hops = entry["nodes"] - 1 if entry["path"] == RING else 1
        assert entry["ms"] >= 3.0 * hops  # never faster than the link
    small = {
        (e["operation"], e["columns"], e["nodes"]): e["ms"]
        for e in found["latency"]
        if (e["path"], e["bytes"]) == (RING, collectives_latency.SIZES[0])
    }
    assert len(small) == 8 and len(found["fits"]) == 4
    for line in found["fits"]:  # through two points
        for nodes in (2, 3):
            value = line["t0_ms"] + (nodes - 1) * line["hop_ms"]
            assert value == pytest.approx(small[line["operation"], line["columns"], nodes])
    assert found["fit_error"] < 1e-6
    twice = [small[o, 2, n] / small[o, 1, n] for o in OPERATIONS for n in (2, 3)]
    assert found["twice_the_columns"] == pytest.approx(math.prod(twice) ** 0.25)


def test_the_fit_is_of_a_line() -> None:
    found = fit([2, 4, 8], [1.5, 2.5, 4.5])
    assert (found["t0_ms"], found["hop_ms"]) == (pytest.approx(1.0), pytest.approx(0.5))
    assert found["fit_error"] == pytest.approx(0, abs=1e-9)
    assert fit([2, 3, 4], [1.0, 2.0, 1.0])["fit_error"] > 0.1


def test_a_wrong_result_over_the_link_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = collectives_latency.payload
    calls = iter(range(100))
    monkeypatch.setattr(  # the check sees other data than the places had
        collectives_latency, "payload", lambda *a: real(*a) + (next(calls) >= 2)
    )
    with pytest.raises(RuntimeError, match="gather: place 0 of 2 holds a wrong result"):
        collectives_latency.measure(2, 1, 4096, Link(latency_us=1.0), path=RING, repeats=1)


def test_publish_replay_runs_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = publish_replay.publish_replay
    monkeypatch.setattr(
        publish_replay, "publish_replay", lambda: real(models=["Qwen2.5-1.5B"], nodes=(2,))
    )
    path = tmp_path / "figures.json"
    assert collectives.main(["--publish-replay", "--json", str(path)]) == 0
    assert "Qwen2.5-1.5B" in capsys.readouterr().out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["geometric_mean"] > 0 and len(found["rails"]) == 1 and "operations" not in found


def test_publish_bytes_checks_real_copies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = publish_replay.publish_bytes
    monkeypatch.setattr(
        publish_replay,
        "publish_bytes",
        lambda: real(models=["Qwen2.5-1.5B"], nodes=(2,), repeats=1),
    )
    path = tmp_path / "figures.json"
    assert collectives.main(["--publish-bytes", "--json", str(path)]) == 0
    assert "real bytes" in capsys.readouterr().out
    (rail,) = json.loads(path.read_text(encoding="utf-8"))["publish_bytes"]["rails"]
    assert rail["publish_ms"] > 0


# --- the chart -----------------------------------------------------------------------------------


def test_the_table_names_every_size(document: dict[str, Any]) -> None:
    text = table(document)
    assert text.count("16 KiB") == text.count("16 MiB  ") == 2
    assert "up to 1 MiB, times as fast as per-owner calls" in text
    assert [size_text(n) for n in (100, 2048, 3 * MIB, 2 << 30)] == [
        "100 B",
        "2 KiB",
        "3 MiB",
        "2 GiB",
    ]


def test_chart(document: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart(document, tmp_path / "chart.png")
    content = (tmp_path / "chart.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width > 800 and height > 300


def test_no_chart_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit) as stop:
        collectives.main(["--png", str(tmp_path / "chart.png")])
    assert stop.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err
