"""Orders that differ from rank to rank, exceptions and gradients nobody asked for, beside plain
autograd: trials written by hand, random ones, and faults that the comparison must notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megamuon.kernels import linear
from megamuon.runtime.engine import Engine
from tests.support.ranks import RankError, run_ranks
from tools.fuzz_ranks import run_trial
from tools.fuzz_runtime import run_fuzz
from tools.fuzz_trials import Action, Call, Trial

Orders = tuple[tuple[int, ...], ...]
EIGHT = tuple(range(8))


def action(kind: str, orders: Orders, **changes: object) -> Action:
    return Action(kind=kind, calls=tuple(Call(order=order, **changes) for order in orders))


def trial(
    *steps: tuple[Action, ...] | Action, ranks: int = 2, blocks: int = 8, **changes: object
) -> Trial:
    """A trial with the given steps between three ordinary ones before and three behind."""
    ordinary = action("train", (tuple(range(blocks)),) * ranks)
    middle = tuple(step if isinstance(step, tuple) else (step,) for step in steps)
    return replace(
        Trial(
            seed=5,
            ranks=ranks,
            replicas=1,
            line="C",
            zero_stage=3,
            kinds=("plain",) * blocks,
            shared=(),
            tied=False,
            frozen=(),
            functional_root=True,
            steps=((ordinary,),) * 3 + middle + ((ordinary,),) * 3,
        ),
        **changes,
    )


def without(*left_out: int) -> tuple[int, ...]:
    return tuple(block for block in EIGHT if block not in left_out)


SKIPPED = action("train", (EIGHT, without(5)))
TWICE = action("train", ((3, 0, 1, 0), (0, 1, 0)))
FIRST_RAISES = (
    Action(kind="fail", calls=(Call(order=EIGHT, fails="forward"),) * 2),
    action("train", (EIGHT, EIGHT)),
)

# What a trial shows: its name. Each ends with three ordinary passes that may hold few layers.
TRIALS: dict[str, Trial] = {
    "one rank leaves out a layer": trial(SKIPPED, SKIPPED),
    "one rank leaves out layers at the end": trial(action("train", (EIGHT, (0, 1)))),
    "one rank uses no layer": trial(action("train", (EIGHT, ()))),
    "one rank's loss hangs on the first layers": trial(
        Action(kind="train", calls=(Call(order=EIGHT), Call(order=EIGHT, detached=6)))
    ),
    "one rank leaves out a table": trial(
        Action(kind="train", calls=(Call(order=EIGHT), Call(order=EIGHT, tables=False)))
    ),
    "reversed on one rank": trial(action("train", (EIGHT, EIGHT[::-1]))),
    "a layer twice on all ranks, in other orders": trial(TWICE, blocks=4),
    "a layer twice on one rank": trial(action("train", (EIGHT, (*EIGHT, 2)))),
    "a layer again at once, evaluated": trial(action("evaluate", (EIGHT, (0, 0, 0, 1)))),
    "a shared weight beside a skipped table": trial(
        Action(kind="train", calls=(Call(order=EIGHT), Call(order=EIGHT, tables=False))),
        shared=((1, 6),),
        tied=True,
    ),
    "the first forward raises": replace(trial(), steps=(FIRST_RAISES, *trial().steps)),
    "the first forward leaves layers out": replace(
        trial(), steps=((action("train", ((0, 7, 3), EIGHT)),), *trial().steps)
    ),
    "one module is probed first": replace(
        trial(), steps=((action("probe", ((6,), (6,))), *FIRST_RAISES), *trial().steps)
    ),
    "one rank raises in the forward": trial(
        Action(kind="fail", calls=(Call(order=EIGHT), Call(order=EIGHT, fails="forward")))
    ),
    "one rank raises in the backward": trial(
        (
            Action(kind="fail", calls=(Call(order=EIGHT), Call(order=EIGHT, fails="backward"))),
            action("train", (EIGHT, EIGHT)),
        )
    ),
    "partly frozen layers twice": trial(
        action("train", ((0, 1, 0, 2), (0, 1, 0, 2)), remat=True), frozen=(".up.",), blocks=4
    ),
    "gradients of the inputs alone": trial(
        (action("inputs", (EIGHT, EIGHT)), action("train", (EIGHT, EIGHT)))
    ),
    "kept micro-batches in other orders": trial(
        (
            action("keep", (EIGHT, without(3))),
            action("keep", (without(1, 2), EIGHT[::-1])),
            action("train", (EIGHT, (4, 4))),
        )
    ),
}
DEADLOCKS = ("one rank leaves out a layer", "a layer twice on all ranks, in other orders")


def settings(name: str) -> list[Trial]:
    """The trial on the lines and stages that it can differ on."""
    base = TRIALS[name]
    found = [base, replace(base, zero_stage=2), replace(base, line="D")]
    if name in DEADLOCKS:
        found += [replace(base, zero_stage=1), replace(base, line="M")]
        found += [replace(base, line="B", functional_root=False)]
    return found


def run_pinned(rank: int, world: int) -> int:
    count = 0
    for name in TRIALS:
        for one in settings(name):
            try:
                run_trial(one, rank)
            except Exception as error:
                raise AssertionError(f"{name}: line {one.line}, ZeRO-{one.zero_stage}") from error
            count += 1
    return count


def on_replicas(name: str, line: str) -> Trial:
    """The trial on two replicas of two ranks, the second two as the first two."""
    base = TRIALS[name]
    steps = tuple(tuple(replace(a, calls=a.calls * 2) for a in actions) for actions in base.steps)
    return replace(base, ranks=4, replicas=2, line=line, steps=steps)


def run_on_replicas(rank: int, world: int) -> int:
    for name in DEADLOCKS:
        for line in ("C", "D"):
            run_trial(on_replicas(name, line), rank)
    return rank


def test_trials_written_by_hand() -> None:
    assert run_ranks(run_pinned, 2, timeout=300.0) == [sum(len(settings(n)) for n in TRIALS)] * 2


def test_two_replicas() -> None:
    assert run_ranks(run_on_replicas, 4, timeout=200.0) == [0, 1, 2, 3]


@pytest.mark.parametrize(("ranks", "trials"), [(2, 24), (3, 8), (4, 6)])
def test_random_trials(ranks: int, trials: int) -> None:
    said: list[str] = []
    report = run_fuzz(
        ranks=ranks, first=0, trials=trials, seconds=None, limit=120.0, say=said.append
    )
    assert report["trials"] == trials
    assert report["failures"] == 0, "\n".join(said)


# --- faults that the comparison must notice ------------------------------------------------------


def gather_alone(self: Engine, group: object) -> None:
    """A rank gathers by itself what it uses again."""
    self._issue((group.index,))  # type: ignore[attr-defined]


def always_asked(parameters: object, wanted: object, edges: object) -> list:
    """Every backward pass writes every gradient."""
    pairs = zip(parameters, wanted, strict=True)  # type: ignore[call-overload]
    return [(w, getattr(p, linear.UNSHARDED, None) if w else None) for p, w in pairs]


def first_order_for_life(self: Engine, used: tuple[int, ...], training: bool) -> None:
    """What the first pass used is the order, whatever follows."""
    if not self._recorded:
        self._recorded = True
        order = (*used, *(g for g in self.forward_order.order if g not in used))
        self.freeze(self._agreement.rank_zeros(order))


FAULTS: dict[str, tuple[str, object, str, Callable[..., object], str]] = {
    "gathers at places of one's own": (
        DEADLOCKS[1],
        Engine,
        "_gather_again",
        gather_alone,
        "different calls|exit code -6",
    ),
    "unasked gradients": (
        "gradients of the inputs alone", linear, "destinations", always_asked, "gradient norm",
    ),
    "the first order for life": (
        "the first forward leaves layers out", Engine, "_record", first_order_for_life, "alive",
    ),
}  # fmt: skip


def run_faulty(rank: int, world: int, name: str) -> None:
    known, owner, attribute, fault, _ = FAULTS[name]
    setattr(owner, attribute, fault)
    run_trial(TRIALS[known], rank)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str) -> None:
    with pytest.raises(RankError, match=FAULTS[name][-1]):
        run_ranks(run_faulty, 2, name, timeout=40.0)
