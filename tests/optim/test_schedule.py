"""Schedules against closed forms written out by hand, at the edges in particular."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest

from megamuon.optim.schedule import Schedule, ScheduleConfig


def schedule(**changes: Any) -> Schedule:
    settings: dict[str, Any] = {
        "max_lr": 3e-4,
        "min_lr": 3e-5,
        "init_lr": 1e-6,
        "warmup_steps": 100,
        "decay_steps": 1100,
        "style": "cosine",
    }
    return Schedule(ScheduleConfig(**{**settings, **changes}))


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_warmup_is_linear_and_includes_its_last_sample(style: str) -> None:
    one = schedule(style=style, wsd_steps=200)
    assert one.lr(0) == 1e-6
    assert one.lr(25) == 1e-6 + (3e-4 - 1e-6) * 25 / 100
    assert one.lr(100) == 1e-6 + (3e-4 - 1e-6)
    assert one.lr(101) <= 3e-4


@pytest.mark.parametrize(
    ("style", "at_101", "at_600", "at_1100"),
    [
        ("linear", 3e-5 + 0.999 * 2.7e-4, 3e-5 + 0.5 * 2.7e-4, 3e-5),
        ("cosine", 3e-5 + (1 + math.cos(math.pi / 1000)) / 2 * 2.7e-4, 1.65e-4, 3e-5),
        (
            "inverse-square-root",
            3e-4 * math.sqrt(100 / 101),
            3e-4 * math.sqrt(1 / 6),
            3e-4 * math.sqrt(1 / 11),
        ),
        ("constant", 3e-4, 3e-4, 3e-4),
    ],
)
def test_decay_styles(style: str, at_101: float, at_600: float, at_1100: float) -> None:
    one = schedule(style=style)
    for samples, expected in ((101, at_101), (600, at_600), (1100, at_1100)):
        assert one.lr(samples) == pytest.approx(expected, rel=1e-12)
    assert one.lr(1101) == (3e-4 if style == "constant" else 3e-5)
    assert one.lr(10**9) == one.lr(1101)


def test_inverse_square_root_has_the_floor() -> None:
    one = schedule(style="inverse-square-root", min_lr=2e-4)
    assert one.lr(200) == pytest.approx(3e-4 / math.sqrt(2))
    assert one.lr(300) == 2e-4
    without = schedule(style="inverse-square-root", warmup_steps=0, min_lr=0.0)
    assert without.lr(0) == 3e-4
    assert without.lr(4) == 1.5e-4


@pytest.mark.parametrize(
    ("wsd_style", "quarter"),
    [
        ("linear", 0.75),
        ("cosine", (1 + math.sqrt(0.5)) / 2),
        ("exponential", 2 * 0.5**0.25 - 1),
        ("minus_sqrt", 0.5),
    ],
)
def test_wsd_styles(wsd_style: str, quarter: float) -> None:
    one = schedule(style="WSD", wsd_style=wsd_style, wsd_steps=200)
    assert one.lr(101) == pytest.approx(3e-4, rel=1e-15)
    assert one.lr(900) == pytest.approx(3e-4, rel=1e-15)
    assert one.lr(901) < 3e-4
    assert one.lr(950) == pytest.approx(3e-5 + quarter * 2.7e-4, rel=1e-12)
    assert one.lr(1100) == pytest.approx(3e-5, rel=1e-12)
    assert one.lr(1101) == 3e-5


def test_no_warmup_starts_at_the_top() -> None:
    assert schedule(warmup_steps=0, style="linear").lr(0) == 3e-4
    assert schedule(warmup_steps=0, style="linear").lr(550) == pytest.approx(1.65e-4)


def test_group_with_its_own_rates() -> None:
    one = schedule(style="linear")
    assert one.lr(600, max_lr=1e-3, min_lr=0.0) == pytest.approx(5e-4)
    assert one.lr(50, max_lr=1e-3) == 1e-6 + (1e-3 - 1e-6) * 0.5
    assert one.lr(2000, min_lr=7e-6) == 7e-6


def test_weight_decay_styles() -> None:
    constant = schedule(start_wd=0.1, end_wd=0.1)
    assert constant.wd(0) == constant.wd(10**6) == 0.1
    linear = schedule(start_wd=0.02, end_wd=0.1, wd_style="linear", wd_steps=400)
    assert linear.wd(0) == 0.02
    assert linear.wd(100) == pytest.approx(0.04)
    assert linear.wd(400) == pytest.approx(0.1)
    assert linear.wd(401) == 0.1
    cosine = schedule(start_wd=0.02, end_wd=0.1, wd_style="cosine", wd_steps=400)
    assert cosine.wd(0) == pytest.approx(0.02)
    assert cosine.wd(100) == pytest.approx(0.02 + 0.08 * (1 - math.sqrt(0.5)) / 2)
    assert cosine.wd(200) == pytest.approx(0.06)
    assert cosine.wd(500) == 0.1


def test_position_moves_in_samples() -> None:
    one = schedule()
    assert one.lr() == one.lr(0)
    one.advance(48)
    one.advance(16)
    assert one.num_steps == 64
    assert one.lr() == one.lr(64)
    assert one.wd() == one.wd(64)


def test_state_has_megatrons_keys() -> None:
    one = schedule()
    one.advance(320)
    assert one.state_dict() == {
        "max_lr": 3e-4,
        "lr_warmup_steps": 100,
        "num_steps": 320,
        "lr_decay_style": "cosine",
        "lr_decay_steps": 1100,
        "min_lr": 3e-5,
        "start_wd": 0.01,
        "end_wd": 0.01,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
        "lr_warmup_init": 1e-6,
        "lr_wsd_decay_style": "exponential",
        "lr_wsd_decay_steps": None,
        "decoupled_lr": None,
        "decoupled_min_lr": None,
    }


# A second value for every field: a field without one here, or that the state lacks, fails.
ANOTHER = {
    "max_lr": 1e-3,
    "min_lr": 1e-6,
    "init_lr": 1e-7,
    "warmup_steps": 50,
    "decay_steps": 1200,
    "style": "linear",
    "wsd_style": "minus_sqrt",
    "wsd_steps": 60,
    "start_wd": 0.02,
    "end_wd": 0.5,
    "wd_style": "linear",
    "wd_steps": 500,
    "decoupled_lr": 2e-3,
    "decoupled_min_lr": 1e-5,
}


@pytest.mark.parametrize("name", [field.name for field in fields(ScheduleConfig)])
def test_every_field_is_saved_compared_and_settled(name: str) -> None:
    common = {"style": "WSD", "wsd_steps": 40, "wd_style": "cosine", "wd_steps": 400}
    common |= {"end_wd": 0.1}
    old = schedule(**common)
    old.advance(320)
    new = {**common, name: ANOTHER[name]}
    stored = json.loads(json.dumps(old.state_dict()))
    with pytest.raises(ValueError, match=r"is .* in the checkpoint and .*--override-opt_param"):
        schedule(**new).load_state_dict(stored)
    kept = schedule(**new)
    kept.load_state_dict(stored, mode="override")
    assert (kept.config, kept.num_steps) == (schedule(**new).config, 320)
    taken = schedule(**new)
    taken.load_state_dict(stored, mode="use_checkpoint")
    assert (taken.config, taken.num_steps) == (old.config, 320)


def test_resume() -> None:
    old = schedule()
    old.advance(320)
    new = schedule()
    new.load_state_dict(old.state_dict())
    assert new.num_steps == 320
    assert new.lr() == old.lr()


def test_resume_with_another_configuration() -> None:
    old = schedule()
    old.advance(320)
    state = old.state_dict()
    refused = schedule(max_lr=1e-3, style="linear")
    with pytest.raises(ValueError, match="max_lr is 0.0003 .* 0.001.*lr_decay_style.*--override"):
        refused.load_state_dict(state)
    assert refused.num_steps == 0
    overridden = schedule(max_lr=1e-3, style="linear")
    overridden.load_state_dict(state, mode="override")
    assert overridden.num_steps == 320
    assert overridden.lr() == schedule(max_lr=1e-3, style="linear").lr(320)
    stored = schedule(max_lr=1e-3, style="linear")
    stored.load_state_dict(state, mode="use_checkpoint")
    assert stored.lr() == old.lr()
    assert stored.state_dict() == state
    with pytest.raises(ValueError, match="lacks lr_decay_steps"):
        schedule().load_state_dict({k: v for k, v in state.items() if k != "lr_decay_steps"})
    older = schedule()
    older.load_state_dict({"num_steps": 320}, mode="override")
    assert older.num_steps == 320
    with pytest.raises(ValueError, match="'force'"):
        schedule().load_state_dict(state, mode="force")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": 1100}, "warmup_steps = 1100 must be less than decay_steps = 1100"),
        ({"style": "wsd"}, "style = 'wsd'.*WSD"),
        ({"style": "WSD"}, "wsd_steps = None"),
        ({"style": "WSD", "wsd_steps": 1101}, "wsd_steps = 1101"),
        ({"wsd_style": "sqrt"}, "wsd_style = 'sqrt'"),
        ({"min_lr": 1.0}, "min_lr = 1.0"),
        ({"init_lr": 1.0}, "init_lr = 1.0"),
        ({"decay_steps": 0, "warmup_steps": 0}, "decay_steps = 0"),
        ({"end_wd": 0.1}, "start_wd = 0.01 and end_wd = 0.1 must be equal"),
        ({"start_wd": 0.1}, "start_wd = 0.1 must lie between"),
        ({"wd_style": "linear"}, "wd_steps = 0"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(**changes)


def test_all_problems_at_once() -> None:
    with pytest.raises(ValueError, match="min_lr.*warmup_steps"):
        schedule(min_lr=-1.0, warmup_steps=5000)
