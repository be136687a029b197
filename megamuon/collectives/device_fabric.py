"""The operators of one rank over GPUs, by NCCL's device interface.

Owns the communicators of this rank, one per operator, because the operators run over different
ranks of the grid (a replica, all, a rail), and the two pools: gathers, reductions and shares work
in one, the publish in the other. Invariants: all ranks have every communicator, or none has any;
only gathers use the switch: it adds in an order of its own, and reductions keep the bits of the
other transports. Tested on CPU ranks by ``tests/distributed/test_device_fabric.py`` over a stand-in
for the device library; it has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.agreement import gather_objects
from megamuon.collectives.base import CollectiveError
from megamuon.collectives.device_engine import BLOCKS, DeviceEngine
from megamuon.collectives.device_library import DeviceLibrary
from megamuon.collectives.device_operator import KINDS, DeviceOperator
from megamuon.collectives.device_streams import Streams
from megamuon.collectives.operator_settings import (
    Nodes,
    ReadySettings,
    aligned,
    operator_configs,
)
from megamuon.collectives.operators import Operators, barrier, compare_settings
from megamuon.mesh import Mesh

MIB = 1 << 20
POOL_OWNER = "reduce"  # its communicator has all ranks, and it alone always exists with several


class DeviceMemory:
    """This rank's part of a pool; see operators.PoolMemory."""

    def __init__(self, address: int, nbytes: int, streams: Streams) -> None:
        self.address, self.nbytes, self._streams = address, nbytes, streams

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """See PoolMemory. Raises ValueError for what does not fit or is not aligned."""
        end = offset + numel * dtype.itemsize
        if offset < 0 or numel < 0 or end > self.nbytes or offset % dtype.itemsize:
            raise ValueError(
                f"pool: {numel} x {dtype} at byte {offset} does not fit in {self.nbytes} bytes, or "
                f"is not aligned to {dtype.itemsize}"
            )
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self._streams.device)
        return self._streams.memory(self.address + offset, end - offset).view(dtype)

    def offset_of(self, tensor: Tensor) -> int | None:
        """See PoolMemory."""
        if tensor.device.type != self._streams.device.type or tensor.numel() == 0:
            return None
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.nbytes else None


class DeviceFabric:
    """Communicators and operators of a grid; see operators.Fabric. Making it is collective over
    ``group``.

    ``group``, ``rails``: see HostFabric. ``library`` is loaded on all ranks. ``node_size``: ranks
    of a replica that address each other's memory (by itself all of them); a longer replica is cut
    into nodes. Raises CollectiveError, on all ranks alike, where one cannot have a communicator.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        settings: ReadySettings,
        *,
        rails: tuple[int, int],
        library: DeviceLibrary,
        streams: Streams,
        node_size: int | None = None,
    ) -> None:
        self.label = "nccl"
        self.waits_on_device = True
        self.group, self.settings = group, settings
        self.replicas, self.shards = mesh.replicas, mesh.shards
        self.replica, self.shard = mesh.replica, mesh.shard
        self.memory: DeviceMemory | None = None
        self._streams = streams
        self.nodes = Nodes(shards=mesh.shards, size=node_size or mesh.shards)
        self._configs = operator_configs(mesh, self.nodes, settings, rails, groups=BLOCKS)
        compare_settings(
            {
                "node size": self.nodes.size,
                "replicas": mesh.replicas,
                "shards": mesh.shards,
                "rails": rails,
                "NCCL": library.call.mmd_compiled_nccl(),
                **vars(settings),
            },
            group,
            "the fabric",
        )
        ids = self._exchange_ids(library, mesh.place)
        self._engines: dict[str, DeviceEngine] = {}
        self._together(lambda: self._connect(library, ids, mesh.place))
        self._operators: dict[str, DeviceOperator] = {
            name: KINDS[self._configs[name].kind](engine, name, streams)
            for name, engine in self._engines.items()
        }
        self.operators = Operators(**self._operators)

    def _exchange_ids(self, library: DeviceLibrary, rank: int) -> dict[str, bytes]:
        """The identifier of each communicator of this rank, from the first of its ranks."""
        made: dict[str, bytes] = {}
        self._together(
            lambda: made.update(
                {
                    name: DeviceEngine.unique_id(library)
                    for name, config in self._configs.items()
                    if config.ranks[0] == rank
                }
            )
        )
        everyone = gather_objects(made, self.group)
        return {name: everyone[config.ranks[0]][name] for name, config in self._configs.items()}

    def _connect(self, library: DeviceLibrary, ids: dict[str, bytes], rank: int) -> None:
        device = self._streams.device.index or 0
        # The pool's owner first: what a run leaves open at its end is destroyed from the last on.
        for name in sorted(self._configs, key=lambda name: name != POOL_OWNER):
            config = self._configs[name]
            self._engines[name] = DeviceEngine(
                library,
                ids[name],
                rank=config.ranks.index(rank),
                nodes=config.nodes,
                columns=config.columns,
                device=device,
                multimem=name == "gather",
                deadline=self.settings.deadline,
            )

    def _together(self, work: Callable[[], None]) -> None:
        """Do ``work`` on all ranks; where it fails on one, give up on all, with one error."""
        text = ""
        try:
            work()
        except CollectiveError as error:
            text = str(error)
        failed = [(r, said) for r, said in enumerate(gather_objects(text, self.group)) if said]
        if failed:
            self._close_engines()
            raise CollectiveError("\n".join(f"rank {rank}: {said}" for rank, said in failed))

    # --- pools -----------------------------------------------------------------------------------

    def open(self, nbytes: int) -> DeviceMemory:
        """See Fabric.open. NCCL allocates the pool, so torch gives back first what the steps before
        have left in its cache.
        """
        if self.memory is not None:
            raise CollectiveError("the symmetric pool is open already")
        self._streams.release_cache()
        opened: list[int] = []

        def windows() -> None:
            owner = self._engines[POOL_OWNER]
            opened.append(owner.open(self._control(POOL_OWNER), nbytes))
            for name, engine in self._engines.items():
                if name not in (POOL_OWNER, "publish"):
                    engine.open(self._control(name), nbytes, owner)
                if name != "publish":
                    self._operators[name].attach(self._configs[name])

        self._together(windows)
        self.memory = DeviceMemory(opened[0], nbytes, self._streams)
        return self.memory

    def open_copies(self, nbytes: int) -> DeviceMemory:
        """See Fabric.open_copies."""
        self._streams.release_cache()
        opened: list[int] = []

        def window() -> None:
            opened.append(self._engines["publish"].open(self._control("publish"), nbytes))
            self._operators["publish"].attach(self._configs["publish"])

        self._together(window)
        return DeviceMemory(opened[0], nbytes, self._streams)

    def upload_tables(self) -> None:
        """See Fabric.upload_tables."""
        for operator in self._operators.values():
            operator.upload()

    def _control(self, name: str) -> int:
        return aligned(self._engines[name].control_bytes(self._configs[name]))

    def offset_of(self, tensor: Tensor) -> int | None:
        """See Fabric.offset_of."""
        return None if self.memory is None else self.memory.offset_of(tensor)

    # --- reports and end -------------------------------------------------------------------------

    @property
    def control_bytes(self) -> int:
        """See Fabric.control_bytes."""
        return sum(self._control(name) for name in self._engines)

    def describe(self) -> str:
        """See Fabric.describe."""
        engine = self._engines["gather"]
        settings, direct = self.settings, self._engines[POOL_OWNER].capability().direct
        return (
            f"{self.replicas * self.nodes.per_replica} nodes x {self.nodes.size} GPUs, gathers by"
            f" {'multicast stores' if engine.multimem else 'a store for each GPU'}, nodes"
            f" {'in one NVLink domain' if direct else 'over the network'}; {settings.slots} slots"
            f" of {settings.chunk_bytes // 1024} KiB a queue, {self.control_bytes / MIB:.1f} MiB of"
            " control memory a rank"
        )

    def check(self) -> None:
        """See Fabric.check. A kernel that gives up ends without a word to the host."""
        for engine in self._engines.values():
            engine.check()

    def close(self) -> None:
        """See Fabric.close. Tensors over the pool must not be read any more. Waits no longer than
        an operator may stand still.
        """
        if not self._engines:
            return
        self._operators = {}
        try:
            failed = any(engine.error() for engine in self._engines.values())
            if failed or not self._streams.over_within(self.settings.deadline):
                for engine in self._engines.values():  # they may wait for each other
                    engine.abort()
            else:
                barrier(self.group)
        finally:
            self._close_engines()

    def _close_engines(self) -> None:
        for name in sorted(self._engines, key=lambda name: name == POOL_OWNER):
            self._engines[name].close()  # those that share a pool before its owner
        self._engines = {}
