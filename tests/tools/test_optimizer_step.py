"""tools/bench/optimizer_step.py: lines C, D and M against Muon on FSDP2."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from tools.bench import optimizer_step
from tools.bench.optimizer_systems import deal, iteration_cost

SMALL = {"many_small": (2, [(16, 16), (32, 16), (16, 32)]), "few_large": (1, [(48, 48)])}
DEALT = ["dealt_muon", "dealt_in_rounds"]
SYSTEMS = ["owners", "owners_d", "owners_m", *DEALT, "fsdp2_muon", "gather_once"]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on two and on four ranks with small matrices."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_step, "SETTINGS", SMALL)
        arguments = ["--ranks", "2,4", "--repeats", "2", "--stock", "--json", str(path)]
        assert optimizer_step.main(arguments) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_number_of_ranks_has_its_ratios(document: dict[str, Any]) -> None:
    assert list(document["by_ranks"]) == ["2", "4"]
    for ranks, found in document["by_ranks"].items():
        assert (found["ranks"], found["repeats"]) == (int(ranks), 2)
        assert list(found["settings"]) == list(SMALL)
        for entry in found["settings"].values():
            for seconds in ("seconds", "rest_seconds", "whole_seconds"):
                assert list(entry[seconds]) == SYSTEMS and min(entry[seconds].values()) > 0
            assert entry["faster_dealt"] == min(DEALT, key=lambda kind: entry["seconds"][kind])
            assert entry["speedup_vs_dealt_muon"] >= found["speedup_vs_dealt_muon"] > 0
            assert found["whole_step_speedup_vs_dealt_muon"] > 0
            assert 0 < entry["line_c_over_fsdp2_muon"] <= found["line_c_over_fsdp2_muon"]
            assert 0 < entry["line_d_over_fsdp2_muon"] <= found["line_d_over_fsdp2_muon"]
            assert 0 < entry["line_m_over_fsdp2_muon"] <= found["line_m_over_fsdp2_muon"]
            assert entry["line_d_over_line_c"] > 0
        assert found["settings"]["many_small"]["line_m_over_stock_muon"] > 0
    top = {key: value for key, value in document.items() if key != "by_ranks"}
    assert top == document["by_ranks"]["4"]


def test_all_systems_compute_the_same_and_owners_send_nothing(document: dict[str, Any]) -> None:
    for found in document["by_ranks"].values():
        assert found["optimizer_collectives"] == 0
        for entry in found["settings"].values():
            assert entry["largest_weight_difference"] < 1e-5


def test_bytes_are_those_of_what_each_system_does(document: dict[str, Any]) -> None:
    for ranks, found in document["by_ranks"].items():
        world = int(ranks)
        for name, entry in found["settings"].items():
            layers, shapes = SMALL[name]
            whole = 4 * layers * sum(rows * cols for rows, cols in shapes)
            moved, others = entry["bytes"], (world - 1) / world
            for kind in DEALT:  # all but a rank's own share, there and back
                assert moved[kind]["step"]["needed"] == pytest.approx(2 * whole * others / world)
                assert moved[kind]["step"]["on_the_wire"] == moved[kind]["step"]["needed"]
            assert moved["gather_once"]["step"]["needed"] == pytest.approx(whole * others)
            assert moved["owners"]["step"]["needed"] < 200  # the norm
            for kind in ("owners", "dealt_muon"):  # two gathers and a reduction of everything
                rest = moved[kind]["rest"]
                assert rest["needed"] == pytest.approx(3 * whole * others, rel=0.35)
            rest = moved["dealt_muon"]["rest"]  # Gloo's reduction is an all-reduce
            assert rest["on_the_wire"] == pytest.approx(rest["needed"] + whole * others)
            assert moved["owners"]["rest"]["on_the_wire"] == moved["owners"]["rest"]["needed"]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 4])
def test_every_matrix_is_dealt_once_and_evenly(world: int, parts: int) -> None:
    shapes = [(128, 128), (128, 128), (256, 128), (128, 256)] * 12
    rounds = deal(shapes, world, parts)
    assert len(rounds) == parts
    assert sorted(i for owned in rounds for mine in owned for i in mine) == list(range(48))
    loads = [
        sum(iteration_cost(*shapes[i]) for owned in rounds for i in owned[rank])
        for rank in range(world)
    ]
    assert max(loads) < 1.05 * sum(loads) / world


def test_fewer_matrices_than_rounds() -> None:
    assert deal([(8, 8), (16, 8)], 2, 4) == [[[0], []], [[1], []]]


def test_ratios_are_paired_by_repeat() -> None:
    assert optimizer_step.ratio([1.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == 2.0


@pytest.mark.parametrize("text", ["3", "0", "2,", "2,x", "256"])
def test_ranks_that_do_not_divide_the_rows_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="divisors of 128"):
        optimizer_step.rank_counts(text)
    assert optimizer_step.rank_counts("2,4,8") == [2, 4, 8]
