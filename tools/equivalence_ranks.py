"""Starts the ranks of the equivalence harness and watches them.

Owns the processes.  Invariant: every case gets an ``Outcome``; a rank that raises, dies or falls
silent ends its start and is named together with the case that it was in, and the remaining cases
run on fresh ranks.  Ranks are forked from a server that has imported torch, so a start is cheap.
Tested by ``tests/tools/test_equivalence_tool.py``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tools.reference_training import Training
from tools.sharded_training import Case, Difference, run_cases

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "numpy",
)
GRACE = 3.0  # seconds after the first failure in which others may report theirs


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case: the largest differences over its ranks, or an error."""

    case: Case
    difference: Difference | None = None
    error: str = ""


@dataclass
class _Rank:
    number: int
    process: Any
    pipe: Connection
    current: int = -1  # index of the case it is in
    found: list[Difference] = field(default_factory=list)
    problem: str = ""
    died: bool = False
    ended: bool = False


def run_on_ranks(
    cases: Sequence[Case],
    references: Mapping[Training, str],
    *,
    timeout: float = 600.0,
    fault: str | None = None,
    done: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """All cases, which have one number of ranks, in order; ``done`` is called after each.

    ``references`` and ``fault`` as for ``run_cases``. ``timeout``: seconds without a sign from any
    rank after which they count as hung.
    """
    outcomes: list[Outcome] = []

    def add(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if done is not None:
            done(outcome)

    while len(outcomes) < len(cases):
        left, before = cases[len(outcomes) :], len(outcomes)
        with tempfile.TemporaryDirectory(prefix="equivalence-") as folder:
            error = _one_start(left, references, folder, timeout, fault, add)
        fault = None  # it belongs to the first case
        if error:
            add(Outcome(case=left[len(outcomes) - before], error=error))
    return outcomes


def _one_start(
    cases: Sequence[Case],
    references: Mapping[Training, str],
    folder: str,
    timeout: float,
    fault: str | None,
    add: Callable[[Outcome], None],
) -> str:
    """Run cases until all are done or one fails; what went wrong, or nothing."""
    world = cases[0].ranks
    ranks = [_start(number, world, (cases, references, folder, fault)) for number in range(world)]
    finished = 0
    try:
        while not all(rank.ended for rank in ranks):
            heard = _listen(ranks, timeout)
            while finished < len(cases) and all(len(rank.found) > finished for rank in ranks):
                parts = [rank.found[finished] for rank in ranks]
                add(Outcome(case=cases[finished], difference=_largest(parts)))
                finished += 1
            if not heard or any(rank.problem or rank.died for rank in ranks):
                return _explain(ranks, cases, finished, timeout)
        return ""
    finally:
        for rank in ranks:
            if not rank.ended:
                rank.process.kill()
        for rank in ranks:
            rank.process.join(timeout=30)
            rank.pipe.close()


def _start(number: int, world: int, arguments: tuple[Any, ...]) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(number, world, sender, *arguments), daemon=True)
    process.start()
    sender.close()
    return _Rank(number=number, process=process, pipe=receiver)


def _main(
    rank: int,
    world: int,
    pipe: Connection,
    cases: Sequence[Case],
    references: Mapping[Training, str],
    folder: str,
    fault: str | None,
) -> None:
    """Body of one rank: messages (kind, value) go up the pipe; the last is ``end`` or
    ``problem``.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine

    def report(index: int, difference: Difference | None) -> None:
        pipe.send(("case", index) if difference is None else ("found", difference))

    try:
        run_cases(rank, world, cases, references, folder, fault, report)
        pipe.send(("end", None))
    except BaseException:
        pipe.send(("problem", traceback.format_exc()))
        os._exit(1)  # destructors of groups may wait for peers that never come


def _listen(ranks: Sequence[_Rank], timeout: float) -> bool:
    """Take what has come from the ranks; after a failure, all that comes in the time of grace.
    False if nothing came.
    """
    deadline = time.monotonic() + timeout
    heard = False
    while open_ranks := [rank for rank in ranks if not (rank.ended or rank.died)]:
        pipes = {rank.pipe: rank for rank in open_ranks}
        ready = wait(list(pipes), timeout=max(deadline - time.monotonic(), 0.0))
        for pipe in ready:
            _take(pipes[pipe])  # type: ignore[index]
        heard = heard or bool(ready)
        failing = any(rank.problem or rank.died for rank in ranks)
        if not failing or not ready:
            return heard
        deadline = min(deadline, time.monotonic() + GRACE)
    return heard


def _take(rank: _Rank) -> None:
    try:
        kind, value = rank.pipe.recv()
    except EOFError:
        rank.died = not rank.problem
        rank.ended = True
        return
    if kind == "case":
        rank.current = value
    elif kind == "found":
        rank.found.append(value)
    elif kind == "problem":
        rank.problem = value
    elif kind == "end":
        rank.ended = True


def _largest(parts: Sequence[Difference]) -> Difference:
    worst = max(parts, key=lambda part: part.weight)
    return Difference(
        loss=max(part.loss for part in parts),
        norm=max(part.norm for part in parts),
        weight=worst.weight,
        weight_name=worst.weight_name,
        seconds=max(part.seconds for part in parts),
    )


def _explain(ranks: Sequence[_Rank], cases: Sequence[Case], finished: int, timeout: float) -> str:
    """Who failed in which case; a rank that died without a word is the cause of all others."""
    case = cases[min(finished, len(cases) - 1)]
    lines = [f"{case.name}, {case.ranks} ranks:"]
    for rank in ranks:
        if rank.died:
            rank.process.join(timeout=5)
            lines.append(f"rank {rank.number} died (exit code {rank.process.exitcode})")
    failed = [rank for rank in ranks if rank.problem]
    for rank in failed:
        last = rank.problem.strip().splitlines()[-1]
        lines.append(f"rank {rank.number} failed: {last}")
    if len(lines) == 1:
        silent = ", ".join(str(rank.number) for rank in ranks if not rank.ended)
        lines.append(f"no sign of ranks {silent} in {timeout:.0f} s")
    if failed and not any(rank.died for rank in ranks):
        lines.append(f"traceback of rank {failed[0].number}:\n{failed[0].problem.rstrip()}")
    return "\n  ".join(lines)
