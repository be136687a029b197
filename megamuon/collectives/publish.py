"""The cross-step publish: an owner sends its updated parameters to the leaders of the other
replicas.

Owns the transfers into the leaders' resident copies (``leader_copies.py``; DMuon-2, sections 4.2,
4.3, 5.3 and appendix C.2).  On a grid of R replicas and K shards every matrix has a *leader* in
each replica, the rank of the owner's rail, so that a parameter crosses nodes once per step.  A
message is header and payload as they lie in the copies: it carries its version and arrives in
place, without staging.

Invariants:

* A copy is fit for use by its version number, never by a flag that a late message could set.
* A rank posts the receives of a step only when it has read the last version for the last time
  (``expect`` comes after the norm of a step, when every gather is over), and Gloo sends nothing
  that is not posted: so no message overwrites a copy that is still read.
* An owner writes a payload only after an ``expect`` that names it, which waits until the last
  sends of that payload are over.
* On Gloo each parameter has its own tag, so neither delays nor orders of the updates on different
  ranks can swap two messages.  On NCCL each rail has one frozen order of broadcasts.

Gloo's point-to-point handles never report completion without a ``wait`` and hang in a second one,
so a handle is taken out of its list before it is waited for, and exactly once. Tested by
``tests/collectives/test_publish_copies.py`` and ``tests/distributed/test_publish.py``; the NCCL
path needs a GPU per replica, and its order is tested with Gloo's broadcasts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.leader_copies import LeaderCopies, StaleCopyError, check_rail
from megamuon.collectives.traffic import Traffic


class Publisher:
    """Sends this replica's updated parameters to the other replicas and receives theirs.

    Per step, on every rank of the rail: ``expect`` once, ``publish`` for each own parameter,
    ``finish_round`` once; then ``wait`` before each layer that is gathered. ``waited_seconds`` is
    the time blocked in ``wait`` and ``drain``.
    """

    def __init__(
        self,
        copies: LeaderCopies,
        *,
        names: Mapping[int, str],
        owner_replicas: Mapping[int, int],
        group: dist.ProcessGroup | None,
        replica: int,
        traffic: Traffic | None = None,
        ordered: bool | None = None,
    ) -> None:
        """``group``: the rail, its own communicator, ranks in order of replicas; None for one
        replica.

        ``ordered`` chooses broadcasts in one frozen order over tagged sends; by default NCCL's
        buffers are ordered and Gloo's are not. Raises ValueError where the tables do not fit.
        """
        self.copies, self.names, self.owner_replicas = copies, dict(names), dict(owner_replicas)
        self.group, self.replica, self.traffic = group, replica, traffic
        self.replicas = dist.get_world_size(group) if group is not None else 1
        self.ordered = copies.buffer.is_cuda if ordered is None else ordered
        self.waited_seconds = 0.0
        self._version = 0
        self._order: tuple[int, ...] = ()
        self._unpublished: set[int] = set()  # own parameters of the round that are not written yet
        self._cursor = 0  # ordered: how far the round's broadcasts are issued
        self._receives: dict[int, dist.Work] = {}
        self._sends: dict[int, list[tuple[int, dist.Work]]] = {}  # (replica, handle)
        self._checks: list[_Check] = []
        check_rail(
            copies, self.names, self.owner_replicas, group, replica=replica, replicas=self.replicas
        )

    def expect(self, order: Sequence[int], version: int) -> None:
        """Open a round: these parameters of the rail get ``version``, in this order.

        Called on all ranks of the rail at the same point, after the last gather that reads the
        old copies. Waits for what is left of older transfers of the same parameters, so that on
        return an owner may overwrite its payloads. Raises ValueError for an unknown or repeated
        parameter or where an own parameter of the last round was never published, and
        CollectiveError for a lost peer.
        """
        self._refuse_unpublished()
        known = set(self.copies.indices)
        if len(set(order)) != len(order) or not known.issuperset(order):
            wrong = [index for index in order if index not in known or order.count(index) > 1]
            raise ValueError(f"publish order: parameters {wrong} are unknown or repeated")
        self._settle_checks()
        for index in self._order if self.ordered else order:
            self._finish_receive(index)
            self._finish_sends(index)
        self._order, self._version, self._cursor = tuple(order), version, 0
        self._unpublished = {index for index in order if self.owner_replicas[index] == self.replica}
        if self.ordered:
            self._issue()
        elif self.group is not None:
            for index in order:
                if self.owner_replicas[index] != self.replica:
                    self._post_receive(index)

    def publish(self, index: int) -> None:
        """Stamp an own parameter, whose payload is written, and send it; returns at once.

        Raises ValueError where the parameter is not this replica's or not in the round, or was
        published already.
        """
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
        self.copies.stamp(index, self._version)
        self._unpublished.remove(index)
        if self.traffic is not None and self.replicas > 1:
            nbytes = self.copies.message(index).numel() * (self.replicas - 1)
            self.traffic.sent("publish", "replicate", nbytes)
        if self.ordered:
            self._issue()
        else:
            self._send(index)

    def finish_round(self) -> None:
        """After the last update of a step, on all ranks: every broadcast of the round is issued.

        Raises ValueError where an own parameter of the round was not published.
        """
        self._refuse_unpublished()
        if self.ordered:
            self._issue()

    def wait(self, indices: Iterable[int], expected: Mapping[int, int]) -> None:
        """Before a layer is gathered: exactly these parameters have arrived, in these versions.

        Raises StaleCopyError naming the parameter where a header holds another version (own
        parameters are checked too), CollectiveError where a peer was lost. On a GPU nothing blocks
        the host: the headers are read by the stream and the comparison raises at a later call, at
        the latest in ``expect``.
        """
        started = time.perf_counter()
        wanted = list(indices)
        try:
            for index in wanted:
                self._finish_receive(index)
        finally:
            self.waited_seconds += time.perf_counter() - started
        if not wanted:
            return
        self._checks.append(
            _Check(self.copies.headers(wanted), wanted, [expected[index] for index in wanted])
        )
        self._settle_checks(block=not self.copies.buffer.is_cuda)

    def arrived(self, indices: Iterable[int], expected: Mapping[int, int]) -> bool:
        """Whether ``wait`` would return soon; never blocks. Says when to prefetch, not what may be
        read: a copy whose header has arrived may still lack the end of its payload.
        """
        if self.copies.buffer.is_cuda:
            return True  # the stream waits, not this thread
        return all(self.copies.version(index) == expected[index] for index in indices)

    def fence(self) -> None:
        """Before a round that follows another without a training step in between; a collective
        over the rail. Nothing to do here: receives are posted round by round.
        """

    def drain(self) -> None:
        """Wait until every receive and send of this rank is over. Raises as ``wait`` does."""
        started = time.perf_counter()
        try:
            for index in tuple(self._receives):
                self._finish_receive(index)
            for index in tuple(self._sends):
                self._finish_sends(index)
        finally:
            self.waited_seconds += time.perf_counter() - started
        self._settle_checks()

    def pending(self) -> int:
        """Transfers that nobody has waited for yet (they may have ended)."""
        return len(self._receives) + sum(len(sends) for sends in self._sends.values())

    def abandon(self) -> None:
        """Forget every transfer without waiting, after a failure."""
        self._receives.clear()
        self._sends.clear()
        self._checks.clear()
        self._unpublished.clear()
        self._cursor = len(self._order)

    def _refuse_unpublished(self) -> None:
        if self._unpublished:
            names = ", ".join(self.names[index] for index in sorted(self._unpublished))
            raise ValueError(
                f"replica {self.replica} never published version {self._version} of {names}"
            )

    def _post_receive(self, index: int) -> None:
        owner = self.owner_replicas[index]
        try:
            self._receives[index] = dist.irecv(
                self.copies.message(index), self._peer(owner), group=self.group, tag=index
            )
        except RuntimeError as error:
            raise self._lost("receive", index, owner) from error

    def _send(self, index: int) -> None:
        if self.group is None:
            return
        sends = self._sends.setdefault(index, [])
        for step in range(
            1, self.replicas
        ):  # the next replica first, so that no replica is everyone's first
            replica = (self.replica + step) % self.replicas
            try:
                handle = dist.isend(
                    self.copies.message(index), self._peer(replica), group=self.group, tag=index
                )
            except RuntimeError as error:
                raise self._lost("send", index, replica) from error
            sends.append((replica, handle))

    def _issue(self) -> None:
        """Ordered: broadcast on, up to the first own parameter that is not written yet."""
        while self._cursor < len(self._order):
            index = self._order[self._cursor]
            if index in self._unpublished:
                return
            self._cursor += 1
            if self.group is None:
                continue
            owner = self.owner_replicas[index]
            try:
                handle = dist.broadcast(
                    self.copies.message(index), self._peer(owner), group=self.group, async_op=True
                )
            except RuntimeError as error:
                raise self._lost("broadcast", index, owner) from error
            if owner == self.replica:
                self._sends.setdefault(index, []).append((owner, handle))
            else:
                self._receives[index] = handle

    def _finish_receive(self, index: int) -> None:
        handle = self._receives.pop(index, None)
        if handle is not None:
            self._wait_for(handle, "receive", index, self.owner_replicas[index])

    def _finish_sends(self, index: int) -> None:
        for replica, handle in self._sends.pop(index, ()):
            self._wait_for(handle, "send", index, replica)

    def _wait_for(self, handle: dist.Work, action: str, index: int, replica: int) -> None:
        try:
            handle.wait()
        except RuntimeError as error:
            raise self._lost(action, index, replica) from error

    def _lost(self, action: str, index: int, replica: int) -> CollectiveError:
        side = "to" if action == "send" else "from"
        return CollectiveError(
            f"publish of {self.names[index]}: {action} {side} replica {replica} failed on"
            f" replica {self.replica} (rank {dist.get_rank()}); a peer of the rail was lost"
        )

    def _peer(self, replica: int) -> int:
        return dist.get_global_rank(self.group, replica)

    def _settle_checks(self, *, block: bool = True) -> None:
        """Compare the headers that have been read, in order; all of them if ``block``."""
        while self._checks and (block or self._checks[0].ready()):
            check = self._checks.pop(0)
            found = check.result()
            for index, version, (held, label) in zip(
                check.indices, check.versions, found, strict=True
            ):
                if held != version or label != index:
                    raise self._stale(index, version, held, label)

    def _stale(self, index: int, version: int, held: int, label: int) -> StaleCopyError:
        return StaleCopyError(
            f"{self.names[index]} (parameter {index})",
            replica=self.replica,
            held=f"version {held}" if label == index else f"a message of parameter {label}",
            wanted=version,
            owner_replica=self.owner_replicas[index],
        )


class _Check:
    """Headers on their way to the host, and what they must say."""

    def __init__(self, headers: Tensor, indices: Sequence[int], versions: Sequence[int]) -> None:
        self.indices, self.versions = indices, versions
        self._event: torch.cuda.Event | None = None
        if headers.is_cuda:
            self._host = torch.empty(headers.shape, dtype=headers.dtype, pin_memory=True)
            self._host.copy_(headers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = headers

    def ready(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._event is None or self._event.query()

    def result(self) -> list[list[int]]:
        """(version, parameter index) of each header; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
