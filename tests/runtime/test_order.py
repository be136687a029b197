"""The cursor of a frozen order."""

import pytest

from megamuon.runtime.order import Cursor, follows, merged_order, turns_of


def test_what_is_needed_is_issued_with_all_before_it() -> None:
    cursor = Cursor((2, 0, 1, 3))
    assert cursor.through(0) == (2, 0)
    assert cursor.through(2) == ()  # already past
    assert cursor.following(0, 1) == (1,)
    assert cursor.rest() == (1, 3)
    assert cursor.rest() == ()
    assert cursor.following(3, 2) == ()
    cursor.reset()
    assert cursor.through(3) == (2, 0, 1, 3)


def test_ranks_that_skip_differently_issue_the_same_sequence() -> None:
    sequences = []
    for used in ((0, 1, 2, 3), (3,), (), (1, 3)):
        cursor = Cursor((0, 1, 2, 3))
        issued = [group for need in used for group in cursor.through(need)]
        sequences.append(tuple(issued) + cursor.rest())
    assert set(sequences) == {(0, 1, 2, 3)}


def test_a_ready_group_waits_for_its_predecessors() -> None:
    cursor = Cursor((3, 2, 1))
    assert cursor.ready({2}) == ()
    assert cursor.ready({2, 3}) == (3, 2)
    assert cursor.ready({2, 3}) == ()
    assert cursor.rest() == (1,)


def test_what_was_not_used_stays_behind_its_predecessor() -> None:
    assert merged_order((2, 0, 2, 3), (0, 1, 2, 3, 4)) == (2, 0, 1, 3, 4)
    assert merged_order((2, 3), (4, 2, 0, 3, 1)) == (4, 2, 0, 3, 1)
    assert merged_order((), (2, 0, 1)) == (2, 0, 1)


def test_only_another_order_contradicts_the_frozen_one() -> None:
    assert follows((2, 3, 2), (2, 0, 3, 1))  # left out, and used again: no contradiction
    assert follows((), (0, 1))
    assert not follows((3, 2), (2, 0, 3, 1))


def test_an_order_names_each_group_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        Cursor((0, 1, 0))


def test_neighbours_of_one_module_share_a_turn() -> None:
    modules = ["root", "a", "a", "b", "c", "c"]
    order = (5, 4, 3, 2, 1, 0)
    assert turns_of(order, modules) == (0, 0, 1, 2, 2, 3)
    assert turns_of((1, 3, 2), modules) == (0, 1, 2)  # apart, they are used apart
    cursor = Cursor(order, turns_of(order, modules))
    assert cursor.following(5, 1) == (4, 3)
    assert cursor.following(3, 1) == (2, 1)
    assert cursor.following(1, 2) == (0,)
