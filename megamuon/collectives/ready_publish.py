"""The cross-step publish by the persistent operator: one stream of tiles down each rail.

Owns ``ReadyPublisher``, which has the methods of ``publish.Publisher``.  Invariants: a copy's
version is the number in the operator's flag, which is raised after the last byte is in place; a
round begins when this rank's part of the one before is over (see [Note: no staging and no credit]
in csrc/operators/publish.h for why that is enough between two steps). Source: DMuon-2, section 5.3.
Tested by ``tests/distributed/test_ready_publish.py`` and the equivalence tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist

from megamuon.collectives.leader_copies import LeaderCopies, StaleCopyError, check_rail
from megamuon.collectives.operators import Fabric, barrier, compare_settings
from megamuon.collectives.traffic import Traffic


class ReadyPublisher:
    """Sends this replica's updated parameters down the rail and passes on those of the others.

    The copies lie at ``offset`` of every rank's copies memory, in one order on the rail.
    """

    def __init__(
        self,
        copies: LeaderCopies,
        fabric: Fabric,
        *,
        names: Mapping[int, str],
        owner_replicas: Mapping[int, int],
        group: dist.ProcessGroup | None,
        replica: int,
        traffic: Traffic | None = None,
    ) -> None:
        self.copies, self.names, self.owner_replicas = copies, dict(names), dict(owner_replicas)
        self.group, self.replica, self.traffic, self.replicas = (
            group,
            replica,
            traffic,
            fabric.replicas,
        )
        self.waited_seconds = 0.0
        self._operator = fabric.operators.publish
        check_rail(
            copies, self.names, self.owner_replicas, group, replica=replica, replicas=self.replicas
        )
        self._position = {index: place for place, index in enumerate(copies.indices)}
        self._version = 0
        self._unpublished: set[int] = set()
        places = [copies.place(index) for index in copies.indices]
        # No round before every rank of the rail knows the list, and the same list.
        compare_settings(
            {
                self.names[index]: (index, self.owner_replicas[index], *place)
                for index, place in zip(copies.indices, places, strict=True)
            }
            | {"parameters": len(places)},
            group,
            "the publish (owner replica, bytes)",
        )
        self._operator.publish_parameters(
            nodes=[self.owner_replicas[index] for index in copies.indices],
            offsets=[start for start, _ in places],
            nbytes=[nbytes for _, nbytes in places],
            names=[self.names[index] for index in copies.indices],
        )
        barrier(group)

    def expect(self, order: Sequence[int], version: int) -> None:
        """See Publisher.expect. Raises CollectiveError for a lost peer and ValueError for an
        unknown or repeated parameter, or one of the last round that was never published.
        """
        self._refuse_unpublished()
        if len(set(order)) != len(order) or not self._position.keys() >= set(order):
            wrong = [i for i in order if i not in self._position or list(order).count(i) > 1]
            raise ValueError(f"publish order: parameters {wrong} are unknown or repeated")
        self.drain()
        self._operator.publish_begin([self._position[index] for index in order], version)
        self._version = version
        self._unpublished = {index for index in order if self.owner_replicas[index] == self.replica}

    def publish(self, index: int) -> None:
        """See Publisher.publish."""
        if index not in self._unpublished:
            name = self.names.get(index, f"parameter {index}")
            owner = self.owner_replicas.get(index)
            if owner != self.replica:
                raise ValueError(
                    f"{name}: replica {self.replica} publishes it, but replica {owner} owns it"
                )
            raise ValueError(
                f"{name}: not expected at version {self._version}, or published already"
            )
        self._unpublished.remove(index)
        self.copies.stamp(index, self._version)
        if self.traffic is not None:
            nbytes = self.copies.place(index)[1] * (self.replicas - 1)
            self.traffic.sent("publish", "replicate", nbytes)
        self._operator.publish_task(self._position[index])

    def finish_round(self) -> None:
        """See Publisher.finish_round."""
        self._refuse_unpublished()

    def wait(self, indices: Iterable[int], expected: Mapping[int, int]) -> None:
        """See Publisher.wait. Raises StaleCopyError where a copy holds a later version."""
        wanted, positions, versions = self._wanted(indices, expected)
        started = time.perf_counter()
        try:
            self._operator.publish_wait(positions, versions)
        finally:
            self.waited_seconds += time.perf_counter() - started
        other = self._operator.publish_other(positions, versions)
        if other is not None:
            place, held = other
            index = wanted[place]
            raise StaleCopyError(
                f"{self.names[index]} (parameter {index})",
                replica=self.replica,
                held=f"version {held}",
                wanted=versions[place],
                owner_replica=self.owner_replicas[index],
            )

    def arrived(self, indices: Iterable[int], expected: Mapping[int, int]) -> bool:
        """See Publisher.arrived; here what has arrived is complete."""
        _, positions, versions = self._wanted(indices, expected)
        return self._operator.publish_ready(positions, versions)

    def _wanted(
        self, indices: Iterable[int], expected: Mapping[int, int]
    ) -> tuple[list[int], list[int], list[int]]:
        """The indices, their places on the rail, the versions that they must have."""
        wanted = list(indices)
        return wanted, [self._position[i] for i in wanted], [expected[i] for i in wanted]

    def fence(self) -> None:
        """See Publisher.fence: every rank of the rail has passed on the round before."""
        self.drain()
        barrier(self.group)

    def drain(self) -> None:
        """Wait until this rank's sends and relays are over."""
        started = time.perf_counter()
        try:
            self._operator.publish_drain()
        finally:
            self.waited_seconds += time.perf_counter() - started

    def pending(self) -> int:
        """Rounds that this rank is not through with."""
        return int(not self._operator.publish_round_done())

    def abandon(self) -> None:
        """Forget the round's own parameters, after a failure."""
        self._unpublished.clear()

    def _refuse_unpublished(self) -> None:
        if self._unpublished:
            names = ", ".join(self.names[index] for index in sorted(self._unpublished))
            raise ValueError(
                f"replica {self.replica} never published version {self._version} of {names}"
            )
