"""Construction of the ``ready`` transport over a fabric, or grouped calls where there is none.

Owns the choice of a fabric and what is said about it. Invariants: all ranks choose alike, because a
fabric is made by all of them together or by none; a fabric that was asked for by name is had or
refused, and only an automatic choice falls back to grouped calls, saying why. Tested by
``tests/collectives/test_fabric_choice.py``, ``tests/distributed/test_ready_training.py`` and
``tests/distributed/test_ready_failures.py``.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from megamuon.agreement import gather_objects
from megamuon.collectives.base import CollectiveError, Transport, TransportSettings
from megamuon.collectives.device_fabric import DeviceFabric
from megamuon.collectives.device_library import (
    DeviceLibrary,
    agree_capability,
    environment_problems,
    select_rung,
)
from megamuon.collectives.device_streams import CudaStreams, Streams
from megamuon.collectives.grouped import GroupedTransport
from megamuon.collectives.host_fabric import HostFabric
from megamuon.collectives.operator_settings import OperatorGrid
from megamuon.collectives.operators import Fabric
from megamuon.collectives.ready import ReadyTransport
from megamuon.mesh import Mesh, MeshError, local_world_size

OPERATOR_RUNGS = ("lsa", "multimem")


def build_ready(settings: TransportSettings) -> Transport:
    """Grouped calls, and over them the operators where there is a fabric for them.  A collective
    over the places of the mesh.

    Raises ValueError without ``settings.grid``, and MeshError where it names a fabric that cannot
    be had.
    """
    if settings.grid is None:
        raise ValueError("the ready transport works on a whole grid, and its settings name none")
    grouped = GroupedTransport(settings)
    fabric = choose_fabric(settings.grid)
    if isinstance(fabric, str):
        grouped.notes.append(f"collectives: grouped calls instead of the ready fabric: {fabric}")
        return grouped
    ready = ReadyTransport(grouped, fabric)
    ready.notes.append(
        f"collectives: ready on the {fabric.label} fabric, {fabric.describe()}; grouped"
        " calls until the symmetric pool opens"
    )
    return ready


def choose_fabric(grid: OperatorGrid) -> Fabric | str:
    """The fabric that ``grid`` asks for, or why there is none.  A collective."""
    mesh, device, group = grid.mesh, grid.device, grid.new_group()
    alone = mesh.places == 1
    if grid.fabric == "auto" and device.type == "cuda" and not alone:
        return _unverified(group)
    if alone and (grid.fabric != "nccl" or device.type == "cuda"):
        return "one data-parallel rank: nothing moves between ranks"
    try:
        if grid.fabric == "nccl":
            library, streams = _device_parts(device, group)
            return DeviceFabric(
                mesh,
                group,
                grid.settings,
                rails=grid.rails,
                library=library,
                streams=streams,
                node_size=node_size(mesh),
            )
        if device.type != "cpu":
            raise CollectiveError("the host fabric moves CPU memory, and this run is on GPUs")
        return HostFabric(mesh, group, grid.settings, rails=grid.rails)
    except CollectiveError as error:
        if grid.fabric != "auto":
            raise MeshError(
                f"--fabric {grid.fabric}: {error}; or use --collectives grouped"
            ) from error
        return str(error)


def node_size(mesh: Mesh) -> int:
    """Ranks of a replica that are on one node, as the launcher says: the replica where it fits on a
    node, else the largest part of it that does.
    """
    here = (local_world_size() or mesh.world_size) // mesh.tp
    sizes = (size for size in range(min(here, mesh.shards), 0, -1) if not mesh.shards % size)
    return next(sizes, 1)


def device_parts(device: torch.device) -> tuple[DeviceLibrary, Streams]:
    """What the device operators need of this rank. Raises CollectiveError with all problems."""
    if device.type != "cuda":
        raise CollectiveError("the nccl fabric needs GPUs, and this run is on the CPU")
    if problems := environment_problems(os.environ):
        raise CollectiveError("; ".join(problems))
    return DeviceLibrary(), CudaStreams(device)


def _device_parts(
    device: torch.device, group: dist.ProcessGroup | None
) -> tuple[DeviceLibrary, Streams]:
    """``device_parts`` on every rank, or the same CollectiveError on all."""
    parts, problem = None, ""
    try:
        parts = device_parts(device)
    except CollectiveError as error:
        problem = str(error)
    problems = gather_objects(problem, group)
    found = [rank for rank, text in enumerate(problems) if text]
    if found or parts is None:
        raise CollectiveError(f"rank {found[0]}: {problems[found[0]]}")
    return parts


def _unverified(group: dist.ProcessGroup | None) -> str:
    """Why GPUs do not take the device operators by themselves, and what these ones offer: the
    lowest rung of the capability ladder over all ranks.  A collective over ``group``.
    """
    everyone = gather_objects(select_rung(), group)
    lowest = agree_capability([held.name for held in everyone])
    why = next(held.reason for held in everyone if held.name == lowest)
    agreed = f"the ranks agree on the rung {lowest!r}" + (f": {why}" if why else "")
    if lowest in OPERATOR_RUNGS:
        return (
            "the device operators have not been verified on a GPU, so a run has to ask for them"
            f" with --fabric nccl ({agreed})"
        )
    unused = ", and no transport uses torch's symmetric memory" if lowest == "symmetric" else ""
    return f"the device operators cannot be had here ({agreed}{unused})"
