"""tools/plan_owners.py and tools/bench/planner.py: figures as commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megamuon.matrices import LogicalParameter, Route
from megamuon.models import PRESETS
from megamuon.ownership import POLICIES, OwnershipPlan
from megamuon.ownership.inventory import inventory, inventory_names
from megamuon.ownership.owners import tp_owners
from megamuon.placements import Axis, Placement, Shard
from tests.support.ownership import CASES
from tools import plan_owners
from tools.bench import planner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ["--model", "qwen2.5-1.5b", "--sharding", "hsdp", "--nodes", "8", "--gpus-per-node", "8"]
MOE = ["--model", "qwen1.5-moe-a2.7b", "--sharding", "fsdp", "--nodes", "32"]
MOE += ["--gpus-per-node", "8", "--ns-cost", "closed-form"]
KEYS = [
    "rails",
    "heaviest_rail_over_mean",
    "heaviest_rail_over_mean_ns",
    "busiest_over_mean_ns",
    "busiest_over_mean_bytes",
    "busiest_over_mean_muon_bytes_nonempty_owners",
    "owner_window_mib",
    "optimizer_state_gib_busiest",
    "routes",
    "plan_seconds",
    "gamma",
    "bytes_per_rank",
    "estimate_mib",
]
KINDS = {
    "parameters",
    "gradients",
    "optimizer_state",
    "workspace",
    "sent_inside_rows",
    "received_inside_rows",
    "sent_across_rows",
    "received_across_rows",
}


def figures(tmp_path: Path, *arguments: str) -> dict[str, object]:
    path = tmp_path / "figures.json"
    plan_owners.main([*arguments, "--json", str(path)])
    return json.loads(path.read_text(encoding="utf-8"))


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        plan_owners.main(list(arguments))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_the_command_of_the_readme_runs_without_installation(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    script = [sys.executable, "tools/plan_owners.py", *EXAMPLE, "--ns-cost", "closed-form"]
    done = subprocess.run(
        [*script, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content) == KEYS
    assert content["routes"] == {"matrix": 196, "adamw_owner": 141, "adamw_sharded": 1, "frozen": 0}
    assert len(content["rails"]) == 8
    names = {"parameters", "mib", "ns_ms", "publish_order"}
    assert all(set(rail) == names for rail in content["rails"])
    assert set(content["bytes_per_rank"]) == set(content["estimate_mib"]) == KINDS
    assert {len(values) for values in content["bytes_per_rank"].values()} == {64}
    assert len(content["gamma"]) == 29
    assert content["heaviest_rail_over_mean"] <= 1.06
    assert content["owner_window_mib"] == 52.5
    assert round(content["optimizer_state_gib_busiest"], 3) == 0.320
    assert content["plan_seconds"] < 10
    for words in ("routing of parameters", "declared as a matrix", "rail", "publish", "digest"):
        assert words in done.stdout


def test_a_golden_case_through_the_command_line(tmp_path: Path) -> None:
    case = CASES["table7a"]
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(case["ns_ms"]), encoding="utf-8")
    found = figures(tmp_path, *EXAMPLE, "--ns-cost", "file", "--ns-cost-file", str(costs))
    rails = [[rail["parameters"], round(rail["mib"], 2)] for rail in found["rails"]]
    assert rails == case["expect"]["rails"]
    for key in ("busiest_over_mean_ns", "busiest_over_mean_bytes", "heaviest_rail_over_mean"):
        assert round(found[key], 4) == case["expect"][key]


@pytest.mark.parametrize(
    ("model", "switch"),
    [
        ("qwen2.5-7b", ["--no-owner-column-balance"]),
        ("qwen2.5-1.5b", ["--owner-byte-cap", "none"]),
        ("qwen2.5-1.5b", ["--owner-byte-cap", "3"]),
        ("qwen2.5-7b", ["--no-owner-layer-spreading"]),
        ("qwen2.5-1.5b", ["--owner-planner", "numel"]),
        ("qwen2.5-1.5b", ["--owner-planner", "round_robin"]),
        ("qwen2.5-1.5b", ["--owner-unit-threshold", "100000"]),
        ("qwen1.5-moe-a2.7b", ["--merge-experts"]),
        ("qwen1.5-moe-a2.7b", ["--routers", "muon"]),
        ("qwen2.5-1.5b", ["--policy", "role_greedy"]),
        ("qwen2.5-1.5b", ["--policy", "scope_greedy"]),
        ("qwen2.5-1.5b", ["--shard-size", "2"]),
        ("qwen2.5-1.5b", ["--tp", "2"]),
        ("qwen2.5-1.5b", ["--sharding", "fsdp"]),
        ("qwen2.5-1.5b", ["--param-layout", "even"]),
    ],
)
def test_each_switch_changes_the_plan(tmp_path: Path, model: str, switch: list[str]) -> None:
    digests = []
    for extra in ([], switch):
        path = tmp_path / "plan.json"
        grid = ["--sharding", "hsdp", "--nodes", "4", "--gpus-per-node", "4"]
        plan_owners.main(["--model", model, *grid, *extra, "--plan", str(path)])
        plan = OwnershipPlan.from_json(path.read_text(encoding="utf-8"))
        units = tuple(u.members for u in plan.units)
        digests.append((plan.owners, plan.costs, plan.parameters, units))
    assert digests[0] != digests[1]


def test_fsdp_rails_are_gpus_of_a_node(tmp_path: Path) -> None:
    found = figures(tmp_path, "--model", "qwen3-0.6b", "--nodes", "4", "--gpus-per-node", "2")
    assert len(found["rails"]) == 2
    assert sum(rail["parameters"] for rail in found["rails"]) == 309


def test_each_rail_publishes_its_parameters_in_forward_order(tmp_path: Path) -> None:
    found = figures(tmp_path, *EXAMPLE)
    order = [p.name for p in plan_owners.parameters_for("qwen2.5-1.5b")]
    published = [rail["publish_order"] for rail in found["rails"]]
    for names, rail in zip(published, found["rails"], strict=True):
        assert names == sorted(names, key=order.index)
        assert len(names) == rail["parameters"]
    assert sorted(name for names in published for name in names) == sorted(order[1:])
    fsdp = figures(tmp_path, "--model", "qwen3-0.6b", "--nodes", "2")
    assert all(rail["publish_order"] == [] for rail in fsdp["rails"])


def test_moe_figures(tmp_path: Path) -> None:
    """Appendix C.5: experts by themselves against experts merged into their layer's unit."""
    found = figures(tmp_path, *MOE)
    assert found["owner_window_mib"] <= 110.0
    assert found["busiest_over_mean_bytes"] <= 1.078
    assert found["routes"]["matrix"] == 4488
    merged = figures(tmp_path, *MOE, "--merge-experts")
    assert round(merged["owner_window_mib"], 2) == 1022.26
    assert round(merged["busiest_over_mean_muon_bytes_nonempty_owners"], 3) == 3.757
    # The published pair: time alone decides.
    paper = figures(tmp_path, *MOE, "--routers", "muon", "--owner-byte-cap", "none")
    assert paper["routes"]["matrix"] == 4536
    assert paper["owner_window_mib"] == 110.0
    assert round(paper["busiest_over_mean_bytes"], 4) == 1.0782


def test_sweep_over_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table 3: state and time of the busiest rank fall as nodes are added."""
    points = figures(tmp_path, *EXAMPLE, "--sweep-nodes", "1,2,4,8,16,32")["sweep"]
    states = [round(point["optimizer_state_gib_busiest"], 3) for point in points]
    assert [point["ranks"] for point in points] == [8, 16, 32, 64, 128, 256]
    assert states[2:] == [0.392, 0.320, 0.269, 0.269]
    for key in ("optimizer_state_gib_busiest", "slowest_rank_ns_ms"):
        values = [point[key] for point in points]
        assert values == sorted(values, reverse=True)
        assert len(set(values[:5])) == 5
    assert "slowest ms" in capsys.readouterr().out


def test_the_estimate_follows_stage_and_micro_batches(tmp_path: Path) -> None:
    flags = ([], ["--zero-stage", "2"], ["--zero-stage", "1"], ["--micro-batches", "4"])
    sent = []
    for extra in flags:
        found = figures(tmp_path, "--model", "nano", "--gpus-per-node", "4", *extra)
        assert found["estimate_mib"]["parameters"]["busiest"] > 0
        sent.append(found["estimate_mib"]["sent_inside_rows"]["mean"])
    assert sent[0] > sent[1] == sent[2]
    assert sent[3] == pytest.approx(4 * sent[0])


def test_tensor_parallelism_shares_the_time_and_the_grid(tmp_path: Path) -> None:
    grid = ["--model", "qwen2.5-7b", "--sharding", "hsdp", "--nodes", "2", "--gpus-per-node", "4"]
    whole = figures(tmp_path, *grid)
    assert "tp" not in whole
    found = figures(tmp_path, *grid, "--tp", "2", "--plan", str(tmp_path / "plan.json"))
    plan = OwnershipPlan.from_json((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert (plan.topology.replicas, plan.topology.shards, plan.topology.tp) == (2, 2, 2)
    assert found["tp"]["owners"] == tp_owners(plan.parameters)
    assert len(found["tp"]["owners"]) == 196
    assert 1.0 <= found["tp"]["slowest_over_mean_ns"] < 1.2


def test_presets_are_cut_as_a_run_cuts_them(capsys: pytest.CaptureFixture[str]) -> None:
    """By whole key/value groups, not by rows: 8 groups of 4 heads of 128 rows on 3 ranks."""
    parameters = {p.name: p for p in plan_owners.parameters_for("llama3-8b", 3)}
    layer = "model.layers.0.self_attn"
    for name, bounds in (("q_proj", (0, 1536, 3072, 4096)), ("k_proj", (0, 384, 768, 1024))):
        rows = Placement.of({Axis.TP: Shard(0, bounds)})
        assert parameters[f"{layer}.{name}.weight"].compute == rows
    columns = Placement.of({Axis.TP: Shard(1, (0, 1536, 3072, 4096))})
    assert parameters[f"{layer}.o_proj.weight"].compute == columns
    text = failure(capsys, "--model", "qwen2.5-0.5b", "--gpus-per-node", "4", "--tp", "4")
    assert "2 key/value groups" in text


def test_moves_of_the_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two tensor-parallel ranks: half of every matrix to the other, in FP32, and back."""
    grid = ["--model", "qwen2.5-1.5b", "--sharding", "hsdp", "--nodes", "2", "--gpus-per-node", "4"]
    found = figures(tmp_path, *grid, "--tp", "2", "--moves")["moves"]
    elements = sum(
        p.numel for p in plan_owners.parameters_for("qwen2.5-1.5b") if p.route is Route.MATRIX
    )
    assert [list(move) for move in found] == [["axis", "kind", "parameters", "bytes"]] * 56
    assert [(m["axis"], m["kind"]) for m in found[:2]] == [("tp", "to_owner"), ("tp", "from_owner")]
    assert [len(move["parameters"]) for move in found] == [7] * 56
    assert sum(move["bytes"] for move in found) == 2 * elements // 2 * 4
    assert "tp: to_owner" in capsys.readouterr().out
    assert figures(tmp_path, *grid, "--moves")["moves"] == []
    assert "every matrix is whole" in capsys.readouterr().out
    even = figures(tmp_path, *grid, "--tp", "2", "--moves", "--param-layout", "even")["moves"]
    sent = {axis: sum(m["bytes"] for m in even if m["axis"] == axis) for axis in ("shard", "tp")}
    # Each of two replicas gathers over two ranks; then each of four pairs of tp ranks.
    assert sent == {"shard": 2 * elements * 4, "tp": 4 * elements * 4}


def test_shard_size_cuts_nodes_or_spans_them(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for size, replicas in (("2", 8), ("4", 4), ("8", 2), ("16", 1)):
        grid = ["--sharding", "hsdp", "--nodes", "4", "--gpus-per-node", "4", "--shard-size", size]
        plan_owners.main(["--model", "tiny", *grid, "--plan", str(path)])
        topology = OwnershipPlan.from_json(path.read_text(encoding="utf-8")).topology
        assert (topology.replicas, topology.shards) == (replicas, int(size))


def test_a_user_table_of_shapes(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text('[{"name": "a", "shape": [8, 8], "kind": "matrix"}]', encoding="utf-8")
    assert figures(tmp_path, "--shapes", str(path))["routes"]["matrix"] == 1


def test_every_model_of_the_list_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    plan_owners.main(["--list-models"])
    names = capsys.readouterr().out.split()
    assert set(names) == {*PRESETS, *inventory_names()}
    for name in names:
        plan_owners.main(["--model", name])
        assert "busiest rank over mean" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in PRESETS if name in inventory_names()])
def test_presets_have_the_parameters_of_the_published_table(name: str) -> None:
    def facts(parameters: tuple[LogicalParameter, ...]) -> set[tuple[object, ...]]:
        return {
            (p.name, p.shape, p.kind, p.route, p.storage, p.update, p.layer) for p in parameters
        }

    assert facts(plan_owners.parameters_for(name)) == facts(inventory(name))


def test_small_presets_bring_their_own_threshold(tmp_path: Path) -> None:
    """Their layers have at least four units; the flag still wins."""
    counts = []
    for extra in ([], ["--owner-unit-threshold", "5000000"]):
        path = tmp_path / "plan.json"
        plan_owners.main(["--model", "tiny", *extra, "--plan", str(path)])
        plan = OwnershipPlan.from_json(path.read_text(encoding="utf-8"))
        counts.append(sum(unit.layer.endswith("layers.0") for unit in plan.units))
    assert counts[0] >= 4
    assert counts[1] == 1


def test_bad_input_is_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = failure(capsys, "--model", "qwen2.5-1b")
    assert "did you mean qwen2.5-1.5b?" in text
    assert "qwen3-30b-a3b" in text
    model = ["--model", "qwen2.5-1.5b"]
    assert "needs --ns-cost-file" in failure(capsys, *model, "--ns-cost", "file")
    costs = tmp_path / "costs.json"
    costs.write_text("[[[1536, 1536], 1.0]]", encoding="utf-8")
    text = failure(capsys, *model, "--ns-cost", "file", "--ns-cost-file", str(costs))
    assert "3 shape(s): [256, 1536], [1536, 8960], [8960, 1536]" in text
    assert "--nodes must be at least 1, got 0" in failure(capsys, *model, "--nodes", "0")
    assert "--shard-size goes with" in failure(capsys, *model, "--shard-size", "4")
    text = failure(capsys, *model, "--sharding", "hsdp", "--shard-size", "3")
    assert "--shard-size 3 does not divide the 8" in text
    assert "--tp 3 does not divide --gpus-per-node 8" in failure(capsys, *model, "--tp", "3")
    assert "must be at least 1, got 0" in failure(capsys, *model, "--micro-batches", "0")
    assert "got -0.1" in failure(capsys, *model, "--owner-byte-cap", "-0.1")
    shapes = tmp_path / "shapes.json"
    shapes.write_text('[{"name": "a", "shape": [8, 8]}]', encoding="utf-8")
    text = failure(capsys, "--shapes", str(shapes))
    assert "shapes.json" in text
    assert "kind is None" in text
    assert "nowhere.json" in failure(capsys, "--shapes", "nowhere.json")


@pytest.mark.parametrize("policy", POLICIES)
def test_planner_benchmark(tmp_path: Path, policy: str) -> None:
    """A tenth of the stated size: far below the ten seconds that the whole may take."""
    path = tmp_path / "bench.json"
    size = ["--units", "7000", "--ranks", "4096"]
    planner.main([*size, "--policy", policy, "--json", str(path)])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content) == ["units", "ranks", "plan_seconds"]
    assert (content["units"], content["ranks"]) == (7000, 4096)
    assert content["plan_seconds"] < 10
