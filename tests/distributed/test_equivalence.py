"""Sharded training against the single-process reference, as ``tools/equivalence.py`` does it.

In FP64, where rounding cannot hide a fault, losses, norms and weights agree to 1e-9; in FP32 losses
agree to 1e-4 over 20 steps. Not the whole product runs here, but a *covering* subset: every pair of
values of two factors that can occur together occurs in one of the cases (``covering``), on four and
on eight ranks; transports and unit thresholds are dealt over the cases in turn. The whole product
is the tool's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tools.reference_training import Training, reference_run
from tools.sharded_training import Case, Difference, not_applicable, run_cases

MODELS = ("nano", "nano-moe")
# Replicas, shards and tp on four and on eight ranks.
SHAPES = {
    4: ((1, 4, 1), (2, 2, 1), (1, 2, 2)),
    8: ((1, 8, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2)),
}
# What has to be equal first; then what else may differ.
GRID = ("line", "shape", "zero_stage", "tp", "model")
FACTORS = (*GRID, "accumulation", "recompute", "sequence_parallel", "publish")
Chosen = dict[str, Any]
Pairs = set[frozenset[tuple[str, Any]]]


class Bench:
    """References, each computed once, and a folder for everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[Training, str] = {}

    def reference(self, training: Training) -> str:
        """The file of a reference run."""
        if training not in self.files:
            path = self.folder / f"reference-{len(self.files)}.pt"
            torch.save(reference_run(training), path)
            self.files[training] = str(path)
        return self.files[training]

    def differences(
        self, cases: Sequence[Case], fault: str | None = None
    ) -> list[list[Difference]]:
        """What every rank found, by case; all cases have one number of ranks."""
        references = {case.reference: self.reference(case.reference) for case in cases}
        folder = self.folder / f"start-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        arguments = (cases, references, str(folder), fault)
        everyone = run_ranks(run_cases, cases[0].ranks, *arguments, timeout=580.0)
        return [list(found) for found in zip(*everyone, strict=True)]

    def check(self, cases: Sequence[Case]) -> None:
        """FP64: everything to 1e-9 on every rank."""
        for case, found in zip(cases, self.differences(cases), strict=True):
            for rank, difference in enumerate(found):
                largest = max(difference.loss, difference.norm, difference.weight)
                assert largest < 1e-9, (case.name, rank, difference)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    return Bench(tmp_path_factory.mktemp("equivalence"))


# --- which cases ---------------------------------------------------------------------------------


def combinations(ranks: int, steps: int) -> Iterator[tuple[Chosen, Case]]:
    """All values of ``FACTORS`` that exist together on so many ranks, with their cases."""
    for line, shape, stage, model, recompute in itertools.product(
        "ABCDM", SHAPES[ranks], (1, 2, 3), MODELS, (False, True)
    ):
        replicas, shards, tp = shape
        owners_on_replicas = line in "CD" and replicas > 1
        for accumulation, sequence, publish in itertools.product(
            (1, 2, "reduced once"),
            (False, True) if tp > 1 else (False,),
            ("async", "sync") if owners_on_replicas else (None,),
        ):
            once = accumulation == "reduced once"
            case = Case(
                line=line,
                replicas=replicas,
                shards=shards,
                tp=tp,
                zero_stage=stage,
                sequence_parallel=sequence,
                publish=publish,
                gradient_reduction="step" if once else "micro-batch",
                training=Training(
                    model=model,
                    steps=steps,
                    accumulation=2 if once else int(accumulation),
                    recompute=recompute,
                    batch=2 * ranks,
                    length=8,
                ),
            )
            values = (line, f"{replicas}x{shards}", stage, tp, model)
            values += (accumulation, recompute, sequence, publish)
            if not_applicable(case) is None:
                yield dict(zip(FACTORS, values, strict=True)), case


def pairs(chosen: Chosen, names: Sequence[str]) -> Pairs:
    """Every two values of a combination, of the factors ``names``."""
    return set(map(frozenset, itertools.combinations([(n, chosen[n]) for n in names], 2)))


def covering(
    ranks: int, steps: int, names: Sequence[str] = FACTORS, known: Pairs = frozenset()
) -> list[tuple[Chosen, Case]]:
    """Few combinations that hold every pair of values of ``names`` that any combination holds, but
    for the pairs that are ``known`` already.

    Again and again the one that adds most pairs of ``names`` is taken, among equals the one that
    adds most pairs of all factors, among those the first.
    """
    left = [
        (pairs(c, names), pairs(c, FACTORS), (c, case)) for c, case in combinations(ranks, steps)
    ]
    wanted = set().union(*(first for first, _, _ in left)) - known
    missing = set().union(*(every for _, every, _ in left))
    taken: list[tuple[Chosen, Case]] = []
    while wanted:
        first, every, one = max(left, key=lambda e: (len(e[0] & wanted), len(e[1] & missing)))
        taken.append(one)
        wanted, missing = wanted - first, missing - every
    return taken


def small_cover(ranks: int, steps: int) -> list[Case]:
    """Every pair of ``GRID``; on eight ranks those that four do not have."""
    known: Pairs = set()
    if ranks == 8:
        known = known.union(*(pairs(chosen, GRID) for chosen, _ in covering(4, steps, GRID)))
    return deal([case for _, case in covering(ranks, steps, GRID, known)])


TRANSPORTS = {"C": (None, "per_owner", "p2p", "padded"), "M": (None, "per_owner", "padded")}
POLICIES = {"C": (None, "numel", "cost_aware"), "M": (None, "scope_greedy", "cost_aware")}


def deal(cases: Sequence[Case]) -> list[Case]:
    """Transports, planner policies and unit thresholds, in turn over the cases of a line."""
    turns = {line: itertools.count() for line in "ABCDM"}
    dealt = []
    for case in cases:
        turn = next(turns[case.line])
        transports, policies = TRANSPORTS.get(case.line, (None,)), POLICIES.get(case.line, (None,))
        dealt.append(
            replace(
                case,
                collectives=transports[turn % len(transports)],
                planner=policies[turn % len(policies)],
                unit_threshold=(None, 5_000_000)[turn % 2] if case.line in "CM" else None,
            )
        )
    return dealt


def test_the_subset_covers_the_grid() -> None:
    """Every line, shape, ZeRO stage, degree of tp and model, two by two."""
    cases = [case for ranks in SHAPES for case in small_cover(ranks, 1)]
    assert len(cases) < 30
    seen = {
        pair
        for case in cases
        for pair in itertools.combinations(
            (
                case.line,
                f"{case.replicas}x{case.shards}",
                case.zero_stage,
                f"tp {case.tp}",
                case.training.model,
            ),
            2,
        )
    }
    shapes = ("1x4", "2x2", "1x8", "2x4", "4x2")
    for line, shape, stage, tp, model in itertools.product("ABCD", shapes, (2, 3), (1, 2), MODELS):
        wanted = {(line, shape), (line, stage), (line, f"tp {tp}"), (line, model), (shape, stage)}
        wanted |= {(shape, model), (stage, f"tp {tp}"), (stage, model), (f"tp {tp}", model)}
        assert wanted <= seen
    assert {("2x2", "tp 2"), ("M", "1x4"), ("M", "1x8"), ("M", "nano-moe")} <= seen
    assert {("C", 1), ("D", 1)} <= seen
    assert {("D", "async"), ("D", "sync"), ("D", "recompute"), ("D", "reduced once")} <= {
        (case.line, value)
        for case in cases
        for value in (
            case.publish,
            "recompute" if case.training.recompute else None,
            "reduced once" if case.gradient_reduction == "step" else None,
        )
    }
    choices = {(c.sequence_parallel, c.publish, c.training.recompute) for c in cases}
    assert [set(values) for values in zip(*choices, strict=True)] == [
        {False, True},
        {None, "async", "sync"},
        {False, True},
    ]


# --- FP64 ----------------------------------------------------------------------------------------


def test_every_line_on_every_grid_of_eight_ranks(bench: Bench) -> None:
    bench.check(small_cover(8, 6))


@pytest.mark.slow
def test_every_line_on_every_grid_for_fifty_steps(bench: Bench) -> None:
    """Line D has line C's bits (test_ready_training.py), so 20 steps are enough."""
    longer, shorter = small_cover(4, 50), small_cover(4, 20)
    pairs_of = zip(longer, shorter, strict=True)
    bench.check([short if long.line == "D" else long for long, short in pairs_of])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_every_pair_of_all_choices(bench: Bench, ranks: int) -> None:
    bench.check(deal([case for _, case in covering(ranks, 8)]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_owners_on_few_ranks(bench: Bench, ranks: int) -> None:
    """ZeRO x accumulation x recompute; reductions, thresholds and transports are dealt over it."""
    axes = itertools.product((2, 3), (1, 2), (False, True))
    bench.check(
        [
            Case(
                line="C",
                shards=ranks,
                zero_stage=stage,
                collectives=("grouped", "ready", "per_owner")[(2 * number + ranks) % 3],
                gradient_reduction="step"
                if accumulation > 1 and (number + ranks) % 3 != 0
                else "micro-batch",
                unit_threshold=(2_000, 5_000_000)[(number + ranks) % 2],
                training=Training(
                    steps=8, accumulation=accumulation, recompute=recompute, batch=12, length=8
                ),
            )
            for number, (stage, accumulation, recompute) in enumerate(axes)
        ]
    )


def test_more_ranks_than_units(bench: Bench) -> None:
    """Eight ranks on a model of five units, as one replica and as two; and AdamW for everything."""
    training = Training(steps=6, batch=8, length=8)
    whole = {"unit_threshold": 5_000_000, "training": training}
    adam = {**whole, "training": replace(training, optimizer="adam")}
    bench.check(
        [
            Case(line="C", shards=8, **whole),
            Case(line="C", replicas=2, shards=4, zero_stage=2, publish="async", **whole),
            Case(line="C", shards=8, zero_stage=2, **adam),
            Case(line="C", replicas=4, shards=1, tp=2, publish="sync", **adam),
            Case(line="D", replicas=4, shards=1, tp=2, publish="async", **whole),
            Case(line="D", shards=8, **adam),
            Case(line="B", replicas=2, shards=4, **adam),
        ]
    )


@pytest.mark.parametrize("optimizer", ["normuon", "shampoo"])
def test_other_matrix_optimizers(bench: Bench, optimizer: str) -> None:
    """Against their own update of whole matrices in one process."""
    training = Training(optimizer=optimizer, steps=11, batch=4, length=8)
    experts = replace(training, model="nano-moe")
    bench.check(
        [
            Case(line="D", replicas=2, shards=1, tp=2, publish="async", training=training),
            Case(line="B", replicas=2, shards=2, zero_stage=2, training=training),
            Case(line="M", shards=4, training=training),
            Case(line="C", shards=4, training=experts),
        ]
    )


# --- FP32, and faults ----------------------------------------------------------------------------


def test_float32_losses_stay_close(bench: Bench) -> None:
    training = Training(steps=20, dtype=torch.float32, accumulation=2, batch=16)
    experts = replace(training, model="nano-moe", recompute=True)
    cases = [
        Case(line="A", replicas=2, shards=2, training=training),
        Case(line="B", shards=2, tp=2, zero_stage=2, training=experts),
        Case(line="C", shards=4, gradient_reduction="step", training=training),
        Case(line="C", replicas=2, shards=1, tp=2, publish="async", training=training),
        Case(line="C", replicas=2, shards=2, zero_stage=2, publish="async", training=experts),
        Case(line="D", replicas=4, shards=1, publish="async", training=experts),
        Case(line="D", shards=4, gradient_reduction="step", training=training),
        Case(line="M", shards=4, training=experts),
    ]
    for case, found in zip(cases, bench.differences(cases), strict=True):
        assert max(difference.loss for difference in found) < 1e-4, (case.name, found)


@pytest.mark.parametrize("line", ["A", "B", "C", "D", "M"])
def test_a_wrong_learning_rate_on_one_rank_is_seen(bench: Bench, line: str) -> None:
    case = Case(line=line, shards=2, training=Training(steps=2, batch=2, length=4))
    (found,) = bench.differences([case], fault="learning-rate")
    assert max(difference.weight for difference in found) > 1e-7
    assert max(difference.loss for difference in found) > 1e-9
