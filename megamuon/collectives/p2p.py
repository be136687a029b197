"""The ``p2p`` transport: sends and receives of owners' segments (MatrixFSDP, section 4.2).

Owns the ``p2p`` transport and its schedules. A schedule is every transfer of a table in one
deterministic order, built once per table: each owner sends each of its segments to each other
rank; a reduction runs the same list backwards, from the others to the owner, which adds up in rank
order, so that the result equals ``grouped`` bit for bit.  Gathers read and write the group's buffer
in place.

Invariants: a transfer's tag is its place in the schedule, so no delay on any rank can swap two of
them; and schedules are compared between the ranks before first use (``check_schedules``): ranks
that disagree would hang in point-to-point transfers, and Gloo ends the process where a message is
longer than its receive.  Tested by ``tests/distributed/test_p2p.py``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import (
    CollectiveError,
    GatherTable,
    ReduceTable,
    SegmentTable,
    Transport,
    TransportSettings,
    Work,
    mean_into,
    pack,
)

CHECK_SECONDS = 20.0  # for all ranks to reach the check and exchange what it needs


class ScheduleMismatchError(CollectiveError):
    """The ranks built different schedules: they do not run the same plan."""


@dataclass(frozen=True)
class Transfer:
    """``numel`` elements at ``offset`` of a flat buffer, between ``owner`` and ``peer`` (ranks of
    the group): to the peer in a gather, to the owner in a reduction.
    """

    owner: int
    peer: int
    offset: int
    numel: int

    def __str__(self) -> str:
        return f"{self.owner}->{self.peer} offset {self.offset} numel {self.numel}"


def build_schedule(table: SegmentTable) -> tuple[Transfer, ...]:
    """Every transfer of ``table``; each owner starts with the next rank, so that they spread."""
    return tuple(
        Transfer(segment.rank, (segment.rank + step) % table.world, segment.offset, segment.numel)
        for segment in table.segments
        for step in range(1, table.world)
    )


class PeerToPeerTransport(Transport):
    """Sends and receives of the nonempty owner segments, one batch per call."""

    name = "p2p"

    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        self._schedules: dict[SegmentTable, tuple[Transfer, ...]] = {}

    def schedule(self, table: SegmentTable) -> tuple[Transfer, ...]:
        """The schedule of a table, built at its first use."""
        found = self._schedules.get(table)
        if found is None:
            found = self._schedules[table] = build_schedule(table)
        return found

    def all_gather_v(
        self, buffer: Tensor, table: GatherTable, *, operation: str = "gather"
    ) -> Work:
        """See Transport. The buffer is read until ``wait()``."""
        if self.world == 1:
            return Work(name="gather")
        self.count_gather(buffer, table, operation)
        batch = _Batch(self, self.gather_group)
        for tag, transfer in enumerate(self.schedule(table)):
            if self.rank in (transfer.owner, transfer.peer):
                view = buffer[transfer.offset : transfer.offset + transfer.numel]
                if self.rank == transfer.owner:
                    batch.send(view, transfer.peer, tag)
                else:
                    batch.receive(view, transfer.owner, tag)
        return Work(handles=batch.start("gather"), keep=(buffer,), name="gather")

    def reduce_scatter_v(
        self,
        unsharded: Tensor,
        table: ReduceTable,
        sharded: Tensor,
        *,
        first: bool,
        divisor: int,
    ) -> Work:
        """See Transport. Gradients that have the wire dtype are sent as they lie: the work borrows
        them.
        """
        if self.world == 1:
            return self.reduce_alone(unsharded, table, sharded, first=first, divisor=divisor)
        self.count_reduction(table)
        wire = unsharded if unsharded.dtype == self.wire_dtype else unsharded.to(self.wire_dtype)
        segments = table.of(self.rank)
        mine = table.sizes[self.rank]
        starts, start = {}, 0
        for segment in segments:
            starts[segment.offset] = start
            start += segment.numel
        parts = torch.empty(self.world, mine, dtype=self.wire_dtype, device=unsharded.device)
        batch = _Batch(self, self.reduce_group)
        for tag, transfer in enumerate(self.schedule(table)):
            if self.rank == transfer.owner:
                start = starts[transfer.offset]
                place = parts[transfer.peer, start : start + transfer.numel]
                batch.receive(place, transfer.peer, tag)
            elif self.rank == transfer.peer:
                view = wire[transfer.offset : transfer.offset + transfer.numel]
                batch.send(view, transfer.owner, tag)
        handles = batch.start("reduction")
        if mine:
            parts[self.rank].copy_(pack(wire, segments, self.wire_dtype))

        def finish() -> None:
            if mine:
                mean_into(parts.unbind(), sharded, divisor, first=first)

        return Work(
            handles=handles,
            finish=finish,
            keep=(wire, parts),
            borrows=wire is unsharded,
            name="reduction",
        )

    def check_schedules(
        self, tables: Sequence[SegmentTable], *, seconds: float = CHECK_SECONDS
    ) -> None:
        """Compare the schedules of ``tables`` between the ranks; called by all of them, once,
        before the first use.

        Raises ScheduleMismatchError on every rank, naming the first entry that differs and what
        each rank has there, and CollectiveError where a rank did not come within ``seconds``.
        """
        if self.world == 1:
            return
        deadline = time.monotonic() + seconds
        schedules = [self._lines(table) for table in tables]
        digests = [hashlib.sha256("\n".join(lines).encode()).hexdigest() for lines in schedules]
        total = hashlib.sha256("".join(digests).encode()).hexdigest()
        if len(set(self._exchange(total, deadline))) == 1:
            return
        place = _first_difference(self._exchange(digests, deadline))
        own = schedules[place] if place < len(schedules) else []
        theirs = self._exchange(own, deadline)
        entry = _first_difference(theirs)
        raise ScheduleMismatchError(
            f"owner-segment schedules differ between the ranks at table {place}, entry {entry}: "
            f"{_who_has_what(theirs, entry)}; all ranks must build them from one plan"
        )

    def _lines(self, table: SegmentTable) -> list[str]:
        head = f"reduction in {self.wire_dtype} over {table.world} ranks"
        return [head, *map(str, self.schedule(table))]

    def _exchange(self, value: object, deadline: float) -> list:
        """JSON of every rank, in rank order; never later than ``deadline``."""
        payload = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([payload.numel()], dtype=torch.int64)
        lengths = [int(item) for item in self._gather(length, deadline)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        texts = self._gather(padded, deadline)
        return [
            json.loads(bytes(text[:size].tolist()))
            for text, size in zip(texts, lengths, strict=True)
        ]

    def _gather(self, value: Tensor, deadline: float) -> list[Tensor]:
        group = self.gather_group
        if dist.get_backend(group) == "nccl":
            value = value.cuda()
        parts = [torch.empty_like(value) for _ in range(self.world)]
        left = max(deadline - time.monotonic(), 0.1)
        try:
            handle = dist.all_gather(parts, value, group=group, async_op=True)
            handle.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise CollectiveError(
                f"the check of the owner-segment schedules did not end on rank {self.rank} of the "
                f"group: a rank was lost or did not come in time ({error})"
            ) from error
        return [part.cpu() for part in parts]


class _Batch:
    """The sends and receives of one call, started together."""

    def __init__(self, transport: Transport, group: dist.ProcessGroup) -> None:
        self._transport, self._group = transport, group
        self._operations: list[dist.P2POp] = []

    def send(self, view: Tensor, rank: int, tag: int) -> None:
        self._add(dist.isend, view, rank, tag)

    def receive(self, view: Tensor, rank: int, tag: int) -> None:
        self._add(dist.irecv, view, rank, tag)

    def start(self, name: str) -> list[dist.Work]:
        """Start them all. Raises CollectiveError where a peer is known to be lost."""
        if not self._operations:
            return []
        try:
            return dist.batch_isend_irecv(self._operations)
        except RuntimeError as error:
            raise CollectiveError(f"{name} failed: {error}") from error

    def _add(self, operation: Callable[..., object], view: Tensor, rank: int, tag: int) -> None:
        peer = self._transport.peer(self._group, rank)
        self._operations.append(dist.P2POp(operation, view, peer, self._group, tag))


def _first_difference(lists: Sequence[Sequence[str]]) -> int:
    """The first place where the lists are not all alike (the end of the shortest counts)."""
    for place in range(max(map(len, lists))):
        if len({items[place] if place < len(items) else None for items in lists}) > 1:
            return place
    return 0


def _who_has_what(lists: Sequence[Sequence[str]], place: int) -> str:
    """``ranks 0, 2 have '...', rank 1 has '...'``."""
    holders: dict[str, list[int]] = {}
    for rank, items in enumerate(lists):
        held = repr(items[place]) if place < len(items) else "nothing"
        holders.setdefault(held, []).append(rank)
    return ", ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} "
        f"{'has' if len(ranks) == 1 else 'have'} {held}"
        for held, ranks in holders.items()
    )
