"""tools/plan_owners.py and tools/bench/planner.py: figures as commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megamuon.matrices import LogicalParameter
from megamuon.models import PRESETS
from megamuon.ownership import OwnershipPlan
from megamuon.ownership.inventory import inventory, inventory_names
from tests.support.ownership import CASES
from tools import plan_owners
from tools.bench import planner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ["--model", "qwen2.5-1.5b", "--sharding", "hsdp", "--nodes", "8", "--gpus-per-node", "8"]
KEYS = [
    "rails",
    "heaviest_rail_over_mean",
    "busiest_over_mean_ns",
    "busiest_over_mean_bytes",
    "owner_window_mib",
    "optimizer_state_gib_busiest",
    "routes",
    "plan_seconds",
]


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
    assert content["routes"] == {"muon": 196, "adamw_owner": 141, "adamw_sharded": 1, "frozen": 0}
    assert len(content["rails"]) == 8
    assert all(set(rail) == {"parameters", "mib", "ns_ms"} for rail in content["rails"])
    assert content["heaviest_rail_over_mean"] <= 1.06
    assert content["owner_window_mib"] == 52.5
    assert round(content["optimizer_state_gib_busiest"], 3) == 0.320
    assert content["plan_seconds"] < 10
    for words in ("routing of parameters", "declared as a matrix", "rail", "digest"):
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
        ("qwen2.5-1.5b", ["--sharding", "fsdp"]),
    ],
)
def test_each_switch_changes_the_plan(tmp_path: Path, model: str, switch: list[str]) -> None:
    digests = []
    for extra in ([], switch):
        path = tmp_path / "plan.json"
        grid = ["--sharding", "hsdp", "--nodes", "4", "--gpus-per-node", "4"]
        plan_owners.main(["--model", model, *grid, *extra, "--plan", str(path)])
        plan = OwnershipPlan.from_json(path.read_text(encoding="utf-8"))
        digests.append((plan.owners, tuple(u.members for u in plan.units)))
    assert digests[0] != digests[1]


def test_fsdp_rails_are_gpus_of_a_node(tmp_path: Path) -> None:
    found = figures(tmp_path, "--model", "qwen3-0.6b", "--nodes", "4", "--gpus-per-node", "2")
    assert len(found["rails"]) == 2
    assert sum(rail["parameters"] for rail in found["rails"]) == 309


def test_a_user_table_of_shapes(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text('[{"name": "a", "shape": [8, 8], "kind": "matrix"}]', encoding="utf-8")
    assert figures(tmp_path, "--shapes", str(path))["routes"]["muon"] == 1


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
        return {(p.name, p.shape, p.kind, p.route, p.layout, p.layer) for p in parameters}

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
    assert "got -0.1" in failure(capsys, *model, "--owner-byte-cap", "-0.1")
    shapes = tmp_path / "shapes.json"
    shapes.write_text('[{"name": "a", "shape": [8, 8]}]', encoding="utf-8")
    text = failure(capsys, "--shapes", str(shapes))
    assert "shapes.json" in text
    assert "kind is None" in text
    assert "nowhere.json" in failure(capsys, "--shapes", "nowhere.json")


def test_planner_benchmark(tmp_path: Path) -> None:
    """A tenth of the stated size: far below the ten seconds that the whole may take."""
    path = tmp_path / "bench.json"
    planner.main(["--units", "7000", "--ranks", "4096", "--json", str(path)])
    content = json.loads(path.read_text(encoding="utf-8"))
    assert list(content) == ["units", "ranks", "plan_seconds"]
    assert (content["units"], content["ranks"]) == (7000, 4096)
    assert content["plan_seconds"] < 10
