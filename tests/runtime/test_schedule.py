"""What a schedule decides, over reductions that only write down what is done with them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megamuon.runtime.schedule import Lagged, Schedule


class Written:
    """One reduction in flight."""

    def __init__(self, flight: Flight, name: str, across: bool) -> None:
        self.flight, self.name, self.across = flight, name, across

    def wait_inside(self) -> None:
        self.flight.said.append(f"wait replica {self.name}")

    def start_across(self) -> None:
        self.flight.said.append(f"across {self.name}")

    def finish(self) -> None:
        self.flight.said.append(f"finish {self.name}")
        self.flight.started.remove(self)


class Flight:
    """Reductions a, b, c, ... of a run of one replica or of several."""

    def __init__(self, across: bool) -> None:
        self.across, self.said, self.count = across, [], 0
        self.started: list[Written] = []

    def launch(self) -> None:
        name = "abcdef"[self.count]
        self.count += 1
        self.said.append(f"launch {name}")
        self.started.append(Written(self, name, self.across))

    def told(self, schedule: Schedule, times: int) -> Sequence[str]:
        for _ in range(times):
            schedule.reduce(self)
        return self.said


def test_the_oldest_is_finished_before_too_many_are_out() -> None:
    assert Flight(across=False).told(Lagged(), 4) == [
        "launch a", "launch b", "finish a", "launch c", "finish b", "launch d",
    ]  # fmt: skip
    assert Flight(across=False).told(Lagged(outstanding=1), 2) == [
        "launch a", "finish a", "launch b",
    ]  # fmt: skip
    assert Flight(across=False).told(Lagged(outstanding=4), 4)[-1] == "launch d"


def test_stages_across_rows_start_with_the_next_reduction() -> None:
    assert Flight(across=True).told(Lagged(), 3) == [
        "launch a", "across a", "launch b", "finish a", "across b", "launch c",
    ]  # fmt: skip


def test_the_lag_follows_from_the_depth() -> None:
    assert [Lagged(prefetch_depth=depth).lag for depth in (0, 1, 3)] == [1, 2, 4]


@pytest.mark.parametrize("field", ["prefetch_depth", "outstanding"])
def test_what_cannot_be_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=-1"):
        Lagged(**{field: -1})
