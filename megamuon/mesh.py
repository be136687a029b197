"""The grid of ranks, and the process group under it.

Owns the axes: ``rows`` (replicas, one node each) and ``columns`` (shards inside a row); global rank
= row * columns + column. Invariant: a Mesh is frozen and the same on every rank but for ``rank``,
``local_rank`` and ``device``; FSDP is one row. Nothing outside this file reads the launcher's
environment variables. Tested by ``tests/test_mesh.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class MeshError(ValueError):
    """The launcher's environment, or the grid that was asked for, is not usable."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Where this process stands."""

    world_size: int
    rank: int
    local_rank: int
    rows: int  # replicas (HSDP); 1 is FSDP
    columns: int  # shard ranks of a row
    device: torch.device
    backend: str  # of the process group, as torch.distributed names it

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1 or self.rows * self.columns != self.world_size:
            raise MeshError(
                f"a grid of {self.rows} rows x {self.columns} columns "
                f"does not hold {self.world_size} ranks"
            )
        if not 0 <= self.rank < self.world_size:
            raise MeshError(f"rank {self.rank} is outside a world of {self.world_size}")

    @property
    def row(self) -> int:
        """This rank's replica."""
        return self.rank // self.columns

    @property
    def column(self) -> int:
        """This rank's shard."""
        return self.rank % self.columns

    @property
    def is_last(self) -> bool:
        """Whether this rank prints log lines and holds the writers."""
        return self.rank == self.world_size - 1

    def row_ranks(self, row: int) -> tuple[int, ...]:
        """Global ranks of one replica, by column."""
        return tuple(range(row * self.columns, (row + 1) * self.columns))

    def column_ranks(self, column: int) -> tuple[int, ...]:
        """Global ranks that hold the same shard, by row."""
        return tuple(range(column, self.world_size, self.columns))


def mesh_from_environment(
    *,
    rows: int = 1,
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
    if rows < 1 or world_size % rows:
        raise MeshError(f"{world_size} ranks do not divide into {rows} rows (replicas)")
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
        rows=rows,
        columns=world_size // rows,
        device=torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu"),
        # Both on GPUs: objects and digests travel as CPU tensors.
        backend="cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
    )


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
    dist.init_process_group(
        mesh.backend,
        init_method=init_method or "env://",
        rank=mesh.rank,
        world_size=mesh.world_size,
        timeout=timeout,
    )


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
