"""Engines that are closed while other ranks, or other threads of the rank, still have calls."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from megamuon.collectives import CollectiveError
from megamuon.collectives.host_engine import HostOperator, HostReduce
from tests.collectives.test_host_engine import RANKS, Ranks, gather_table

# --- a rank that closes ---------------------------------------------------------------------------


def reduce_table(operator: HostReduce, nodes: Sequence[int]) -> int:
    """300 elements of the owner in column 0 of each of ``nodes``."""
    return operator.reduce_scatter_table(
        nodes=nodes,
        columns=[0] * len(nodes),
        offsets=[300 * i for i in range(len(nodes))],
        numels=[300] * len(nodes),
        windows=[0] * len(nodes),
        slot_dtype=torch.float32,
        wire_dtype=torch.float32,
        window_dtype=torch.float32,
        name="layer 3",
    )


def calls(ranks: Ranks) -> list[Callable[[], Callable[[], None]]]:
    """By rank: begins the next call, and gives what waits for it."""
    kind = ranks.operators[0].name.split()[0]
    (nodes, columns), versions = ranks.shape, [0] * len(ranks.operators)

    def begin(rank: int, operator: HostOperator, table: int) -> Callable[[], None]:
        if kind == "publish":
            versions[rank] += 1
            version = versions[rank]
            operator.publish_begin([0, 1], version)
            if rank < 2:
                operator.publish_task(rank)
            return lambda: (operator.publish_wait([0, 1], [version] * 2), operator.publish_drain())
        if kind == "reduce_scatter":
            ticket = operator.reduce_scatter(table, 0, 8192, first=True, divisor=1.0)
        else:
            ticket = operator.all_gather(table, 0)
        return lambda: operator.wait(ticket)

    found = []
    for rank, operator in enumerate(ranks.operators):
        if kind == "publish":
            table = 0
            operator.publish_parameters(
                nodes=[0, 1], offsets=[0, 4096], nbytes=[1500, 600], names=["wq", "wk"]
            )
        elif kind == "reduce_scatter":
            table = reduce_table(operator, range(nodes))
        else:
            table = operator.all_gather_table(
                nodes=[r // columns for r in range(nodes * columns)],
                columns=[r % columns for r in range(nodes * columns)],
                offsets=[4096 * r for r in range(nodes * columns)],
                nbytes=[4096] * (nodes * columns),
                name="layer 3",
            )
        found.append(lambda rank=rank, op=operator, table=table: begin(rank, op, table))
    return found


@pytest.mark.parametrize("closed_first", [True, False])
@pytest.mark.parametrize("whole_calls", [0, 2])
@pytest.mark.parametrize(
    ("kind", "nodes", "columns"),
    [
        ("all_gather", 1, 3),
        ("all_gather", 3, 1),
        ("all_gather", 2, 2),
        ("reduce_scatter", 2, 2),
        ("reduce_scatter", 3, 1),
        ("publish", 3, 1),
    ],
)
def test_a_rank_that_closes_before_its_call_is_missed_at_once(
    kind: str, nodes: int, columns: int, whole_calls: int, closed_first: bool
) -> None:
    ranks = Ranks(kind, nodes=nodes, columns=columns)
    begin = calls(ranks)
    for _ in range(whole_calls):
        for wait in [start() for start in begin]:
            wait()
    if closed_first:
        ranks.engines[0].close()
    waits = [start() for start in begin[1:]]
    ranks.engines[0].close()
    began = time.monotonic()
    for wait in waits:
        with pytest.raises(CollectiveError, match="rank 0 has closed its collectives while rank"):
            wait()
    assert time.monotonic() - began < 3.0  # it takes 0.05 s
    ranks.close()


def test_a_rank_whose_part_is_over_may_close_while_others_still_wait() -> None:
    """Node 2 has sent its share of a sum, which node 1 cannot finish before node 0 comes."""
    ranks = Ranks("reduce_scatter", nodes=3, columns=1)
    tables = [reduce_table(operator, [1]) for operator in ranks.operators]
    for rank in range(3):
        ranks.tensor(rank, 0, 300, torch.float32).fill_(rank + 1.0)

    def begin(rank: int) -> int:
        return ranks.operators[rank].reduce_scatter(tables[rank], 0, 8192, first=True, divisor=1.0)

    tickets = {rank: begin(rank) for rank in (1, 2)}
    ranks.operators[2].wait(tickets[2])
    ranks.engines[2].close()
    time.sleep(0.5)  # rank 1 looks at its peers every 0.05 s
    assert not ranks.operators[1].done(tickets[1])
    tickets[0] = begin(0)
    for rank in (0, 1):
        ranks.operators[rank].wait(tickets[rank])
    assert (ranks.tensor(1, 8192, 300, torch.float32) == 6.0).all()
    ranks.close()


def test_an_owner_may_close_while_its_publish_is_still_on_its_way() -> None:
    ranks = Ranks("publish", nodes=3, columns=1)
    for operator in ranks.operators:
        operator.publish_parameters(
            nodes=[0, 1], offsets=[0, 4096], nbytes=[1500, 600], names=["wq", "wk"]
        )
    ranks.tensor(0, 0, 1500, torch.uint8).fill_(7)
    owner, relay, last = ranks.operators
    last.publish_begin([0], 1)
    owner.publish_begin([0], 1)
    owner.publish_task(0)
    owner.publish_drain()
    ranks.engines[0].close()
    time.sleep(0.5)
    assert last.publish_arrived(0) == 0
    relay.publish_begin([0], 1)
    last.publish_wait([0], [1])
    assert (ranks.tensor(2, 0, 1500, torch.uint8) == 7).all()
    relay.publish_drain()
    ranks.close()


# --- closed under a thread that is inside --------------------------------------------------------


class Caller(threading.Thread):
    """Calls something again and again until it raises."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.call, self.error, self.calls = call, "", 0
        self.start()

    def run(self) -> None:
        try:
            while True:
                self.call()
                self.calls += 1
        except CollectiveError as error:
            self.error = str(error)

    def heard(self) -> str:
        self.join(timeout=10.0)
        assert not self.is_alive()
        return self.error


def test_threads_that_wait_leave_with_an_error_when_the_engine_is_closed() -> None:
    ranks = Ranks("all_gather")
    tables = [gather_table(operator) for operator in ranks.operators]
    operator, engine = ranks.operators[0], ranks.engines[0]
    ticket = operator.all_gather(tables[0], 0)  # the others never come
    number, wait = operator.number, engine.library.call.mm_wait
    results: list[int] = []
    patient = threading.Thread(target=lambda: results.append(wait(handle, number, ticket, 60.0)))
    handle = engine.handle
    patient.start()
    callers = [Caller(lambda: operator.wait(ticket)) for _ in range(3)]
    time.sleep(0.2)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 10.0  # it does not wait for the patience of those inside
    for caller in callers:
        assert re.fullmatch(r"(all_gather 0: call 1|rank 0): the engine is closed", caller.heard())
    patient.join(timeout=10.0)
    assert results == [-1]
    assert "rank 0 gave up: closed with calls outstanding: all_gather 0" in ranks.engines[1].error()
    ranks.close()


def test_a_wait_for_what_no_call_brings_ends_too() -> None:
    ranks = Ranks("publish", nodes=2, columns=1)
    calls(ranks)
    caller = Caller(lambda: ranks.operators[0].publish_wait([1], [3]))
    time.sleep(0.2)
    ranks.engines[0].close()
    assert re.fullmatch(r"(publish 0: publish|rank 0): the engine is closed", caller.heard())
    assert ranks.engines[1].error() == ""  # nobody else is held up by it
    ranks.close()


def test_calls_that_race_with_closing_fail_and_touch_nothing() -> None:
    for turn in range(8):
        ranks = Ranks("all_gather")
        tables = [gather_table(operator) for operator in ranks.operators]
        operator, engine = ranks.operators[0], ranks.engines[0]
        ticket = operator.all_gather(tables[0], 0)
        callers = [
            Caller(call)
            for call in (
                lambda op=operator, t=ticket: op.done(t),
                lambda op=operator: op.cursors(),
                lambda op=operator, t=tables[0]: op.all_gather(t, 0),
                lambda engine=engine: engine.error(),
                lambda engine=engine: engine.set_link(latency_ns=0, bytes_per_second=0),
                lambda op=operator, t=ticket: op.wait(t),
            )
        ]
        time.sleep(0.01 + 0.005 * turn)
        engine.close()
        assert all("the engine is closed" in caller.heard() for caller in callers)
        assert sum(caller.calls for caller in callers) > 0
        ranks.close()


def test_a_handle_of_a_closed_engine_is_refused_whatever_is_asked() -> None:
    """As a thread does that took the handle just before another one closed the engine."""
    ranks = Ranks("all_gather")
    table = gather_table(ranks.operators[0])
    engine, number = ranks.engines[0], ranks.operators[0].number
    handle, call = engine.handle, engine.library.call
    engine.abort("no more disk")
    engine.close()
    others = Ranks("all_gather")  # whose engines must not get the calls
    assert call.mm_all_gather(handle, number, table, 0) == -1
    assert call.mm_done(handle, number, 1) == -1
    assert call.mm_wait(handle, number, 1, 60.0) == -1
    assert call.mm_operator_cursors(handle, number, None, 0) == -1
    assert call.mm_publish_arrived(handle, number, 0) == 0
    call.mm_engine_abort(handle, b"late")
    call.mm_engine_set_link(handle, 10**9, 0)
    call.mm_engine_destroy(handle)
    with pytest.raises(CollectiveError) as error:
        engine.check(-1, "call 1")
    assert str(error.value) == (
        "call 1: the engine is closed, after this: lost contact: rank 0 gave up: no more disk"
    )
    assert [engine.error() for engine in others.engines] == [""] * RANKS
    others.close()
    ranks.close()
