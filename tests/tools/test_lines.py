"""tools/bench/lines.py: bytes are those of the formulas, and a miscount does not pass."""

from __future__ import annotations

import builtins
import copy
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamuon.matrices import collect
from megamuon.models import GPT
from megamuon.ownership import Topology, build_plan, closed_form_cost
from megamuon.ownership.estimate import (
    RESIDENT,
    LineShape,
    estimate,
    resident,
    resident_formula,
    traffic_formula,
)
from tools.bench import lines
from tools.bench.blocked import Blocked
from tools.bench.common import run_bench_ranks
from tools.bench.line_ranks import PHASES, Schedule, by_name, work
from tools.bench.line_report import breaches, chart, figures, over_line
from tools.bench.systems import newton_schulz_share
from tools.bench.wire import count_bytes
from tools.reference_training import model_config
from tools.sharded_training import Case

# name: (lines, flags)
RUNS = {
    "fsdp zero 3": ("A,B,C,D,M", ["--zero-stage", "3", "--rounds", "2", "--against", "adamw"]),
    "fsdp zero 1": ("C,D", ["--zero-stage", "1"]),
    "fsdp zero 2": ("A,C", ["--zero-stage", "2", "--rounds", "1"]),
    "hsdp bf16": ("A,B,C,D", ["--sharding", "hsdp", "--dtype", "bf16", "--rounds", "1"]),
    "hsdp zero 2 tp": ("B,C,D", ["--sharding", "hsdp", "--tp", "2", "--zero-stage", "2"]),
}
COMMON = ["--model", "nano", "--ranks", "4", "--sequence", "8", "--micro-batch", "1"]
STEP_KEYS = [f"{name}_ms" for name in ("step", *PHASES, "optimizer_with_waits")]


def options_of(name: str) -> Any:
    names, flags = RUNS[name]
    return lines.build_parser().parse_args([*COMMON, "--rounds", "1", *flags, "--lines", names])


def schedule_of(options: Any) -> Schedule:
    return Schedule(
        rounds=options.rounds,
        steps=options.steps,
        compute=lines.DTYPES[options.dtype],
        reduce=lines.DTYPES[options.reduce_dtype],
    )


def all_runs(
    rank: int, world: int, runs: dict[str, tuple[list[Case], Schedule]]
) -> dict[str, dict[str, Any]]:
    found = {name: work(rank, world, *run) for name, run in runs.items()}
    return found | {
        "calls": counted_calls(rank, world),
        "wire": calls_on_the_wire(rank, world),
        "blocked": blocked_seconds(rank),
    }


def counted_calls(rank: int, world: int) -> list[tuple[str, int]]:
    """Bytes of calls whose volume is known."""
    pair = dist.new_group([0, 1])
    with count_bytes() as counter:
        dist.all_reduce(torch.zeros(6))
        splits = [1, 2, 3, 4]
        received = torch.empty(world * splits[rank])
        dist.all_to_all_single(
            received, torch.zeros(10), [splits[rank]] * world, splits, async_op=True
        ).wait()
        dist.all_gather([torch.empty(5) for _ in range(world)], torch.zeros(5))
        if rank < 2:
            dist.broadcast(torch.zeros(7, dtype=torch.bfloat16), 1, group=pair)
            if rank == 0:
                dist.isend(torch.zeros(9), 1, group=pair, tag=1).wait()
            else:
                dist.irecv(torch.zeros(9), 0, group=pair, tag=1).wait()
        torch.zeros(3).add_(1)
    return [(call.operation, call.nbytes) for call in counter.calls]


def written_bytes() -> int:
    """Bytes that this process has handed to the system: messages are written to sockets."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.split("wchar:")[1].split()[0])


def calls_on_the_wire(rank: int, world: int) -> dict[str, tuple[int, int, int]]:
    """What calls need, what they are counted as on the wire, and what is really written."""
    count = 1 << 16
    part, whole = torch.zeros(count), torch.zeros(count * world)
    calls = {
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "reduce": lambda: dist.reduce(whole, 1),
    }
    found = {}
    for name, call in calls.items():
        call()  # connects
        dist.barrier()
        before = written_bytes()
        with count_bytes() as counter:
            call()
        dist.barrier()  # what is still under way has been written when all have come here
        (counted,) = counter.calls
        found[name] = (counted.nbytes, counted.wire, written_bytes() - before)
    return found


def blocked_seconds(rank: int) -> float:
    """Rank 0 comes late: the others wait for it."""
    blocked = Blocked()
    dist.barrier()
    if rank == 0:
        time.sleep(1.0)
    with blocked.watch():
        dist.all_reduce(torch.zeros(1))
    before = blocked.communication
    dist.all_reduce(torch.zeros(1))
    assert blocked.communication == before  # not watched any more
    return before


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All runs on four ranks, one start."""
    runs = {}
    for name in RUNS:
        options = options_of(name)
        cases, _ = lines.cases_of(options, options.lines.split(","))
        runs[name] = (cases, schedule_of(options))
    folder = tmp_path_factory.mktemp("lines")
    return run_bench_ranks(all_runs, 4, runs, folder=folder, timeout=900)


def of_line(measured: list[dict[str, Any]], run: str, line: str) -> list[dict[str, Any]]:
    return [copy.deepcopy(rank[run][line]) for rank in measured]


CASES = [(run, line) for run, (names, _) in RUNS.items() for line in names.split(",")]
CASES += [("fsdp zero 3", lines.ADAMW)]


@pytest.mark.parametrize(("run", "line"), CASES)
def test_bytes_are_those_of_formula_and_plan(
    measured: list[dict[str, Any]], run: str, line: str
) -> None:
    ranks = of_line(measured, run, line)
    found = figures(ranks)
    assert breaches(line, found) == []
    assert found["bytes_over_formula"] == pytest.approx(1, abs=0.01)
    assert found["resident_bytes_over_formula"] == pytest.approx(1, abs=0.02)
    # Gathered layers, their gradients and activations come on top while it trains.
    assert found["peak_bytes_worst_rank"] > 1.2 * max(
        sum(rank["resident"][kind] for kind in RESIDENT) for rank in ranks
    )
    for rank in ranks:
        for kind in RESIDENT:
            assert rank["resident"][kind] == rank["resident_plan"][kind]
    # The runtime's own counter says what the calls that torch dispatches say; line D's operators
    # bypass torch, and are compared with line C's calls.
    if line != "D":
        for rank in ranks:
            sent = sum(nbytes for (_, link), nbytes in rank["sent"].items() if link != "tp")
            assert sent == rank["called"]
    assert (found["bytes"]["tp"] > 0) == ("tp" in run)
    assert (found["bytes"]["across_rows"] > 0) == ("hsdp" in run)


def test_the_forms_are_the_papers(measured: list[dict[str, Any]]) -> None:
    """2(N-1)P, 3(N-1)P less what stays gathered, 2(R-1)P: with nano's numbers written out."""
    everything = measured[0]["fsdp zero 3"]["C"]["elements"]
    stays = 50 + 257 * 50  # the last norm; the table, which is tied to the head
    found = figures(of_line(measured, "fsdp zero 3", "C"))
    assert found["bytes"]["inside_rows"] == 4 * 3 * (3 * everything - stays)
    found = figures(of_line(measured, "fsdp zero 2", "C"))
    assert found["bytes"]["inside_rows"] == 4 * 3 * 2 * everything
    found = figures(of_line(measured, "hsdp bf16", "C"))
    owned = everything - 257 * 50
    across = (2 + 4) * owned + (4 + 4) * 257 * 50
    assert found["bytes"]["across_rows"] == pytest.approx(across, rel=0.005)  # and headers
    assert found["bytes_padding"] == 0
    assert figures(of_line(measured, "fsdp zero 3", "A"))["bytes_padding"] > 0


def test_line_d_sends_what_line_c_sends_and_no_headers(measured: list[dict[str, Any]]) -> None:
    for run in ("fsdp zero 3", "hsdp bf16", "hsdp zero 2 tp"):
        c, d = (figures(of_line(measured, run, line)) for line in "CD")
        assert set(d["bytes_over_formula_by_kind"].values()) == {1.0}
        for kind, nbytes in c["bytes_by_kind"].items():
            if not kind.startswith("publish"):
                assert d["bytes_by_kind"][kind] == nbytes, (run, kind)
        assert "publish" in d["bytes_in_optimizer_step"] or run == "fsdp zero 3"


@pytest.mark.parametrize("run", ["fsdp zero 3", "fsdp zero 1", "hsdp bf16", "hsdp zero 2 tp"])
def test_the_pool_is_its_plan(measured: list[dict[str, Any]], run: str) -> None:
    ranks = of_line(measured, run, "D")
    found = figures(ranks)
    assert found["pool_bytes_over_plan"] == found["pool_kinds_over_bytes"] == 1
    for rank in ranks:
        pool, held = rank["pool"], rank["resident"]
        assert pool["open"] and pool["groups_left_out"] == []
        for kind, nbytes in pool["by_kind"].items():
            assert rank["memory"][f"pool_{kind}"] == nbytes
        assert pool["by_kind"]["gradients"] > 0 and pool["control_bytes"] == held["control"] > 0
        assert pool["own_windows_bytes"] == held["gradients"] <= pool["by_kind"]["windows"]
        rest = pool["bytes"] - pool["own_windows_bytes"]
        stays = run == "fsdp zero 1"  # whole weights, in the pool and no longer on the heap
        assert held["pool"] < rest if stays else held["pool"] == rest
        # Buffers share, but where all weights and all gradients are there at once.
        assert pool["bytes"] < pool["unshared_bytes"] + stays
    kept = sum(found["resident_bytes_mean"][kind] for kind in (*RESIDENT, "pool", "control"))
    formula = sum(found["resident_bytes_formula"].values())
    assert found["resident_bytes_with_pool_over_formula"] == pytest.approx(kept / formula)
    assert "pool" not in figures(of_line(measured, run, "C"))


def test_a_pool_that_is_not_its_plan_is_a_breach(measured: list[dict[str, Any]]) -> None:
    ranks = of_line(measured, "fsdp zero 3", "D")
    ranks[1]["pool"]["bytes"] += 256
    texts = breaches("D", figures(ranks))
    assert [text.rpartition(" times ")[2] for text in texts] == ["its plan", "the pool"]
    ranks[2]["pool"] = {"open": False, "notes": ["collectives: grouped calls instead"]}
    (text,) = breaches("D", figures(ranks))
    assert text.endswith("pool is not open on a rank: collectives: grouped calls instead")


def test_lines_with_one_optimizer_train_alike(measured: list[dict[str, Any]]) -> None:
    of_rank = measured[0]["fsdp zero 3"]
    for line in "BM":
        assert of_rank[line]["losses"] == pytest.approx(of_rank["C"]["losses"], rel=1e-4)
    assert of_rank["D"]["losses"] == of_rank["C"]["losses"]  # bit for bit
    assert of_rank["A"]["losses"][0] == pytest.approx(of_rank["C"]["losses"][0], rel=1e-5)
    assert of_rank[lines.ADAMW]["losses"] == pytest.approx(of_rank["A"]["losses"], rel=1e-4)


def test_newton_schulz_share_falls_with_tokens(measured: list[dict[str, Any]]) -> None:
    few = measured[0]["fsdp zero 3"]["C"]["newton_schulz_share"]
    options = lines.build_parser().parse_args(
        ["--model", "nano", "--sequence", "256", "--micro-batch", "24"]
    )
    (case,), _ = lines.cases_of(options, ["C"])
    with torch.device("meta"):
        parameters = collect(GPT(model_config("nano")), layers=GPT.layer_classes)
    plan = build_plan(parameters, Topology(replicas=1, shards=4), closed_form_cost())
    assert newton_schulz_share(case, plan) < 0.05 < few < 1


def test_phases_add_up_to_the_step(measured: list[dict[str, Any]]) -> None:
    for run, line in CASES:
        for rank in of_line(measured, run, line):
            assert len(rank["steps"]) == options_of(run).rounds
            for step in rank["steps"]:
                assert sum(step[name] for name in PHASES) == pytest.approx(step["step"], rel=1e-6)
                assert all(step[name] >= 0 for name in PHASES)
                assert step["exposed_communication"] > 0


@pytest.mark.parametrize("line", ["C", "D"])
@pytest.mark.parametrize("kind", ["gather", "reduce", "publish"])
def test_a_miscount_is_a_breach(measured: list[dict[str, Any]], kind: str, line: str) -> None:
    ranks = of_line(measured, "hsdp bf16", line)
    key = next(key for key in ranks[1]["sent"] if key[0] == kind)
    total = sum(rank["sent"].get(key, 0) for rank in ranks)
    ranks[1]["sent"][key] += round(total * 0.015)
    (text,) = breaches(line, figures(ranks))
    assert f"line {line}: {kind} {key[1]} sends 1.01" in text
    del ranks[1]["traffic_formula"], ranks[0]["traffic_formula"][key]  # traffic nobody foresaw
    assert "sends inf times" in breaches(line, figures(ranks))[0]


def test_bytes_that_should_not_be_there_are_a_breach(measured: list[dict[str, Any]]) -> None:
    ranks = of_line(measured, "fsdp zero 3", "C")
    held = ranks[2]["resident"]
    held["parameters"] += 200  # 0.3 % of a rank: within the formula's tolerance
    assert [text.split(" holds ")[0] for text in breaches("C", figures(ranks))] == [
        "line C: a rank"
    ]
    held["parameters"] *= 2
    assert any("parameters take" in text for text in breaches("C", figures(ranks)))
    ranks = of_line(measured, "fsdp zero 3", "C")
    ranks[0]["resident"]["transient"] = 8
    ranks[3]["optimizer_step_sent"]["gather"] = 4
    assert breaches("C", figures(ranks)) == [
        "line C: 8 transient bytes on a rank between passes",
        "line C: the optimizer step sends gather",
    ]
    ranks[3]["optimizer_step_sent"] = {"matrix_gather": 4}  # line B's alone
    assert "matrix_gather" in breaches("C", figures(ranks))[1]


def test_forms_are_those_of_the_estimate() -> None:
    with torch.device("meta"):
        parameters = collect(GPT(model_config("nano")), layers=GPT.layer_classes)
    plan = build_plan(parameters, Topology(replicas=2, shards=2), closed_form_cost())
    shape = LineShape(zero_stage=3, compute=2)
    expected = estimate(plan, zero_stage=3)
    held = resident(plan, shape)
    for kind in RESIDENT:
        assert tuple(held[kind].flat) == getattr(expected, kind)
        assert resident_formula(plan, shape)[kind] == pytest.approx(held[kind].mean())
    inside = sum(n for (_, axis), n in traffic_formula(plan, shape).items() if axis == "shard")
    assert inside == sum(expected.sent_inside_replicas)


# --- counters ------------------------------------------------------------------------------------


def test_calls_are_counted_by_their_tensors(measured: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(measured):
        calls = [
            ("allreduce", 2 * 3 * 6 * 4 // 4),
            ("alltoall_base", (10 - (rank + 1)) * 4),
            ("allgather", 3 * 5 * 4),
        ]
        if rank < 2:
            calls.append(("broadcast", 7 * 2 * (rank == 1)))
            calls.append(("send", 9 * 4) if rank == 0 else ("recv", 0))
        assert found["calls"] == calls


def test_bytes_on_the_wire_are_those_that_are_written(measured: list[dict[str, Any]]) -> None:
    """Gloo's reduce_scatter_tensor is an all-reduce: twice what its algorithm needs."""
    for rank, found in enumerate(measured):
        more = {"reduce_scatter"} | (
            {"reduce"} if rank == 1 else set()
        )  # the root of the reduction
        for name, (needed, wire, written) in found["wire"].items():
            assert written == pytest.approx(wire, rel=0.02), name  # and headers of messages
            assert (wire > needed) == (name in more), name
        needed, wire, _ = found["wire"]["reduce_scatter"]
        assert wire == 2 * needed > 0
    a, c = (figures(of_line(measured, "fsdp zero 3", line)) for line in "AC")
    assert c["bytes_on_the_wire"] == c["bytes"]
    reduced = a["bytes_by_kind"]["reduce inside_rows"]
    assert a["bytes_on_the_wire"]["inside_rows"] == a["bytes"]["inside_rows"] + reduced


def test_waits_are_seen(measured: list[dict[str, Any]]) -> None:
    late, *others = (found["blocked"] for found in measured)
    assert min(others) > late > 0


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def stored(measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes the measurements of the first run instead of starting ranks."""
    ranks = [copy.deepcopy(rank["fsdp zero 3"]) for rank in measured]
    monkeypatch.setattr(lines, "run_bench_ranks", lambda *_, **__: ranks)


@pytest.mark.usefixtures("stored")
def test_json_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    figures_path, chart_path = tmp_path / "lines.json", tmp_path / "lines.png"
    arguments = [*COMMON, "--json", str(figures_path), "--png", str(chart_path)]
    assert lines.main([*arguments, "--against", "adamw"]) == 0
    document = json.loads(figures_path.read_text(encoding="utf-8"))
    assert list(document["lines"]) == ["A", "B", "C", "D", "M", lines.ADAMW]
    for key in ("step_ratio_muon_vs_adamw", "step_ratio_vs_fsdp2_adamw", "newton_schulz_share"):
        assert document[key] > 0
    assert document["d_over_c"] == document["step_over_line_c"]["D"]
    for key, line in (("d_over_a", "D"), ("c_over_a", "C")):
        assert document[key] == document["step_over_line_a"][line]
    assert document["largest_loss_difference_adamw"] < 1e-4
    assert document["largest_loss_difference_d_and_c"] == 0
    assert document["line_d_resident_bytes_over_plan"] == pytest.approx(1, abs=0.001)
    assert document["busiest_owner_over_mean"] >= 1
    muon, adamw = (
        sum(document["lines"][line]["resident_bytes_mean"][kind] for kind in RESIDENT)
        for line in ("C", lines.ADAMW)
    )
    assert muon < adamw
    assert document["lines"]["D"]["resident_bytes_with_pool_over_formula"] > 1.1
    assert document["resident_bytes_over_formula"] == pytest.approx(1, abs=0.02)
    assert document["resident_bytes_over_plan"] == pytest.approx(1, abs=0.001)
    for found in document["lines"].values():
        assert all(isinstance(found[key], float) for key in STEP_KEYS)
        assert found["bytes_over_formula"] == pytest.approx(1, abs=0.01)
        assert found["resident_bytes_over_formula"] == pytest.approx(1, abs=0.02)
        assert set(found["resident_bytes_mean"]) >= set(RESIDENT)
    assert document["step_over_line_c"]["C"] == document["optimizer_over_line_c"]["C"] == 1
    assert document["step_over_line_a"]["A"] == 1 and document["step_over_line_a"]["D"] > 0
    assert (document["passed"], document["grid"]) == (True, "1x4")
    header = chart_path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and min(struct.unpack(">II", header[16:])) > 400
    printed = capsys.readouterr().out
    assert "step time over line C's: A" in printed and "BREACH" not in printed
    assert "line A on Gloo: reduce_scatter_tensor moves an all-reduce's bytes" in printed
    assert "step time over line A's: B" in printed and "line D keeps a pool of " in printed


@pytest.mark.usefixtures("stored")
def test_a_breach_is_printed_and_decides_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = lines.run_bench_ranks()  # type: ignore[call-arg]
    ranks[0]["B"]["sent"]["matrix_gather", "inside_rows"] *= 2
    assert lines.main(COMMON) == 1
    assert "BREACH line B: matrix_gather inside_rows sends 1." in capsys.readouterr().out


def test_line_c_stands_beside_itself_with_adamw() -> None:
    parser = lines.build_parser()
    options = parser.parse_args([*COMMON, "--against", "adamw"])
    cases, _ = lines.cases_of(options, ["A", "C"])
    named = by_name(cases)
    assert list(named) == ["A", "C", lines.ADAMW]
    assert named[lines.ADAMW].training.optimizer == "adam" != named["C"].training.optimizer
    with pytest.raises(ValueError, match="needs lines A and C"):
        lines.cases_of(options, ["C"])


def test_lines_that_do_not_apply_say_why() -> None:
    parser = lines.build_parser()
    options = parser.parse_args([*COMMON, "--sharding", "hsdp", "--zero-stage", "2"])
    cases, reasons = lines.cases_of(options, "ABCDM")
    assert [(case.line, case.replicas, case.shards) for case in cases] == [
        ("A", 2, 2),
        ("B", 2, 2),
        ("C", 2, 2),
        ("D", 2, 2),
    ]
    assert list(reasons) == ["M"] and "2 replicas, ZeRO stage 2" in reasons["M"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lines", "A,H"], "--lines A,H: name some of A,B,C,D,M"),
        (["--lines", "M", "--zero-stage", "2"], "nothing to run: line M"),
        (["--ranks", "1"], "--ranks 1: at least 2"),
        (["--ranks", "4", "--tp", "3"], "a multiple of --tp"),
        (["--sharding", "hsdp", "--shard-size", "3"], "--shard-size 3 does not divide 4"),
        (["--shard-size", "2"], "--shard-size is for --sharding hsdp"),
        (["--model", "large"], "--model large: no such preset"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        lines.main(flags)
    assert message in capsys.readouterr().err


def test_a_chart_without_matplotlib_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(RuntimeError, match="--png needs matplotlib"):
        chart({}, tmp_path / "lines.png", "")


def test_ratios_are_paired_by_step() -> None:
    def rank(*seconds: float) -> dict[str, Any]:
        return {"steps": [{"step": value} for value in seconds]}

    # The machine is half as fast in the second step: no ratio of medians would see 2.
    measured = {"C": [rank(1.0, 2.0, 1.0)], "B": [rank(1.0, 4.0, 2.0), rank(2.0, 3.0, 1.0)]}
    assert over_line(measured, "C", "step") == {"C": 1.0, "B": 2.0}
    assert over_line({"B": measured["B"]}, "C", "step") == {}
