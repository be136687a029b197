"""The operators of one rank over shared memory: gathers, reductions and publishes on CPU ranks.

Owns the engine of this rank, the operators over its grid, and where their pools are. The ranks of
the grid share one machine's memory; its nodes are declared by the shard size. Invariants: all ranks
make the same operators at the same places of control memory; a pool is opened between two steps, by
all ranks alike. Tested by ``tests/distributed/test_ready.py``.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.host_engine import HostEngine, HostOperator
from megamuon.collectives.host_library import library
from megamuon.collectives.operator_settings import (
    CONTROL_ALIGNMENT,
    Nodes,
    OperatorConfig,
    ReadySettings,
    aligned,
    operator_configs,
)
from megamuon.collectives.operators import Operators, barrier, compare_settings
from megamuon.collectives.symmetric import SymmetricMemory
from megamuon.mesh import Mesh

MIB = 1 << 20


class HostFabric:
    """Engine and operators of a grid. Making it is collective over ``group``.

    ``group`` holds the places of one tensor-parallel rank, in order of replicas, then
    shards (None: a world of one). ``rails``: parameters and tiles of the rail that has most, for
    the publish; (0, 0) where there is none. Raises SymmetricMemoryUnavailable where the ranks
    cannot share memory.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        settings: ReadySettings | None = None,
        *,
        rails: tuple[int, int] = (0, 0),
        node_size: int | None = None,
    ) -> None:
        """``node_size``: cut the replicas into nodes of so many ranks, as a cluster would; by
        itself a replica is one node, since all its ranks share memory.
        """
        SymmetricMemory(group, CONTROL_ALIGNMENT, label="probe").close()  # all ranks can, or none
        self.group = group
        self.label = "host"
        self.waits_on_device = False
        self.settings = settings = settings or ReadySettings()
        self.nodes = Nodes(shards=mesh.shards, size=node_size or mesh.shards)
        compare_settings(
            {
                "node size": self.nodes.size,
                "replicas": mesh.replicas,
                "shards": mesh.shards,
                "rails": rails,
                **vars(settings),
            },
            group,
            "the fabric",
        )
        self.replicas, self.shards = mesh.replicas, mesh.shards
        self.replica, self.shard = mesh.replica, mesh.shard
        self._configs = configs = operator_configs(mesh, self.nodes, settings, rails)
        end = aligned(library().engine_control_bytes())
        placed: dict[str, OperatorConfig] = {}
        for name, config in configs.items():
            placed[name] = replace(config, control_offset=end)
            end += aligned(library().operator_control_bytes(placed[name]))
        self._control = SymmetricMemory(group, end, label="control")
        rank = self._control.rank
        if rank != mesh.place:
            raise CollectiveError(f"rank {rank} of the group is place {mesh.place} of the grid")
        self.engine = HostEngine(
            rank=rank,
            control=self._control.bases,
            pids=self._control.pids,
            deadline=settings.deadline,
            keep=self._control.mapped,
        )
        self._operators: dict[str, HostOperator] = {
            name: self.engine.operator(config, name) for name, config in placed.items()
        }
        self.operators = Operators(**self._operators)
        self.memory: SymmetricMemory | None = None
        barrier(group)  # nobody calls before everybody has made the operators

    # --- pools -----------------------------------------------------------------------------------

    def open(self, nbytes: int) -> SymmetricMemory:
        """Make the pool that gathers and reductions work in; a collective, once."""
        if self.memory is not None:
            raise CollectiveError("the symmetric pool is open already")
        memory = SymmetricMemory(self.group, nbytes, label="pool")
        for name in self._operators:
            if name != "publish":
                self._set_pool(name, memory)
        self.memory = memory
        barrier(self.group)
        return memory

    def upload_tables(self) -> None:
        """See Fabric.upload_tables. Here calls read them where they were made."""

    def open_copies(self, nbytes: int) -> SymmetricMemory:
        """Make the leaders' copies, the pool of the publish; a collective, once."""
        memory = SymmetricMemory(self.group, nbytes, label="copies")
        self._set_pool("publish", memory)
        barrier(self.group)
        return memory

    def _set_pool(self, name: str, memory: SymmetricMemory) -> None:
        ranks = self._configs[name].ranks
        self._operators[name].set_pool([memory.bases[rank] for rank in ranks], keep=memory.mapped)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a tensor starts in the pool; None where it lies elsewhere, or there is no pool."""
        return None if self.memory is None else self.memory.offset_of(tensor)

    def check(self) -> None:
        """See Fabric.check: every call and every wait has looked already."""

    def describe(self) -> str:
        """See Fabric.describe."""
        settings = self.settings
        return (
            f"{self.replicas * self.nodes.per_replica} nodes x {self.nodes.size} ranks in shared"
            f" memory; {settings.slots} slots of {settings.chunk_bytes // 1024} KiB a queue,"
            f" {self.control_bytes / MIB:.1f} MiB of control memory a rank"
        )

    # --- end -------------------------------------------------------------------------------------

    @property
    def control_bytes(self) -> int:
        """Bytes of control words, rings and outboxes on each rank."""
        return self._control.nbytes

    def close(self) -> None:
        """Stop the engine; a collective, because another rank may still need this one's relays.

        After a failure nobody does, and it returns at once.
        """
        if not self._operators:
            return
        self._operators = {}
        try:
            if not self.engine.failed():
                barrier(self.group)
        finally:
            self.engine.close()
            self._control.close()
            if self.memory is not None:
                self.memory.close()
