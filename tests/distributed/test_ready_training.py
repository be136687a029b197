"""Line D against line C: the same numbers, bit for bit, whatever the grid and the pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.grids import mesh_of
from tests.support.ranks import run_ranks
from tests.support.ready_training import RANKS, RUNS, difference, train


def work(rank: int, world: int) -> dict[str, Any]:
    """What differs between the lines, by run."""
    found: dict[str, Any] = {}
    for name, run in RUNS.items():
        mesh = mesh_of(rank, world, replicas=run.case.replicas, tp=run.case.tp)
        c, d = (train(run, mesh, collectives) for collectives in ("grouped", "ready"))
        found[name] = {
            "other": difference(c, d),
            **{k: d[k] for k in ("opened", "left_out", "notes")},
            "traffic": [c["traffic"], d["traffic"]],
        }
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(work, RANKS, timeout=400)


@pytest.mark.parametrize("name", RUNS)
def test_line_d_is_line_c_bit_for_bit(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        assert result[name]["other"] == []
        assert result[name]["opened"]
        assert result[name]["left_out"] == {}
