"""Counters of a run, and the order of its data over several launches."""

from __future__ import annotations

import json
from dataclasses import asdict

from megamuon.data.continued import all_counts
from megamuon.training.progress import DataOrder, Progress


def test_counters_survive_a_checkpoint() -> None:
    progress = Progress(iteration=7, consumed_train_samples=70, last_good_iteration=5)
    progress.train_order.ask(100, endless=False)
    progress.train_order.begin((2, 4))
    progress.skipped(nan=True)
    stored = json.loads(json.dumps(asdict(progress)))
    assert Progress.from_document(stored) == progress
    older = {"iteration": 7, "consumed_train_samples": 70, "unknown": 1}
    assert Progress.from_document(older) == Progress(iteration=7, consumed_train_samples=70)


def test_a_run_that_grows_remembers_what_it_asked_for() -> None:
    order = DataOrder()
    assert all_counts(order.ask(100, endless=False)) == (100,)
    assert all_counts(order.ask(60, endless=False)) == (100,)  # a shorter run: the same order
    assert all_counts(order.ask(150, endless=False)) == (100, 150)
    assert all_counts(order.ask(200, endless=True)) == (100, 150)  # goes round in what there is
    assert order.ask(0, endless=False) == 0
    assert order.requests == [100, 150]


def test_nothing_wanted_is_nothing_remembered() -> None:
    order = DataOrder()
    assert all_counts(order.ask(0, endless=False)) == (0,)
    assert all_counts(order.ask(30, endless=False)) == (30,)


def test_a_new_order_begins_at_the_present_position() -> None:
    progress = Progress(consumed_train_samples=40, consumed_valid_samples=8)
    progress.train_order.ask(100, endless=False)
    progress.valid_order.ask(20, endless=False)
    progress.new_order(train=True, valid=False)
    assert all_counts(progress.train_order.ask(100, endless=False)) == (60,)
    assert progress.train_order.start == 40
    assert progress.valid_order.requests == [20]


def test_the_layout_is_that_of_the_first_launch() -> None:
    order = DataOrder()
    order.begin((2, 4))
    order.begin((1, 8))
    assert order.layout == [2, 4]


def test_a_step_ends_a_streak_and_totals_stay() -> None:
    progress = Progress()
    for nan in (True, False, True):
        progress.skipped(nan=nan)
    assert (progress.skipped_in_a_row, progress.nan_iterations) == (3, 2)
    progress.applied()
    assert (progress.skipped_in_a_row, progress.skipped_iterations) == (0, 3)
