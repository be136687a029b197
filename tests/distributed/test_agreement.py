"""Ranks that disagree say so; ranks that agree share costs and plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megamuon.agreement import PlanMismatchError
from megamuon.optim import MuonConfig
from megamuon.ownership.settings import PlannerSettings
from megamuon.runtime import OptimizerSettings, shard
from megamuon.runtime.measure import CACHE, median_over_ranks
from tests.support.ranks import run_ranks
from tests.support.runtime_config import plain_config
from tests.support.scenarios import SCENARIOS, Block, build


def attempt(**settings: object) -> str:
    """The message of a failed start, or the digest of the plan."""
    config = plain_config(unit_threshold=50, **settings)  # type: ignore[arg-type]
    try:
        model = build(SCENARIOS["plain"]).float()
        return shard(model, layers=(Block,), config=config).plan.digest
    except PlanMismatchError as error:
        return str(error)


def work(rank: int, world: int) -> dict[str, object]:
    other = PlannerSettings(policy="round_robin") if rank == 1 else PlannerSettings()
    muon = MuonConfig(momentum=0.9 if rank == 1 else 0.95)
    measured = attempt(ns_cost="measured")
    return {
        "agreeing": attempt(),
        "policy": attempt(planner=other),
        "settings": attempt(zero_stage=2 if rank == 2 else 3),
        # Only rank 1 would enter the collective of the measured costs.
        "cost": attempt(ns_cost="measured" if rank == 1 else "closed-form"),
        "optimizer": attempt(optimizer=OptimizerSettings(matrix=muon)),
        "measured": measured,
        "median": median_over_ranks([float(rank), 10.0 - rank], dist.group.WORLD),
    }


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run_ranks(work, 3, timeout=120.0)


def test_agreeing_ranks_have_one_plan(results: list[dict]) -> None:
    assert len({r["agreeing"] for r in results}) == 1 and len(results[0]["agreeing"]) == 64


def test_a_different_plan_names_rank_and_entry(results: list[dict]) -> None:
    for result in results:
        assert "rank 1: settings policy: lpt here, round_robin there" in result["policy"]
        assert "rank 2" not in result["policy"]


def test_different_settings_are_found_too(results: list[dict]) -> None:
    for result in results:
        assert "rank 2: settings zero_stage=3 on rank 0, zero_stage=2 here." in result["settings"]
        assert (
            "rank 1: settings matrix.momentum=0.95 on rank 0, matrix.momentum=0.9 here."
            in (result["optimizer"])
        )


def test_different_cost_sources_do_not_meet_in_a_collective(results: list[dict]) -> None:
    for result in results:
        assert "rank 1: settings ns_cost=closed-form on rank 0" in result["cost"]


def test_measured_costs_are_shared(results: list[dict]) -> None:
    assert len({r["measured"] for r in results}) == 1
    assert all(r["median"] == [1.0, 9.0] for r in results)


def test_measured_times_are_kept_and_taken_from_the_cache(tmp_path: Path) -> None:
    config = plain_config(
        unit_threshold=50, ns_cost="measured", ns_cost_cache=str(tmp_path / "times")
    )
    first = shard(build(SCENARIOS["plain"]).float(), layers=(Block,), config=config).plan
    again = shard(build(SCENARIOS["plain"]).float(), layers=(Block,), config=config).plan
    assert (tmp_path / "times" / CACHE).is_file()
    assert again.costs == first.costs and any(first.costs)


def test_a_stored_plan_is_reused_where_it_fits() -> None:
    model = build(SCENARIOS["plain"]).float()
    plan = shard(model, layers=(Block,), config=plain_config()).plan
    again = shard(
        build(SCENARIOS["plain"]).float(), layers=(Block,), plan=plan, config=plain_config()
    )
    assert again.plan is plan
    for settings in (
        plain_config(unit_threshold=50),
        plain_config(planner=PlannerSettings(policy="round_robin")),
    ):
        changed = shard(
            build(SCENARIOS["plain"]).float(), layers=(Block,), plan=plan, config=settings
        )
        assert changed.plan is not plan
    other = shard(
        build(SCENARIOS["tied table"]).float(), layers=(Block,), plan=plan, config=plain_config()
    )
    assert other.plan is not plan and other.plan.parameters != plan.parameters


def test_a_meta_model_needs_initial_values() -> None:
    with torch.device("meta"):
        model = SCENARIOS["plain"].build()
    with pytest.raises(ValueError, match="is on the meta device: pass initial="):
        shard(model, layers=(Block,), config=plain_config())
