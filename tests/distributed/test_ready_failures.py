"""What goes wrong in the operators: every rank hears of it in seconds, in words that name who waits
for whom at what; nobody spins, hangs at the end, or leaves a segment behind.

One start of six ranks goes through all cases. Each has a fabric of its own over the first ranks;
in the last four the last of them dies, so their grids shrink.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamuon.collectives import CollectiveError
from megamuon.collectives.host_fabric import HostFabric
from megamuon.collectives.operator_settings import ReadySettings
from tests.support.grids import mesh_of
from tests.support.ranks import Outcome, run_ranks_outcomes

RANKS = 6
ALIVE = 3  # ranks of the cases in which nobody dies
SECONDS = 12.0  # until a rank that waits has heard, whatever else the machine does
CLOSED_SECONDS = 3.0  # the same of a rank that has closed, which sets a word and rings the bells
AT_ONCE = 1.0
NUMEL = 1 << 19  # of each segment, so that nobody is through before the victim is gone
CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What one rank was told."""

    error: str  # "" where nothing was raised
    seconds: float  # until then
    again: tuple[str, ...] = ()  # the errors of later calls
    again_seconds: float = 0.0
    burnt: float = 0.0  # seconds of CPU in half a second after the failure
    close_seconds: float = 0.0


def raised(call: Callable[[], object]) -> tuple[str, float]:
    """The text of a CollectiveError ("" without one), and how long it took."""
    began = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


class Place:
    """This rank's place in a fabric over the first ``ranks`` ranks, and a call of each operator."""

    def __init__(
        self, group: Any, rank: int, ranks: int, *, replicas: int = 1, deadline: float = 60.0
    ) -> None:
        mesh = mesh_of(rank, ranks, replicas=replicas)
        settings = ReadySettings(
            slots=2, chunk_bytes=CHUNK, tile_bytes=CHUNK, deadline=deadline, star_bytes=0
        )
        tiles = NUMEL * 4 // CHUNK
        self.fabric = fabric = HostFabric(mesh, group, settings, rails=(1, tiles))
        self.group, self.mesh, self.operators = group, mesh, fabric.operators
        nbytes = ranks * NUMEL * 4
        fabric.open(2 * nbytes)
        shards = list(range(mesh.shards))
        offsets = [NUMEL * shard for shard in shards]
        self.gather_table = self.operators.gather.all_gather_table(
            nodes=[0] * len(shards),
            columns=shards,
            offsets=[4 * offset for offset in offsets],
            nbytes=[4 * NUMEL] * len(shards),
            name="layers.3",
        )
        self.reduce_table = self.operators.reduce.reduce_scatter_table(
            nodes=[shard % replicas for shard in shards],
            columns=shards,
            offsets=offsets,
            numels=[NUMEL] * len(shards),
            windows=[0] * len(shards),
            slot_dtype=torch.float32,
            wire_dtype=torch.float32,
            window_dtype=torch.float32,
            name="layers.4",
        )
        if replicas > 1:
            self.share_table = self.operators.share.all_gather_table(
                nodes=[0, 1],
                columns=[0, 0],
                offsets=[0, 4 * NUMEL],
                nbytes=[4 * NUMEL] * 2,
                name="layers.5",
            )
            fabric.open_copies(4 * NUMEL)
            self.operators.publish.publish_parameters(
                nodes=[replicas - 1], offsets=[0], nbytes=[4 * NUMEL], names=["layers.6.weight"]
            )
        self.version = 0
        SEGMENTS.update(nonces())

    def start(self, name: str) -> Callable[[], None]:
        """Begin a call of the operator ``name``; what waits for it."""
        if name == "publish":
            publish = self.operators.publish
            self.version += 1
            publish.publish_begin([0], self.version)
            if self.mesh.replica == self.mesh.replicas - 1:
                publish.publish_task(0)
            return lambda: publish.publish_wait([0], [self.version])
        if name == "reduce":
            at = 4 * NUMEL * self.mesh.shards
            operator = self.operators.reduce
            ticket = operator.reduce_scatter(self.reduce_table, 0, at, first=True, divisor=1.0)
        else:
            operator = getattr(self.operators, name)
            table = self.gather_table if name == "gather" else self.share_table
            ticket = operator.all_gather(table, 0)
        return lambda: operator.wait(ticket)

    def whole(self, name: str) -> None:
        """A call that goes well, on all ranks."""
        self.start(name)()
        if name == "publish":
            self.operators.publish.publish_drain()
        dist.barrier(self.group)

    def after(self, error: str, seconds: float) -> Heard:
        """What a rank that has heard finds from then on, to the end of its fabric."""
        again, again_seconds = [], 0.0
        names = ["gather", "reduce"] + (["share", "publish"] if self.mesh.replicas > 1 else [])
        for name in names:
            text, took = raised(lambda n=name: self.start(n)())
            again.append(text)
            again_seconds = max(again_seconds, took)
        burnt = time.process_time()
        time.sleep(0.5)
        burnt = time.process_time() - burnt
        _, close_seconds = raised(self.fabric.close)
        return Heard(
            error=error,
            seconds=seconds,
            again=tuple(again),
            again_seconds=again_seconds,
            burnt=burnt,
            close_seconds=close_seconds,
        )

    def listen(self, name: str) -> Heard:
        """Begin a call that nobody finishes, and wait for it."""
        return self.after(*raised(lambda: self.start(name)()))


# --- nobody dies ---------------------------------------------------------------------------------


def signals(rank: int, group: Any) -> dict[str, Any]:
    """Handlers run while a rank waits in C for one that comes late; one may raise."""
    place = Place(group, rank, ALIVE)
    ran: list[float] = []

    def note(number: int, frame: object) -> None:
        ran.append(time.monotonic())
        if rank == 0:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, note)
    interrupted = False
    if rank == 1:
        time.sleep(2.5)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    wait = place.start("gather")
    try:
        wait()
    except KeyboardInterrupt:
        interrupted = True
        wait()  # the call goes on
    ended = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
    place.fabric.close()
    return {"early": [ended - at for at in ran], "interrupted": interrupted}


def late(rank: int, group: Any) -> Heard:
    place = Place(group, rank, ALIVE, deadline=2.0)
    place.whole("gather")
    if rank == 1:
        time.sleep(4.0)
    return place.listen("gather")


def aborts(rank: int, group: Any) -> Heard:
    place = Place(group, rank, ALIVE)
    if rank == 2:
        time.sleep(0.2)
        place.fabric.engine.abort("the loss is not finite")
    return place.listen("reduce")


def idle_when_another_aborts(rank: int, group: Any) -> Heard:
    """A rank without calls does not look at the others, and learns of it at its next call."""
    place = Place(group, rank, ALIVE)
    if rank == 0:
        place.fabric.engine.abort("no more disk")
    dist.barrier(group)
    return place.after(*raised(lambda: place.start("gather")))


def raises(rank: int, group: Any) -> Heard:
    """Rank 1 has begun a call when something unrelated fails, and closes on its way out."""
    place = Place(group, rank, ALIVE)
    place.whole("reduce")
    if rank != 1:
        return place.listen("reduce")
    try:
        place.start("gather")
        raise ValueError("unrelated")
    except ValueError:
        place.fabric.engine.close()
    return Heard(error="", seconds=0.0)


def closes_early(rank: int, group: Any) -> Heard:
    """Rank 1 is through, it believes, and the others wait for it."""
    place = Place(group, rank, ALIVE)
    place.whole("gather")
    if rank != 1:
        return place.listen("gather")
    place.fabric.engine.close()
    return Heard(error="", seconds=0.0)


def other_settings(rank: int, group: Any) -> list[str]:
    """Sizes of control memory that differ, and settings that change no size."""
    mesh, found = mesh_of(rank, ALIVE), []
    for odd in (ReadySettings(slots=4), ReadySettings(deadline=1.0), ReadySettings(star_bytes=7)):
        settings = odd if rank == 1 else ReadySettings()
        found.append(raised(lambda s=settings: HostFabric(mesh, group, s))[0])
    return found


# --- a rank dies ---------------------------------------------------------------------------------


def killed(rank: int, group: Any, name: str, ranks: int, replicas: int) -> Heard:
    """The last rank dies: in its second call of a gather, before that of the others."""
    place = Place(group, rank, ranks, replicas=replicas)
    place.whole(name)
    pids = [0] * ranks
    dist.all_gather_object(pids, os.getpid(), group=group)
    if rank == ranks - 1:
        if name == "gather":
            place.start(name)
        else:
            time.sleep(0.3)  # the others stand at it
        os._exit(9)
    if name == "gather":  # else it could do its part of the call before it ends
        await_end_of(pids[-1])
    return place.listen(name)


def await_end_of(pid: int) -> None:
    """Return when a process has ended, reaped or not."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        time.sleep(0.001)


DEATHS = {"reduce": (6, 2), "gather": (5, 1), "share": (4, 4), "publish": (3, 3)}  # ranks, replicas


def nonces() -> set[str]:
    """Of the segments that this process has mapped: what their names had in common."""
    return set(re.findall(r"/megamuon-([0-9a-f]+)-", Path("/proc/self/maps").read_text()))


SEGMENTS: set[str] = set()


def work(rank: int, world: int) -> dict[str, Any]:
    sizes = (ALIVE, *sorted({ranks for ranks, _ in DEATHS.values()} - {ALIVE}))
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    found: dict[str, Any] = {}
    if rank < ALIVE:
        cases = (signals, late, aborts, idle_when_another_aborts, raises, closes_early)
        for case in (*cases, other_settings):
            found[case.__name__] = case(rank, groups[ALIVE])
            dist.barrier(groups[ALIVE])
    for name, (ranks, replicas) in DEATHS.items():
        if rank < ranks:
            found[f"killed in a {name}"] = killed(rank, groups[ranks], name, ranks, replicas)
    found["segments"] = SEGMENTS
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return run_ranks_outcomes(work, RANKS, timeout=150.0, grace=120.0)


@pytest.fixture
def values(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Of the ranks that no case kills."""
    for outcome in outcomes[:2]:
        assert outcome.finished, outcome
    return [outcome.value for outcome in outcomes[:2]]


def check(heard: Heard, pattern: str, *, seconds: float = SECONDS) -> None:
    """``pattern``: of what a rank is told, now and at every later call."""
    assert re.search(pattern, heard.error), heard.error
    assert heard.error.count("lost contact: ") == 1
    assert heard.seconds < seconds
    assert all(re.search(pattern, text) for text in heard.again), heard.again
    assert heard.again_seconds < AT_ONCE
    assert heard.burnt < 0.2
    assert heard.close_seconds < AT_ONCE


def died(victim: int, at: str) -> str:
    return rf"rank {victim} died while rank \d stood at {at}"


def test_signal_handlers_run_while_a_rank_waits(values: list[dict[str, Any]]) -> None:
    """And the call goes on after one that raises."""
    (early,) = values[0]["signals"]["early"]
    assert early > 1.0
    assert values[0]["signals"]["interrupted"]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (
            "late",
            r"nothing moved on rank [02] for \d s at gather of group 'layers.3', call 2, queue 0: "
            r"chunk 0 of \d+ \(sequence \d+\) waits for rank 1 to enter",
        ),
        ("aborts", "rank 2 gave up: the loss is not finite"),
        ("idle_when_another_aborts", "rank 0 gave up: no more disk"),
        (
            "raises",
            "rank 1 gave up: closed with calls outstanding: gather of group 'layers.3', call 1",
        ),
        (
            "closes_early",
            r"rank 1 has closed its collectives while rank \d stood at gather of group 'layers.3',"
            r" call 2, queue 0: chunk 0 of \d+ \(sequence \d+\) waits for rank 1 to enter",
        ),
    ],
)
def test_all_ranks_hear_of_a_rank_that_does_not_come(
    values: list[dict[str, Any]], name: str, pattern: str
) -> None:
    for rank, value in enumerate(values):
        if rank != 1 or name not in ("raises", "closes_early"):
            seconds = CLOSED_SECONDS if name == "closes_early" else SECONDS
            check(value[name], pattern, seconds=seconds)


@pytest.mark.parametrize(
    ("name", "at"),
    [
        (
            "gather",
            # it has entered: its peers move all that they move, and wait for what it moves
            r"gather of group 'layers.3', call 2(, queue 0: chunk \d+ of \d+ \(sequence \d+\))?"
            r":? waits for rank \d",
        ),
        (
            "reduce",
            r"reduce of group 'layers.4', call 2, queue \d: chunk \d+ of \d+ \(sequence \d+\)"
            r" waits for rank \d",
        ),
        (
            "share",
            r"share of group 'layers.5', call 2, queue \d: chunk \d+ of \d+ \(sequence \d+\)"
            r" waits for rank \d or rank \d",
        ),
        (
            "publish",
            r"publish of 'layers.6.weight', version 2: tile 0 waits for rank \d \(its owner is"
            r" rank 2\)",
        ),
    ],
)
def test_all_ranks_hear_of_a_rank_that_dies(
    outcomes: list[Outcome], values: list[dict[str, Any]], name: str, at: str
) -> None:
    ranks, _ = DEATHS[name]
    assert outcomes[ranks - 1].exit_code == 9
    for value in values:
        check(value[f"killed in a {name}"], died(ranks - 1, at))


def test_ranks_with_other_settings_are_refused_by_all(values: list[dict[str, Any]]) -> None:
    named = ("slots is 4", "deadline is 1.0", "star_bytes is 7")
    for value in values:
        for text, words in zip(value["other_settings"], named, strict=True):
            assert f"the fabric: {words} on rank 1 of the group and " in text


def test_no_segment_is_left_behind(values: list[dict[str, Any]]) -> None:
    known = set().union(*(value["segments"] for value in values))
    assert len(known) > 20
    left = [name for name in os.listdir("/dev/shm") if name.startswith("megamuon-")]
    assert [name for name in left if name.split("-")[1] in known] == []
