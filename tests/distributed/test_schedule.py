"""The order of collectives under the schedule is the recorded one, call by call; another schedule
moves them in time and changes no result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megamuon.runtime.schedule import Flight, Lagged, Schedule
from tests.distributed.test_runtime_fuzz import DEADLOCKS, TRIALS, action, on_replicas, trial
from tests.support.call_order import record
from tests.support.ranks import run_ranks
from tools.fuzz_ranks import Pair, run_trial
from tools.fuzz_trials import Trial

GOLDEN = Path(__file__).parents[1] / "data" / "call_order.json"
SIX = (0, 1, 2, 3, 4, 5)
# What the ranks do with six layers: all of them, in other orders, kept, evaluated, one twice.
PROGRAM = trial(
    (action("keep", (SIX, SIX)), action("evaluate", (SIX, SIX)), action("train", (SIX, SIX))),
    action("train", (SIX, SIX[::-1])),
    action("train", (SIX, SIX), remat=True),
    action("train", ((3, 0, 1, 0, 2, 4, 5), (0, 1, 2, 0, 3, 5, 4))),
    action("train", ((5, *SIX[:5]),) * 2),
    blocks=6,
    tied=True,
    frozen=("blocks.2.up.",),
)


def on_two_replicas(base: Trial) -> Trial:
    steps = tuple(tuple(replace(a, calls=a.calls * 2) for a in actions) for actions in base.steps)
    return replace(base, ranks=4, replicas=2, steps=steps)


CASES = {
    f"ZeRO-{stage}, {ranks} ranks": replace(
        PROGRAM if ranks == 2 else on_two_replicas(PROGRAM), zero_stage=stage
    )
    for stage in (2, 3)
    for ranks in (2, 4)
}


def run_recorded(rank: int, world: int) -> dict[str, list[str]]:
    """The calls of each step, as text."""
    found = {}
    for name, case in CASES.items():
        if case.ranks != world:
            continue
        pair = Pair(case, rank)
        if pair.runtime.engine.publication is not None:
            pair.runtime.engine.publication.synchronous = True  # else arrivals decide
        said, steps = record(pair.runtime), []
        for number, actions in enumerate(case.steps):
            for each in actions:
                pair.act(each)
            pair.step(number)
            steps.append(" ".join(said))
            said.clear()
        pair.runtime.close()
        found[name] = steps
    return found


@pytest.mark.parametrize("ranks", (2, 4))
def test_calls_are_the_recorded_ones(ranks: int) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = run_ranks(run_recorded, ranks, timeout=200.0)
    for rank, calls in enumerate(found):
        for name, steps in calls.items():
            assert steps == golden[name][rank], (name, rank)


@dataclass(frozen=True, kw_only=True)
class FourStep(Schedule):
    """Nothing in a backward pass waits for a stage across replicas: HyperParallel's Algorithm 1."""

    def reduce(self, flight: Flight) -> None:
        previous = flight.started[-1] if flight.started else None
        if previous is not None:
            previous.wait_inside()
            if not previous.across:
                previous.finish()
        flight.launch()
        if previous is not None and previous.across:
            previous.start_across()


SCHEDULES = (
    ("D", FourStep(prefetch_depth=3)),
    ("C", Lagged(prefetch_depth=0, outstanding=1)),
    ("C", Lagged(prefetch_depth=2, outstanding=5)),
)


def run_others(rank: int, world: int) -> list[str]:
    """Programs that differ from rank to rank under other schedules, beside plain autograd."""
    for line, schedule in SCHEDULES:
        case = TRIALS[DEADLOCKS[0]] if world == 2 else on_replicas(DEADLOCKS[0], line)
        run_trial(replace(case, line=line), rank, schedule=schedule)
    program = PROGRAM if world == 2 else on_two_replicas(PROGRAM)
    pair = Pair(program, rank, schedule=FourStep())
    said = record(pair.runtime)
    pair.act(program.steps[0][0])
    pair.runtime.engine.finish_reductions()
    pair.runtime.close()
    return [word for word in said if word[0] in "raw"]


@pytest.mark.parametrize("ranks", (2, 4))
def test_four_steps_and_other_depths_fit(ranks: int) -> None:
    for calls in run_ranks(run_others, ranks, timeout=300.0):
        order = [word[1:] for word in calls if word[0] == "r"]
        if ranks == 2:  # each is over before the next starts
            expected = [f"{letter}{group}" for group in order for letter in "rw"]
        else:  # across replicas the one before, and the results at the end
            expected = [f"r{order[0]}"]
            for before, group in zip(order, order[1:], strict=False):
                expected += [f"r{group}", f"a{before}"]
            expected += [f"w{group}" for group in order]
        assert calls == expected
