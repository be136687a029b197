"""Coefficient sets and restarts, recomputed and held against published figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamuon.optim.coefficients import (
    REJECT_CONDITION,
    apply_polynomials,
    automatic_restarts,
    best_restarts,
    coefficient_names,
    coefficient_set,
    even_restarts,
    restart_condition,
)

FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "newton_schulz.json").read_text()
)


def default(name: str) -> tuple[tuple[float, float, float], ...]:
    chosen = coefficient_set(name)
    return chosen.sequence(chosen.default_steps)


@pytest.mark.parametrize("name", FACTS["slope_at_zero"])
def test_slope_at_zero(name: str) -> None:
    slope = math.prod(a for a, _, _ in default(name))
    assert slope == pytest.approx(FACTS["slope_at_zero"][name], abs=0.6)


@pytest.mark.parametrize("name", FACTS["range_on_1e-2_to_1"])
def test_range_of_the_scalar_map(name: str) -> None:
    values = apply_polynomials(np.logspace(-2, 0, 100_000), default(name))
    low, high = FACTS["range_on_1e-2_to_1"][name]
    assert values.min() == pytest.approx(low, abs=1.5e-3)
    assert values.max() == pytest.approx(high, abs=1.5e-3)


def test_safety_of_the_default_is_on_all_five() -> None:
    published = (
        (7.892583, -20.383014, 13.555306),
        (3.911485, -2.546464, 0.426899),
        (3.760658, -2.512819, 0.432365),
        (3.160400, -2.149650, 0.399637),
        (2.191097, -1.441662, 0.328146),
    )
    found = default("polar_express")
    assert len(found) == len(published)
    for mine, theirs in zip(found, published, strict=True):
        assert mine == pytest.approx(theirs, abs=6e-7, rel=0)
    assert found[4][0] * 1.05 == pytest.approx(2.300652019954817, rel=1e-12)  # the last one too


def test_polar_express_of_the_paper_exempts_only_the_eighth() -> None:
    eight = coefficient_set("polar_express_101").sequence(8)
    assert eight[-1] == (1.875, -1.25, 0.375)
    assert eight[4][0] == pytest.approx(2.300652019954817 / 1.01)
    assert coefficient_set("polar_express_101").norm_factor == 1.01


@pytest.mark.parametrize(
    ("name", "positions", "condition"),
    [
        (name, tuple(int(one) for one in key.split(",") if one), value)
        for name, table in FACTS["restart_condition"].items()
        for key, value in table.items()
    ],
)
def test_restart_table(name: str, positions: tuple[int, ...], condition: float) -> None:
    assert restart_condition(default(name), positions) == pytest.approx(condition, rel=0.025)


@pytest.mark.parametrize("name", FACTS["best_single_restart"])
def test_best_single_restart(name: str) -> None:
    position, condition = FACTS["best_single_restart"][name]
    found = best_restarts(default(name), 1)
    assert found.positions == (position,)
    assert found.condition == pytest.approx(condition, rel=0.01)


@pytest.mark.parametrize("name", FACTS["best_two_restarts"])
def test_best_two_restarts(name: str) -> None:
    positions, condition = FACTS["best_two_restarts"][name]
    found = best_restarts(default(name), 2)
    assert found.positions == tuple(positions)
    assert found.condition == pytest.approx(condition, rel=0.01)


def test_search_prunes_nothing_that_is_better() -> None:
    import itertools

    for name in ("polar_express", "quintic", "jordan", "polar_express_102"):
        for count in range(5):
            brute = min(
                restart_condition(default(name), positions)
                for positions in itertools.combinations(range(1, 5), count)
            )
            found = best_restarts(default(name), count)
            assert found.condition == pytest.approx(brute, rel=1e-9)
            assert restart_condition(default(name), found.positions) == pytest.approx(brute)


def test_deepseek_needs_three() -> None:
    ten = default("deepseek_v4")
    assert best_restarts(ten, 1).condition == math.inf
    assert best_restarts(ten, 2).condition > REJECT_CONDITION
    found = automatic_restarts(ten)
    assert found is not None
    assert found.positions == (2, 4, 6)
    assert found.condition == pytest.approx(72.6, rel=0.01)


def test_automatic_restarts_follow_the_coefficients() -> None:
    positions = {
        name: found.positions
        for name in ("polar_express", "quintic", "jordan", "polar_express_101")
        if (found := automatic_restarts(default(name))) is not None
    }
    assert positions == {
        "polar_express": (2,),
        "quintic": (2,),
        "jordan": (3,),
        "polar_express_101": (1,),
    }


def test_no_restarts_when_nothing_is_safe_enough() -> None:
    assert automatic_restarts(default("cans"), limit=1e3) is None
    assert automatic_restarts(default("jordan")[:1]) is None


def test_even_restarts_are_as_safe_and_shorten_the_stretches() -> None:
    found = even_restarts(default("polar_express"), 2, 84.58)
    assert found is not None
    assert found.positions == (2, 4)


def test_past_the_end_of_the_list() -> None:
    you = coefficient_set("you")
    assert you.sequence(7)[5:] == you.polynomials[:2]
    polar = coefficient_set("polar_express")
    assert polar.sequence(7)[4:] == (polar.polynomials[4],) * 3
    assert coefficient_set("deepseek_v4").sequence(12)[10:] == ((2.0, -1.5, 0.5),) * 2
    with pytest.raises(ValueError, match="cubic5.*set the steps to 5"):
        coefficient_set("cubic5").sequence(4)
    with pytest.raises(ValueError, match="at least 1"):
        polar.sequence(0)


def test_names() -> None:
    assert coefficient_set("simple") is coefficient_set("jordan")
    assert coefficient_set("asym5") is coefficient_set("quintic")
    for name in coefficient_names():
        assert coefficient_set(name).source
    with pytest.raises(ValueError, match="unknown Newton–Schulz coefficients 'quintix'.*quintic"):
        coefficient_set("quintix")
    with pytest.raises(ValueError, match="choose 0 to 4"):
        best_restarts(default("jordan"), 5)
