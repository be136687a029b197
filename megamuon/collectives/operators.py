"""What the ready transport, reducer and publisher ask of a fabric, whichever memory it is over.

Owns the interfaces: ``Fabric``, its three kinds of operators, and the exchanges that precede their
making. Invariant: all ranks make the same operators. Tested through ``HostFabric``
(``tests/distributed/test_ready.py``) and ``DeviceFabric``
(``tests/distributed/test_device_fabric.py``).

| operator | over | moves |
|---|---|---|
| gather | the ranks of a replica, on one node or several | weights, inside the replica |
| reduce | all ranks, node by node | gradients, onto owners anywhere |
| share | the ranks of a rail | finished sums of what every replica keeps |
| publish | the ranks of a rail | new weights, from owners to leaders |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.agreement import Difference, compare
from megamuon.collectives.base import CollectiveError, GatherTable
from megamuon.collectives.operator_settings import Nodes, ReadySettings

if TYPE_CHECKING:
    from megamuon.collectives.two_stage import TwoStageTable

Value = TypeVar("Value")


class TableRefused(ValueError):  # noqa: N818  (what is wrong, like FileNotFound)
    """An operator cannot move what a table says, on any rank: the group goes another way."""


class CallOperator(Protocol):
    """An operator whose calls return tickets.

    After ``wait`` the result of a call may be read by what this rank does next: on a CPU when it
    has returned, on a GPU in the order of the current stream. All methods raise CollectiveError
    where the ranks have lost each other.
    """

    def done(self, ticket: int) -> bool:
        """Whether the result of a call is in place."""

    def wait(self, ticket: int) -> None:
        """See the class."""


class GatherOperator(CallOperator, Protocol):
    """AllGatherV in the pools."""

    def all_gather_table(
        self,
        *,
        nodes: Sequence[int],
        columns: Sequence[int],
        offsets: Sequence[int],
        nbytes: Sequence[int],
        name: str,
    ) -> int:
        """Freeze a table: segment j is of owner (nodes[j], columns[j]), in bytes; its number.
        Raises TableRefused.
        """

    def all_gather(self, table: int, base: int) -> int:
        """Start a gather of ``table`` at byte ``base`` of the pools; its ticket."""


class ReduceOperator(CallOperator, Protocol):
    """ReduceScatterV in the pools."""

    def reduce_scatter_table(
        self,
        *,
        nodes: Sequence[int],
        columns: Sequence[int],
        offsets: Sequence[int],
        numels: Sequence[int],
        windows: Sequence[int],
        slot_dtype: torch.dtype,
        wire_dtype: torch.dtype,
        window_dtype: torch.dtype,
        name: str,
    ) -> int:
        """Freeze a table, in elements; ``windows`` lie in the owners' memory; its number."""

    def reduce_scatter(
        self, table: int, base: int, window_base: int, *, first: bool, divisor: float
    ) -> int:
        """Start a reduction: store (``first``) or add sum / ``divisor``; its ticket."""


class PublishOperator(Protocol):
    """New weights down a rail, round by round; errors and ``publish_wait`` as in CallOperator."""

    def publish_parameters(
        self,
        *,
        nodes: Sequence[int],
        offsets: Sequence[int],
        nbytes: Sequence[int],
        names: Sequence[str],
    ) -> None:
        """Freeze the rail's list: owner node, place in every pool, size and name of each."""

    def publish_begin(self, order: Sequence[int], version: int) -> None:
        """Open a round in which the parameters of ``order`` get ``version``. What moves them may
        start when the last own one is handed over.
        """

    def publish_task(self, parameter: int) -> None:
        """An own parameter's copy is written: send it."""

    def publish_wait(self, parameters: Sequence[int], versions: Sequence[int]) -> None:
        """See the class: each of ``parameters`` has arrived in its version."""

    def publish_ready(self, parameters: Sequence[int], versions: Sequence[int]) -> bool:
        """Whether ``publish_wait`` would hold nobody up."""

    def publish_other(
        self, parameters: Sequence[int], versions: Sequence[int]
    ) -> tuple[int, int] | None:
        """After ``publish_wait``: place in ``parameters`` and version of the first copy that holds
        another version than it must; None if none does, or if that cannot be seen from here.
        """

    def publish_drain(self) -> None:
        """Return when this rank's sends and relays of the round are over."""

    def publish_round_done(self) -> bool:
        """Whether this rank's part of the round is over."""


class PoolMemory(Protocol):
    """Memory that lies at the same offsets on all ranks."""

    nbytes: int

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements at byte ``offset`` of this rank's memory, with a storage of their
        own.
        """

    def offset_of(self, tensor: Tensor) -> int | None:
        """Bytes from the start to the tensor's first element; None if it lies elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The operators of a rank; a grid of one replica has the first two."""

    gather: GatherOperator
    reduce: ReduceOperator
    share: GatherOperator | None = None
    publish: PublishOperator | None = None


@dataclass(frozen=True, kw_only=True)
class PooledGroup:
    """A layer group whose buffers lie in the open pool, at the same places on all ranks."""

    name: str  # for errors
    gather_table: GatherTable
    gather_itemsize: int  # bytes of an element that is gathered
    reduce_table: TwoStageTable
    window: int | None  # bytes from the start of the pool; None: reductions stay outside
    window_dtype: torch.dtype
    slot_dtypes: Iterable[torch.dtype] = ()  # of the slots that lie in the pool


class Fabric(Protocol):
    """The operators of a grid and the memory that they work in."""

    label: str  # "host", "nccl"
    settings: ReadySettings
    replicas: int
    shards: int
    replica: int
    shard: int
    nodes: Nodes
    group: dist.ProcessGroup | None  # the places, in order of replicas, then shards
    operators: Operators
    memory: PoolMemory | None  # of gathers and reductions, once it is open
    # Whether an operator that waits occupies the device: then nothing that synchronises the device
    # may come between its start and what it waits for, as first calls of libraries do.
    waits_on_device: bool

    @property
    def control_bytes(self) -> int:
        """Bytes of control words, rings and outboxes on each rank."""

    def describe(self) -> str:
        """What moves data how, for the line that is printed at the start."""

    def open(self, nbytes: int) -> PoolMemory:
        """Make the pool that gathers and reductions work in; a collective, once."""

    def open_copies(self, nbytes: int) -> PoolMemory:
        """Make the leaders' copies, the pool of the publish; a collective, once."""

    def upload_tables(self) -> None:
        """Bring the tables that have been frozen to where calls read them, all at once: a call
        that has to do it for a later table stops the device for it.
        """

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a tensor starts in the pool; None where it lies elsewhere, or there is no pool."""

    def check(self) -> None:
        """Raise CollectiveError if an operator has failed since it was last looked at."""

    def close(self) -> None:
        """Stop; a collective, because another rank may still need this one's relays."""


class Ticket:
    """A call under way; the ``wait`` and ``is_completed`` of torch's handles."""

    def __init__(self, operator: CallOperator, number: int) -> None:
        self._operator, self._number = operator, number

    def wait(self) -> None:
        """See CallOperator. Raises CollectiveError."""
        self._operator.wait(self._number)

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._operator.done(self._number)


def compare_settings(
    settings: Mapping[str, object], group: dist.ProcessGroup | None, what: str
) -> None:
    """Raise CollectiveError on all ranks of ``group`` where one has other ``settings`` than rank
    0.
    """

    def differ(found: Sequence[Difference]) -> CollectiveError:
        rank, name, first, value = found[0]
        return CollectiveError(
            f"{what}: {name} is {value} on rank {rank} of the group and {first} on its rank 0:"
            " start all ranks with the same flags"
        )

    compare(settings, group, differ)


def barrier(group: dist.ProcessGroup | None) -> None:
    """All ranks of ``group`` have come here. On the CPU, whatever the training device is."""
    if group is not None:
        dist.all_reduce(torch.zeros(1), group=group)
