"""The operators over a slow link: nodes are threads of one process, each hop takes a set time.

Owns the grids of threads and the fit of time over nodes. Invariant: every result is compared with
the data before it is timed; memory is private to a place, so bytes cross the link or do not arrive.
Tested by ``tests/tools/test_bench_collectives.py``.

[Note: what grows]

A message that fits into a ring's slots takes ``t0 + (R - 1) * hop`` on R nodes, whatever the
number of columns K: a chain runs from node to node, and of a node it visits one place. So
``hop_ms`` should be the injected latency, and twice the columns at the same R should take the same
time, though there are twice as many ranks. Messages on the star take one hop at any R up to 16;
beyond that there is no star. A larger message is paced by the link, and where all slots of a queue
are under way, by the acknowledgements.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamuon.collectives import SegmentTable
from megamuon.collectives.host_engine import HostEngine, HostOperator
from megamuon.collectives.operator_settings import ReadySettings
from tools.bench.collectives_ranks import (
    ALIGNMENT,
    OPERATIONS,
    aligned,
    cut,
    gather_table,
    payload,
    place_operators,
    reduce_table,
)

SIZES = (16 << 10, 1 << 20)  # bytes
COLUMNS = (1, 2)
RING, STAR = "ring", "star"
STAR_NODES = 16  # the star is for at most so many


@dataclass(frozen=True, kw_only=True)
class Link:
    """What each put takes beyond the copy."""

    latency_us: float
    gbps: float = 0.0  # gigabits per second to the next node; 0: no limit


class Threads:
    """A grid whose places are threads of this process with their own memory."""

    def __init__(
        self, rows: int, columns: int, pool_bytes: int, link: Link, settings: ReadySettings
    ) -> None:
        places = rows * columns
        self.columns = columns
        configs, control_bytes = place_operators(rows, columns, settings)
        controls = [_zeros(control_bytes) for _ in range(places)]
        self.pools = [_zeros(pool_bytes) for _ in range(places)]
        bases = [memory.data_ptr() for memory in self.pools]
        self.engines = [
            HostEngine(
                rank=rank,
                control=[memory.data_ptr() for memory in controls],
                pids=[os.getpid()] * places,
                deadline=60,
                keep=controls,
            )
            for rank in range(places)
        ]
        self.operators: list[dict[str, HostOperator]] = []
        for engine in self.engines:
            made = {name: engine.operator(configs[name], name) for name in OPERATIONS}
            for operator in made.values():
                operator.set_pool(bases, keep=self.pools)
            self.operators.append(made)
            engine.set_link(
                latency_ns=round(1e3 * link.latency_us), bytes_per_second=link.gbps * 1e9 / 8
            )

    def tensor(self, place: int, offset: int, numel: int) -> Tensor:
        """FP32 elements at byte ``offset`` of a place's pool."""
        return self.pools[place][offset : offset + 4 * numel].view(torch.float32)

    def close(self) -> None:
        """Stop all threads."""
        for engine in self.engines:
            engine.close()


def _zeros(nbytes: int) -> Tensor:
    """Memory that starts at a multiple of the alignment; pages come when they are written."""
    whole = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + nbytes]


def measure(
    nodes: int, columns: int, nbytes: int, link: Link, *, path: str, repeats: int
) -> list[dict[str, Any]]:
    """Both operations on one grid: an entry each, with the median time in ``ms`` from the first
    call to the end of the last.  Raises RuntimeError where a result is wrong.
    """
    numel = nbytes // 4
    table = cut(numel, nodes, columns)
    window = aligned(nbytes)
    settings = ReadySettings(star_bytes=ReadySettings().star_bytes if path == STAR else 0)
    threads = Threads(nodes, columns, window + 4 * max(table.sizes), link, settings)
    found = []
    try:
        for operation in OPERATIONS:
            times = _times(threads, operation, table, numel, window, repeats)
            found.append(
                {
                    "nodes": nodes,
                    "columns": columns,
                    "operation": operation,
                    "bytes": nbytes,
                    "path": path,
                    "ms": 1e3 * statistics.median(times),
                }
            )
    finally:
        threads.close()
    return found


def _times(
    threads: Threads, operation: str, table: SegmentTable, numel: int, window: int, repeats: int
) -> list[float]:
    """Seconds of each call, after one that is checked."""
    operators = [made[operation] for made in threads.operators]
    places = range(len(operators))
    for place in places:
        threads.tensor(place, 0, numel).copy_(payload(numel, place, torch.float32))
    if operation == "gather":
        for place in places:
            mine = threads.tensor(place, 0, numel)
            kept = mine.clone()
            mine.fill_(-1)
            for s in table.of(place):
                mine[s.offset : s.offset + s.numel] = kept[s.offset : s.offset + s.numel]
        numbers = [gather_table(o, table, threads.columns, 4, "gather") for o in operators]
        calls = [
            lambda o=o, n=n: o.all_gather(n, 0) for o, n in zip(operators, numbers, strict=True)
        ]
    else:
        numbers = [
            reduce_table(o, table, threads.columns, torch.float32, "reduction") for o in operators
        ]
        calls = [
            lambda o=o, n=n: o.reduce_scatter(n, 0, window, first=True, divisor=1)
            for o, n in zip(operators, numbers, strict=True)
        ]
    seconds = []
    for call in range(repeats + 1):
        begin = time.perf_counter()
        tickets = [start() for start in calls]
        for operator, ticket in zip(operators, tickets, strict=True):
            operator.wait(ticket)
        seconds.append(time.perf_counter() - begin)
        if call == 0:
            _check(threads, operation, table, numel, window)
    return seconds[1:]


def _check(threads: Threads, operation: str, table: SegmentTable, numel: int, window: int) -> None:
    """Raises RuntimeError where a place does not hold what it should."""
    places = range(len(threads.engines))
    given = [payload(numel, place, torch.float32) for place in places]
    total = sum(given)
    whole = torch.empty(numel)
    for s in table.segments:
        whole[s.offset : s.offset + s.numel] = given[s.rank][s.offset : s.offset + s.numel]
    for place in places:
        if operation == "gather":
            right = torch.equal(threads.tensor(place, 0, numel), whole)
        else:
            right = all(
                torch.equal(
                    threads.tensor(place, window, s.numel), total[s.offset : s.offset + s.numel]
                )
                for s in table.of(place)
            )
        if not right:
            raise RuntimeError(f"{operation}: place {place} of {len(places)} holds a wrong result")


def fit(nodes: Sequence[int], ms: Sequence[float]) -> dict[str, float]:
    """Least squares of ``t0_ms + (R - 1) hop_ms``, in relative errors, and the largest of these."""
    hops = np.asarray(nodes, dtype=float) - 1
    times = np.asarray(ms, dtype=float)
    terms = np.stack([np.ones_like(hops), hops], axis=1)
    (t0, hop), *_ = np.linalg.lstsq(terms / times[:, None], np.ones_like(times), rcond=None)
    errors = np.abs((t0 + hops * hop) / times - 1)
    return {"t0_ms": float(t0), "hop_ms": float(hop), "fit_error": float(errors.max())}


def figures(link: Link, nodes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Times by grid, and what they say; see [Note: what grows].

    ``fits`` has an entry for each operation and number of columns, of the smallest message on the
    ring. ``hop_ms`` is their median hop, ``fit_error`` the largest relative error of a fit;
    ``twice_the_columns`` is the geometric mean of their times with twice the columns, over those of
    the same number of nodes.
    """
    runs = [(columns, nbytes, RING) for columns in COLUMNS for nbytes in SIZES]
    runs += [(columns, SIZES[0], STAR) for columns in COLUMNS]
    found = [
        entry
        for count in nodes
        for columns, nbytes, path in runs
        if path == RING or count <= STAR_NODES
        for entry in measure(count, columns, nbytes, link, path=path, repeats=repeats)
    ]
    small = {
        (entry["operation"], entry["columns"], entry["nodes"]): entry["ms"]
        for entry in found
        if entry["bytes"] == SIZES[0] and entry["path"] == RING
    }
    fits = [
        {
            "operation": operation,
            "columns": columns,
            **fit(nodes, [small[operation, columns, count] for count in nodes]),
        }
        for operation in OPERATIONS
        for columns in COLUMNS
    ]
    return {
        "link": {"latency_us": link.latency_us, "gbps": link.gbps},
        "repeats": repeats,
        "latency": found,
        "fits": fits,
        "hop_ms": statistics.median(entry["hop_ms"] for entry in fits),
        "fit_error": max(entry["fit_error"] for entry in fits),
        "twice_the_columns": statistics.geometric_mean(
            small[operation, COLUMNS[1], count] / small[operation, COLUMNS[0], count]
            for operation in OPERATIONS
            for count in nodes
        ),
    }


def describe(found: dict[str, Any]) -> str:
    """The tables as text."""
    nodes = sorted({entry["nodes"] for entry in found["latency"]})
    link = found["link"]
    limit = f", {link['gbps']:g} Gb/s" if link["gbps"] else ""
    text = [
        f"a put takes {link['latency_us']:g} us more{limit}; ms, by number of nodes",
        f"  {'operation':<10}{'size':>9}{'path':>6}{'columns':>9}"
        + "".join(f"{count:>9}" for count in nodes),
    ]
    rows: dict[tuple[str, int, str, int], list[float]] = {}
    for entry in found["latency"]:
        key = (entry["operation"], entry["bytes"], entry["path"], entry["columns"])
        rows.setdefault(key, []).append(entry["ms"])
    for (operation, nbytes, path, columns), times in sorted(rows.items()):
        text.append(
            f"  {operation:<10}{nbytes // 1024:>5} KiB{path:>6}{columns:>9}"
            + "".join(f"{ms:>9.2f}" for ms in times)
        )
    text += [
        f"  {entry['operation']}, {entry['columns']} columns: {entry['t0_ms']:.3f} ms +"
        f" (nodes - 1) x {entry['hop_ms']:.3f} ms, {100 * entry['fit_error']:.1f} % off at most"
        for entry in found["fits"]
    ]
    text.append(
        f"  twice the columns at the same nodes: {found['twice_the_columns']:.3f} times as long"
    )
    return "\n".join(text)
