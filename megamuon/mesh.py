"""The mesh of ranks: named axes over one array, and the process groups along them.

Owns the axes (``placements.Axis``) and their order: global rank = (replica * shards + shard) * tp +
tp rank; context and expert parallelism divide the shard axis. Every group and every place on an
axis is an index expression over that array (``GROUPS``); nobody else computes with ranks.
Invariant: a Mesh is frozen and the same on every rank but for ``rank``, ``local_rank`` and
``device``; FSDP is one replica. Nothing outside this file reads the launcher's environment
variables. Tested by ``tests/test_mesh.py`` and ``tests/distributed/test_grid.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megamuon.placements import Axis
from megamuon.rendezvous import fresh_store

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

# Groups, and the axes of the array of ranks along which the members of one lie. ``sample`` is what
# context parallelism leaves of the shard axis, ``expert_shard`` what expert parallelism leaves.
GROUPS: dict[str, tuple[str, ...]] = {
    Axis.REPLICATE: (Axis.REPLICATE,),  # a rail: the ranks of one shard in all replicas
    Axis.SHARD: (Axis.SHARD,),  # a replica, at one tp rank
    Axis.EP: (Axis.EP,),  # ranks that have all experts between them
    "expert_shard": ("expert_shard",),  # ranks of a replica that have the same experts
    Axis.CP: (Axis.CP,),  # ranks that have one sample's positions between them
    Axis.TP: (Axis.TP,),
    "places": (Axis.REPLICATE, Axis.SHARD),  # what plans, owners and leaders count
    "samples": (Axis.REPLICATE, "sample"),  # what samplers, batch sizes, losses and means count
    "world": (Axis.REPLICATE, Axis.SHARD, Axis.TP),
}


class MeshError(ValueError):
    """The launcher's environment, or the grid that was asked for, is not usable."""


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the axes, outermost first, and the array of ranks that they index.

    ``cp`` and ``ep`` are the fastest inside the shard axis, each by itself: shard = sample * cp +
    cp rank, and shard = expert shard * ep + ep rank. Raises MeshError for sizes that do not fit.
    """

    replicas: int = 1  # of HSDP; 1 is FSDP
    shards: int = 1  # shard ranks of a replica, those of ep and cp among them
    ep: int = 1  # expert-parallel ranks
    cp: int = 1  # context-parallel ranks
    tp: int = 1  # tensor-parallel ranks behind each shard rank

    def __post_init__(self) -> None:
        for field in fields(MeshShape):
            if getattr(self, field.name) < 1:
                raise MeshError(
                    f"a mesh with {field.name} = {getattr(self, field.name)}: give 1 or more"
                )
        for axis in (Axis.EP, Axis.CP):
            if self.shards % getattr(self, axis):
                raise MeshError(
                    f"a mesh with {axis} = {getattr(self, axis)}: does not divide its"
                    f" {self.shards} shards"
                )

    @property
    def size(self) -> int:
        """All ranks."""
        return self.replicas * self.shards * self.tp

    @property
    def places(self) -> int:
        """Places (replica, shard): what plans, owners and leaders count. The ``tp`` ranks of one
        hold the pieces of what tensor parallelism cuts.
        """
        return self.replicas * self.shards

    @property
    def sample_ranks(self) -> int:
        """Ranks with samples of their own: what samplers, batch sizes, losses and means count. The
        context and tensor-parallel ranks of one see the same samples.
        """
        return self.places // self.cp

    @property
    def of_places(self) -> MeshShape:
        """The same mesh with one rank for each place."""
        return MeshShape(replicas=self.replicas, shards=self.shards, ep=self.ep, cp=self.cp)

    @cached_property
    def _views(self) -> tuple[dict[str, int], ...]:
        """The array of ranks as ordered lists of named axes, outermost first."""
        outer, inner = {Axis.REPLICATE: self.replicas}, {Axis.TP: self.tp}
        return (
            {**outer, Axis.SHARD: self.shards, **inner},
            {**outer, "sample": self.shards // self.cp, Axis.CP: self.cp, **inner},
            {**outer, "expert_shard": self.shards // self.ep, Axis.EP: self.ep, **inner},
        )

    def groups_along(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Ranks of all groups of ``GROUPS[name]``, each in the order of its axes.

        Raises MeshError for a name that is not there.
        """
        view, along = self._view(name)
        ranks = np.arange(self.size).reshape(tuple(view.values()))
        length = math.prod(ranks.shape[axis] for axis in along)
        moved = np.moveaxis(ranks, along, range(-len(along), 0)).reshape(-1, length)
        return tuple(tuple(group) for group in moved.tolist())

    def group_of(self, name: str, rank: int) -> tuple[int, ...]:
        """The one among ``groups_along(name)`` that ``rank`` is in."""
        return next(group for group in self.groups_along(name) if rank in group)

    def index_of(self, name: str, rank: int) -> int:
        """Where in its group along ``name`` ``rank`` is."""
        view, along = self._view(name)
        at, sizes = np.unravel_index(rank, tuple(view.values())), tuple(view.values())
        return int(
            np.ravel_multi_index([at[axis] for axis in along], [sizes[axis] for axis in along])
        )

    def _view(self, name: str) -> tuple[dict[str, int], list[int]]:
        """The view that has all axes of a group, and where they are in it."""
        if name not in GROUPS:
            raise MeshError(f"axis {name!r}: choose one of {', '.join(GROUPS)}")
        wanted = GROUPS[name]
        view = next(view for view in self._views if view.keys() >= set(wanted))
        return view, [list(view).index(axis) for axis in wanted]


@dataclass(frozen=True, kw_only=True)
class Mesh(MeshShape):
    """Where this process stands in a mesh."""

    world_size: int
    rank: int
    local_rank: int
    device: torch.device
    backend: str  # of the process group, as torch.distributed names it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size != self.world_size:
            raise MeshError(
                f"a grid of {self.replicas} replicas x {self.shards} shards x {self.tp}"
                f" tensor-parallel ranks does not hold {self.world_size} ranks"
            )
        if not 0 <= self.rank < self.world_size:
            raise MeshError(f"rank {self.rank} is outside a world of {self.world_size}")
        for axis, word in ((Axis.EP, "expert"), (Axis.CP, "context")):
            if getattr(self, axis) > 1:
                raise MeshError(
                    f"a mesh with {axis} = {getattr(self, axis)}: {word} parallelism is not in this"
                    " version, leave it at 1"
                )

    @cached_property
    def replica(self) -> int:
        """This rank's replica."""
        return self.index_of(Axis.REPLICATE, self.rank)

    @cached_property
    def shard(self) -> int:
        """This rank's shard."""
        return self.index_of(Axis.SHARD, self.rank)

    @cached_property
    def place(self) -> int:
        """This rank's place among ``places``; its tensor-parallel partners share it."""
        return self.index_of("places", self.rank)

    @cached_property
    def sample_rank(self) -> int:
        """This rank's place among ``sample_ranks``; those that see the same samples share it."""
        return self.index_of("samples", self.rank)

    @cached_property
    def tp_rank(self) -> int:
        """This rank's place on the tensor-parallel axis."""
        return self.index_of(Axis.TP, self.rank)

    @property
    def speaks(self) -> bool:
        """Whether this rank counts its samples' losses, for all ranks that see the same samples."""
        return self.tp_rank == 0 and self.index_of(Axis.CP, self.rank) == 0

    @property
    def sizes(self) -> dict[Axis, int]:
        """Ranks on each axis."""
        return {Axis.REPLICATE: self.replicas, Axis.SHARD: self.shards, Axis.TP: self.tp}

    @property
    def coordinates(self) -> dict[Axis, int]:
        """This rank's coordinate on each axis."""
        return {Axis.REPLICATE: self.replica, Axis.SHARD: self.shard, Axis.TP: self.tp_rank}

    @property
    def is_last(self) -> bool:
        """Whether this rank prints log lines and holds the writers."""
        return self.rank == self.world_size - 1


def new_group(
    mesh: Mesh, axis: str, *, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup | None:
    """A fresh process group of this rank along ``axis``, one of ``GROUPS``; None where it would be
    alone.

    A collective over all ranks, each of which makes the same calls in the same order. ``ranks``
    are the global ranks of the grid's places where the grid is not the whole world; they ascend,
    since torch numbers the members of a group so.  Raises MeshError where they do not.
    """
    if ranks is not None and list(ranks) != sorted(set(ranks)):
        raise MeshError(f"ranks {list(ranks)} of a grid must ascend")
    mine = None
    for members in mesh.groups_along(axis):
        if len(members) == 1:
            continue
        named = [members[i] if ranks is None else ranks[members[i]] for i in range(len(members))]
        group = dist.new_group(named)
        if mesh.rank in members:
            mine = group
    return mine


def mesh_from_environment(
    *,
    replicas: int = 1,
    tp: int = 1,
    device: str | None = None,
    environment: Mapping[str, str] | None = None,
    gpus: int | None = None,
) -> Mesh:
    """The mesh that torchrun describes by RANK, WORLD_SIZE and LOCAL_RANK; without them, a world of
    one.

    ``device`` is "cpu", "cuda" or None (CUDA where there is any). ``environment`` and ``gpus``
    replace ``os.environ`` and the device count in tests. Raises MeshError naming the variable and
    its value.
    """
    source = os.environ if environment is None else environment
    missing = [name for name in LAUNCHER_VARIABLES if name not in source]
    if not missing:
        rank, world_size, local_rank = (_integer(source, name) for name in LAUNCHER_VARIABLES)
    elif "RANK" in source or "WORLD_SIZE" in source:
        raise MeshError(
            f"{' and '.join(missing)} not set although "
            f"{' and '.join(n for n in LAUNCHER_VARIABLES if n in source)} is: "
            f"start with torchrun, or set all of {', '.join(LAUNCHER_VARIABLES)}"
        )
    else:
        rank, world_size, local_rank = 0, 1, 0
    if replicas < 1 or tp < 1 or world_size % (replicas * tp):
        raise MeshError(
            f"{world_size} ranks do not divide into {replicas} replicas of {tp} tensor-parallel"
            " ranks each"
        )
    count = torch.cuda.device_count() if gpus is None else gpus
    kind = device or ("cuda" if count else "cpu")
    if kind not in ("cpu", "cuda"):
        raise MeshError(f"device {kind!r} is neither 'cpu' nor 'cuda'")
    if kind == "cuda" and not count:
        raise MeshError(
            "this node has no GPU that torch can use, and --distributed-backend nccl needs one: "
            "drop the flag to run on the CPU"
        )
    if kind == "cuda" and local_rank >= count:
        raise MeshError(
            f"LOCAL_RANK={local_rank}, but this node has {count} usable GPUs: "
            "start at most one rank per GPU"
        )
    return Mesh(
        world_size=world_size,
        rank=rank,
        local_rank=local_rank,
        replicas=replicas,
        shards=world_size // (replicas * tp),
        tp=tp,
        device=torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu"),
        # Both on GPUs: objects and digests travel as CPU tensors.
        backend="cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
    )


def local_world_size(environment: Mapping[str, str] | None = None) -> int | None:
    """Ranks that the launcher started on this node; None where it does not say.

    Raises MeshError for a LOCAL_WORLD_SIZE that is no number of ranks.
    """
    source = os.environ if environment is None else environment
    if "LOCAL_WORLD_SIZE" not in source:
        return None
    size = _integer(source, "LOCAL_WORLD_SIZE")
    if size < 1:
        raise MeshError(f"LOCAL_WORLD_SIZE={size}: a node has at least the rank that reads this")
    return size


def launched_local_rank(environment: Mapping[str, str] | None = None) -> int | None:
    """This process's number on its node; None where the launcher does not say.

    Raises MeshError for a LOCAL_RANK that is no number.
    """
    source = os.environ if environment is None else environment
    return _integer(source, "LOCAL_RANK") if "LOCAL_RANK" in source else None


def launched_as(environment: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """What the launcher calls this rank, for messages, and whether it is the first on its node.

    Raises nothing, so that what is wrong with the variables can be said.
    """
    source = os.environ if environment is None else environment
    return source.get("RANK", "0"), source.get("LOCAL_RANK", "0") == "0"


def launcher_keeps_store() -> bool:
    """Whether the ranks meet in a store of the launcher's, which outlives them (torchrun's)."""
    return bool(os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))


def initialise(
    mesh: Mesh, *, timeout_minutes: float = 10.0, init_method: str | None = None
) -> None:
    """Create the default process group, and select the device.

    ``init_method`` is a rendezvous URL (``file:///path`` or ``tcp://host:port``); None takes the
    launcher's MASTER_ADDR and MASTER_PORT, and a world of one needs neither. A collective that
    waits longer than the timeout raises instead of hanging. Raises MeshError if a group exists
    already.
    """
    if dist.is_initialized():
        raise MeshError("a default process group exists already: call destroy() first")
    if mesh.device.type == "cuda":
        torch.cuda.set_device(mesh.device)
    timeout = timedelta(minutes=timeout_minutes)
    if mesh.world_size == 1 and init_method is None:
        store = dist.HashStore()  # no rendezvous, so no port that could be taken
        dist.init_process_group(mesh.backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if init_method is None and missing:
        raise MeshError(
            f"{' and '.join(missing)} not set: "
            f"start {mesh.world_size} ranks with torchrun, or give a rendezvous URL"
        )
    where: dict[str, Any] = {"init_method": init_method or "env://"}
    try:
        if init_method is None and launcher_keeps_store():
            where = {"store": _launchers_store(mesh, timeout)}
        dist.init_process_group(
            mesh.backend, rank=mesh.rank, world_size=mesh.world_size, timeout=timeout, **where
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        place = init_method or f"MASTER_PORT={os.environ['MASTER_PORT']}"
        raise MeshError(
            f"{place}: another program listens on this port of rank 0's machine; choose a free one "
            "(MASTER_PORT=, or torchrun's --master-port; on one machine --standalone finds one)"
        ) from error


def _launchers_store(mesh: Mesh, timeout: timedelta) -> dist.Store:
    """The launcher's store under a prefix of this start of the ranks: see ``rendezvous.py``."""
    host, port = os.environ["MASTER_ADDR"], _integer(os.environ, "MASTER_PORT")
    store = dist.TCPStore(host, port, mesh.world_size, is_master=False, timeout=timeout)
    seconds = timeout.total_seconds()
    return fresh_store(store, mesh.rank, mesh.world_size, timeout_seconds=seconds)


def backend_reason(error: BaseException) -> str:
    """A backend's message in one line, without its source position and advice."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"\[\S*/\S*:\d+\] ", "", text)
    return re.split(r"\.? This is typically", text)[0][:300]


def destroy() -> None:
    """Destroy the default process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _integer(source: Mapping[str, str], name: str) -> int:
    try:
        value = int(source[name])
    except ValueError:
        raise MeshError(f"{name}={source[name]!r} is not an integer") from None
    if value < 0:
        raise MeshError(f"{name}={value} is negative")
    return value
