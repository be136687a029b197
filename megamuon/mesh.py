"""The grid of ranks, and the process groups over it.

Owns the axes: ``replicas`` (the replicate axis: one node each), ``shards`` (the shard axis, inside
a replica) and ``tp`` (tensor parallelism, innermost); global rank = (replica * shards + shard) * tp
+ tp rank. Invariant: a Mesh is frozen and the same on every rank but for ``rank``, ``local_rank``
and ``device``; FSDP is one replica. Nothing outside this file reads the launcher's environment
variables. Tested by ``tests/test_mesh.py`` and ``tests/distributed/test_grid.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

# Axis -> the dims of a (replicas, shards, tp) array of ranks along which its groups run.
AXES = {"replicate": (0,), "shard": (1,), "data": (0, 1), "tp": (2,), "world": (0, 1, 2)}


class MeshError(ValueError):
    """The launcher's environment, or the grid that was asked for, is not usable."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Where this process stands."""

    world_size: int
    rank: int
    local_rank: int
    replicas: int  # replicas (HSDP); 1 is FSDP
    shards: int  # shard ranks of a replica
    tp: int = 1  # tensor-parallel ranks behind each shard rank
    device: torch.device
    backend: str  # of the process group, as torch.distributed names it

    def __post_init__(self) -> None:
        sizes = (self.replicas, self.shards, self.tp)
        if min(sizes) < 1 or math.prod(sizes) != self.world_size:
            raise MeshError(
                f"a grid of {self.replicas} replicas x {self.shards} shards x {self.tp}"
                f" tensor-parallel ranks does not hold {self.world_size} ranks"
            )
        if not 0 <= self.rank < self.world_size:
            raise MeshError(f"rank {self.rank} is outside a world of {self.world_size}")

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples."""
        return self.replicas * self.shards

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among them; the tensor-parallel ranks of a place share it."""
        return self.rank // self.tp

    @property
    def replica(self) -> int:
        """This rank's replica."""
        return self.data_parallel_rank // self.shards

    @property
    def shard(self) -> int:
        """This rank's shard."""
        return self.data_parallel_rank % self.shards

    @property
    def tp_rank(self) -> int:
        """This rank's place on the tensor-parallel axis."""
        return self.rank % self.tp

    @property
    def is_last(self) -> bool:
        """Whether this rank prints log lines and holds the writers."""
        return self.rank == self.world_size - 1

    def axis_ranks(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Global ranks of all groups along ``axis``, each in the order of the axis.

        ``shard``: a replica at a fixed tp rank; ``replicate``: a rail; ``data``: both together,
        rank by rank; ``tp``; ``world``: everybody, one group.
        """
        grid = np.arange(self.world_size).reshape(self.replicas, self.shards, self.tp)
        if axis not in AXES:
            raise MeshError(f"axis {axis!r}: choose one of {', '.join(AXES)}")
        moved = np.moveaxis(grid, AXES[axis], range(-len(AXES[axis]), 0))
        length = math.prod(grid.shape[place] for place in AXES[axis])
        return tuple(tuple(int(r) for r in group) for group in moved.reshape(-1, length))


def new_group(
    mesh: Mesh, axis: str, *, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup | None:
    """A fresh process group of this rank along ``axis``; None where it would be alone.

    A collective over all ranks, each of which makes the same calls in the same order. ``ranks``
    are the global ranks of the grid's places where the grid is not the whole world; they ascend,
    since torch numbers the members of a group so.  Raises MeshError where they do not.
    """
    if ranks is not None and list(ranks) != sorted(set(ranks)):
        raise MeshError(f"ranks {list(ranks)} of a grid must ascend")
    mine = None
    for members in mesh.axis_ranks(axis):
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
    try:
        dist.init_process_group(
            mesh.backend,
            init_method=init_method or "env://",
            rank=mesh.rank,
            world_size=mesh.world_size,
            timeout=timeout,
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        where = init_method or f"MASTER_PORT={os.environ['MASTER_PORT']}"
        raise MeshError(
            f"{where}: another program listens on this port of rank 0's machine; choose a free one "
            "(MASTER_PORT=, or torchrun's --master-port; on one machine --standalone finds one)"
        ) from error


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
