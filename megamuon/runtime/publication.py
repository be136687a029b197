"""The cross-step publish: new weights from owners to the leaders of the other replicas.

Owns the leader copies of this rank, which step each of them must hold, and the order in which a
step publishes. Invariants: a parameter's expected version is a function of the steps alone, equal
on all ranks; a copy is used only if its header carries exactly that version; a rail publishes in
one recorded order. Tested by ``tests/distributed/test_cross_step.py`` and the equivalence tests.

[Note: versions, not flags]

With several replicas an owner is one rank of the whole cluster. Each other replica has a *leader*
for its matrices, the rank of the owner's rail, with a resident copy in the compute dtype that its
replica gathers from. After an update the owner sends the new weights to the leaders while later
updates and the next forward pass run. A leader must never gather an old copy, and a boolean
"arrived" cannot tell this step's arrival from the last one's. So each message begins with the
number of the update that made it, each rank knows which number each parameter must have, and a
gather waits for exactly the parameters it is about to read. A step that is skipped, or that leaves
a parameter untouched, changes no expected number and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.leader_copies import CopySize, LeaderCopies
from megamuon.collectives.operators import Fabric
from megamuon.collectives.publish import Publisher
from megamuon.collectives.ready_publish import ReadyPublisher
from megamuon.collectives.traffic import Traffic
from megamuon.mesh import Mesh
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.layer_group import LayerGroup, LocalSegment


class Publication:
    """Leader copies and their traffic, for a grid of several replicas."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        plan: OwnershipPlan,
        mesh: Mesh,
        *,
        replicate_group: dist.ProcessGroup | None,
        device: torch.device,
        traffic: Traffic,
        synchronous: bool,
        fabric: Fabric | None = None,
    ) -> None:
        """``fabric``: its persistent operator publishes, in memory that the rail shares; without
        it, transfers of ``replicate_group``. Making that memory is a collective. An operator that
        waits on the device takes over from the transfers with ``use_operator``.
        """
        self.synchronous = synchronous
        self._replica = mesh.replica
        self._place = {p.name: place for place, p in enumerate(plan.parameters)}
        led = [parameter for group in groups for parameter in group.led]
        self._led = {self._place[p.name] for p in led}
        names = {self._place[p.name]: p.name for p in led}
        replicas = {self._place[p.name]: plan.homes[p.name].replica for p in led}
        sent = sent_dtypes(groups)
        sizes = {
            self._place[p.name]: CopySize(p.piece_numel(mesh.tp_rank), sent[p.name]) for p in led
        }
        buffer = None
        if fabric is not None and fabric.operators.publish is None:
            fabric = None
        if fabric is not None:
            memory = fabric.open_copies(_heaviest_copies(groups, plan, mesh))
            buffer = memory.tensor(0, LeaderCopies.bytes_of(sizes), torch.uint8)
        self.copies = LeaderCopies(sizes, device, buffer=buffer)
        common = {
            "names": names,
            "owner_replicas": replicas,
            "group": replicate_group,
            "replica": mesh.replica,
            "traffic": traffic,
        }
        self.publisher: Publisher | ReadyPublisher
        self._operator: Callable[[], ReadyPublisher] | None = None  # what takes over later
        if fabric is None:
            self.publisher = Publisher(self.copies, **common)
        elif fabric.waits_on_device:
            self.publisher = Publisher(self.copies, **common)
            self._operator = lambda: ReadyPublisher(self.copies, fabric, **common)
        else:
            self.publisher = ReadyPublisher(self.copies, fabric, **common)
        self._waited_before = 0.0  # by a publisher that was taken over from
        self._owned = tuple(plan.homes)
        self.expected = dict.fromkeys(self._led, 0)  # applied updates that each copy must hold
        self._of_group = {
            group.index: tuple(self._place[p.name] for p in group.led) for group in groups
        }
        for group in groups:
            group.gather_from({p.name: self.payload(p.name) for p in group.led})
        self._masters = self._owned_masters(groups)
        self._queue: list[int] = []
        self._updated: set[int] = set()

    def _owned_masters(self, groups: Sequence[LayerGroup]) -> dict[int, LocalSegment]:
        return {
            self._place[segment.parameter.name]: segment
            for group in groups
            for segment in group.local
            if self._place[segment.parameter.name] in self._led
        }

    def use_operator(self, version: int) -> None:
        """Between two steps, after update ``version``: the fabric's operator publishes from now on,
        where it does not do so already. Every rank calls this.

        What synchronises a GPU without being asked to (first calls of libraries, memory that torch
        gets or gives back) comes in the first steps, and would wait for a kernel that waits for
        other ranks; so those steps publish with transfers of the rail. The operator's flags know
        nothing of them, so everything is published once more.
        """
        if self._operator is None:
            return
        self.publisher.drain()
        self._waited_before = self.publisher.waited_seconds
        self.publisher, self._operator = self._operator(), None
        if version:
            self.republish(version)

    def payload(self, name: str) -> Tensor:
        """The resident copy ``(numel,)`` of a parameter that this rank leads."""
        return self.copies.payload(self._place[name])

    # --- a step ----------------------------------------------------------------------------------

    def begin(self, names: Sequence[str], version: int) -> None:
        """The parameters in ``names`` (in the order of their updates) get ``version``; every rank
        of a rail calls this at the same point.
        """
        order = [self._place[name] for name in names if self._place[name] in self._led]
        self.publisher.expect(order, version)
        self.expected.update(dict.fromkeys(order, version))
        self._queue = [index for index in order if index in self._masters]
        self._updated.clear()

    def updated(self, name: str) -> None:
        """The master of an owned parameter has its new values: send it, and what waited for it."""
        place = self._place[name]
        if place not in self._masters:
            return  # a slice: every replica updates its own
        self._updated.add(place)
        while self._queue and self._queue[0] in self._updated:
            self._send(self._queue.pop(0))

    def _send(self, index: int) -> None:
        self.copies.payload(index).copy_(self._masters[index].master)
        self.publisher.publish(index)

    def end(self) -> None:
        """All updates of the step are done."""
        if self._queue:
            raise RuntimeError(
                f"{len(self._queue)} parameters were announced and not updated:"
                f" {self.publisher.names[self._queue[0]]} first"
            )
        self.publisher.finish_round()
        if self.synchronous:
            self.publisher.drain()

    def republish(self, version: int) -> None:
        """Masters were written from outside: send all of them.  Every rank calls this."""
        self.publisher.fence()
        self.begin(self._owned, version)
        for index in tuple(self._queue):
            self._send(index)
        self._queue.clear()
        self.end()

    # --- a gather --------------------------------------------------------------------------------

    def arrived(self, group: LayerGroup) -> bool:
        """Whether ``wait`` would return soon; never blocks. Says when to prefetch, not what may be
        read: a copy whose header has arrived may still lack the end of its payload.
        """
        return self.publisher.arrived(self._of_group[group.index], self.expected)

    def wait(self, group: LayerGroup) -> None:
        """Block until the copies that ``group`` gathers from hold exactly the expected updates."""
        self.publisher.wait(self._of_group[group.index], self.expected)

    def close(self) -> None:
        """Let everything in flight arrive."""
        self.publisher.drain()

    @property
    def waited_seconds(self) -> float:
        """Time that gathers have spent waiting for copies."""
        return self._waited_before + self.publisher.waited_seconds

    @property
    def resident_bytes(self) -> int:
        """Bytes of the leader copies, headers included."""
        return self.copies.resident_bytes


def sent_dtypes(groups: Sequence[LayerGroup]) -> dict[str, torch.dtype]:
    """Parameter -> the dtype that gathers and publishes carry it in."""
    return {p.name: group.sent_dtype for group in groups for p in group.parameters}


def _heaviest_copies(groups: Sequence[LayerGroup], plan: OwnershipPlan, mesh: Mesh) -> int:
    """Bytes of the copies of the rail that has most: all ranks make memory of one size."""
    sizes: list[dict[int, CopySize]] = [{} for _ in range(mesh.shards)]
    for group in groups:
        for parameter in group.parameters:
            if parameter.name in plan.homes:
                held = sizes[plan.homes[parameter.name].shard]
                numel = parameter.piece_numel(mesh.tp_rank)
                held[len(held)] = CopySize(numel, group.sent_dtype)
    return max(LeaderCopies.bytes_of(held) for held in sizes)


def rails(
    plan: OwnershipPlan, mesh: Mesh, sent: Mapping[str, torch.dtype], tile_bytes: int
) -> tuple[int, int]:
    """Parameters and publish tiles of the rail that has most of each; ``sent`` as ``sent_dtypes``
    says it.
    """
    counts = [[0, 0] for _ in range(mesh.shards)]
    for name, home in plan.homes.items():
        held = counts[home.shard]
        held[0] += 1
        nbytes = plan.parameter(name).piece_numel(mesh.tp_rank) * sent[name].itemsize
        held[1] += -(-nbytes // tile_bytes)
    return max(count for count, _ in counts), max(tiles for _, tiles in counts)
