"""The operators of one rank on the host fabric: gathers, reductions and publishes as data is ready.

Owns the engine of this rank, the operators over its grid, and where their pools are. A grid is R
rows (nodes, declared by the shard size) x K columns of data-parallel ranks that share one machine's
memory. Invariants: all ranks make the same operators at the same places of control memory; a pool
is opened between two steps, by all ranks alike. Tested by ``tests/distributed/test_ready.py``.

| operator | over | moves |
|---|---|---|
| gather | the ranks of a row, as one node | weights, inside the row |
| reduce | all ranks, R nodes of K columns | gradients, onto owners anywhere |
| share | the ranks of a column | finished sums of what every row keeps |
| publish | the ranks of a column | new weights, from owners to leaders |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.host_engine import HostEngine, HostOperator
from megamuon.collectives.host_library import OperatorConfig, library
from megamuon.collectives.symmetric import SymmetricMemory
from megamuon.mesh import Mesh

STAR_BYTES = 2 << 20  # per node; messages up to that size take one hop (DMuon-2, appendix C.2)
CONTROL_ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class ReadySettings:
    """How the operators cut and pace what they move; equal on all ranks."""

    slots: int = 8  # of a queue's ring
    chunk_bytes: int = 64 * 1024
    tile_bytes: int = 512 * 1024  # of a publish
    deadline: float = 600.0  # seconds that an operator may stand still
    star_bytes: int = STAR_BYTES


class Ticket:
    """A call under way; the ``wait`` and ``is_completed`` of torch's handles."""

    def __init__(self, operator: HostOperator, number: int) -> None:
        self._operator, self._number = operator, number

    def wait(self) -> None:
        """Block until this rank's part is over. Raises CollectiveError."""
        self._operator.wait(self._number)

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._operator.done(self._number)


class ReadyFabric:
    """Engine and operators of a grid. Making it is collective over ``group``.

    ``group`` holds the data-parallel ranks of one tensor-parallel rank, in order of rows, then
    columns (None: a world of one). ``rails``: parameters and tiles of the column that has most, for
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
    ) -> None:
        SymmetricMemory(group, CONTROL_ALIGNMENT, label="probe").close()  # all ranks can, or none
        self.group = group
        self.settings = settings = settings or ReadySettings()
        compare(
            {"rows": mesh.rows, "columns": mesh.columns, "rails": rails, **vars(settings)},
            group,
            "the fabric",
        )
        self.rows, self.columns = mesh.rows, mesh.columns
        self.row, self.column = mesh.row, mesh.column
        self._row_ranks = tuple(mesh.row * mesh.columns + k for k in range(mesh.columns))
        self._column_ranks = tuple(r * mesh.columns + mesh.column for r in range(mesh.rows))
        configs = self._configs(rails)
        end = _aligned(library().engine_control_bytes())
        placed: dict[str, OperatorConfig] = {}
        for name, config in configs.items():
            placed[name] = replace(config, control_offset=end)
            end += _aligned(library().operator_control_bytes(placed[name]))
        self._control = SymmetricMemory(group, end, label="control")
        rank = self._control.rank
        if rank != mesh.data_parallel_rank:
            raise CollectiveError(
                f"rank {rank} of the group is place {mesh.data_parallel_rank} of the grid"
            )
        self.engine = HostEngine(
            rank=rank,
            control=self._control.bases,
            pids=self._control.pids,
            deadline=settings.deadline,
            keep=self._control.mapped,
        )
        self.operators = {
            name: self.engine.operator(config, name) for name, config in placed.items()
        }
        self.memory: SymmetricMemory | None = None
        barrier(group)  # nobody calls before everybody has made the operators

    def _configs(self, rails: tuple[int, int]) -> dict[str, OperatorConfig]:
        settings, everybody = self.settings, tuple(range(self.rows * self.columns))
        common = OperatorConfig(
            kind="all_gather",
            nodes=1,
            columns=self.columns,
            ranks=self._row_ranks,
            control_offset=0,
            slots=settings.slots,
            chunk_bytes=settings.chunk_bytes,
            star_bytes=settings.star_bytes // self.columns,
        )
        configs = {
            "gather": common,
            "reduce": replace(
                common,
                kind="reduce_scatter",
                nodes=self.rows,
                ranks=everybody,
            ),
        }
        if self.rows > 1:
            column = replace(
                common,
                nodes=self.rows,
                columns=1,
                ranks=self._column_ranks,
                star_bytes=settings.star_bytes,
            )
            configs["share"] = column
            if rails[0]:
                configs["publish"] = replace(
                    column,
                    kind="publish",
                    parameters=rails[0],
                    tiles=rails[1],
                    tile_bytes=settings.tile_bytes,
                )
        return configs

    # --- pools -----------------------------------------------------------------------------------

    def open(self, nbytes: int) -> SymmetricMemory:
        """Make the pool that gathers and reductions work in; a collective, once."""
        if self.memory is not None:
            raise CollectiveError("the symmetric pool is open already")
        memory = SymmetricMemory(self.group, nbytes, label="pool")
        for name, ranks in (
            ("gather", self._row_ranks),
            ("reduce", range(self.rows * self.columns)),
            ("share", self._column_ranks),
        ):
            if name in self.operators:
                self._set_pool(name, memory, ranks)
        self.memory = memory
        barrier(self.group)
        return memory

    def open_copies(self, nbytes: int) -> SymmetricMemory:
        """Make the leaders' copies, the pool of the publish; a collective, once."""
        memory = SymmetricMemory(self.group, nbytes, label="copies")
        self._set_pool("publish", memory, self._column_ranks)
        barrier(self.group)
        return memory

    def _set_pool(self, name: str, memory: SymmetricMemory, ranks: Sequence[int]) -> None:
        self.operators[name].set_pool([memory.bases[rank] for rank in ranks], keep=memory.mapped)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a tensor starts in the pool; None where it lies elsewhere, or there is no pool."""
        return None if self.memory is None else self.memory.offset_of(tensor)

    # --- end -------------------------------------------------------------------------------------

    @property
    def control_bytes(self) -> int:
        """Bytes of control words, rings and outboxes on each rank."""
        return self._control.nbytes

    def close(self) -> None:
        """Stop the engine; a collective, because another rank may still need this one's relays.

        After a failure nobody does, and it returns at once.
        """
        if not self.operators:
            return
        self.operators = {}
        try:
            if not self.engine.failed():
                barrier(self.group)
        finally:
            self.engine.close()
            self._control.close()
            if self.memory is not None:
                self.memory.close()


def compare(facts: Mapping[str, object], group: dist.ProcessGroup | None, what: str) -> None:
    """Raise CollectiveError on all ranks of ``group`` where one has other ``facts`` than rank 0."""
    if group is None:
        return
    everyone: list[dict[str, object]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(facts), group=group)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0].get(name):
                raise CollectiveError(
                    f"{what}: {name} is {value} on rank {rank} of the group and"
                    f" {everyone[0].get(name)} on its rank 0: start all ranks with the same flags"
                )


def barrier(group: dist.ProcessGroup | None) -> None:
    """All ranks of ``group`` have come here. On the CPU, whatever the training device is."""
    if group is not None:
        dist.all_reduce(torch.zeros(1), group=group)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // CONTROL_ALIGNMENT) * CONTROL_ALIGNMENT
