"""Initial weights, and the check that all ranks have the same.

Owns the seeds of ``initial=`` and the comparison of what ranks start from. Invariant: ranks whose
weights differ, or that take them from different places, stop with a message before the first step.
Tested by ``tests/distributed/test_replicas.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.matrices import LogicalParameter
from megamuon.mesh import Mesh
from megamuon.ownership.holdings import cut_names
from megamuon.runtime.replicas import check_replicas, digests

# ``initial(name, whole tensor, generator)`` fills the tensor.
Fill = Callable[[str, Tensor, torch.Generator], None]


def parameter_seed(seed: int, name: str) -> int:
    """Seed of one parameter's initial values: a function of its name, so no layout can change
    it.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def weights_from(tensors: Mapping[str, nn.Parameter], initial: Fill | None) -> str:
    """Where the initial values come from; equal on all ranks, or they stop."""
    if initial is not None:
        return "initial="
    return "the meta device" if any(t.is_meta for t in tensors.values()) else "the model"


def check_present_weights(
    tensors: Mapping[str, nn.Parameter],
    parameters: Sequence[LogicalParameter],
    mesh: Mesh,
    world: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Raise ReplicaMismatchError where ranks built the model with different weights, and ValueError
    for weights on the meta device.
    """
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: pass initial= to fill it")
    if world is None:
        return
    names = [p.name for p in parameters]
    found = digests([tensors[name] for name in names])
    check_replicas(
        "initial weights",
        names,
        dict(zip(names, found, strict=True)),
        cut=cut_names(parameters),
        mesh=mesh,
        group=world,
        device=device,
        advice="Give all ranks the same seed before the model is built, or load the same weights;"
        " or pass initial=, which fills each weight from a seed of its own",
    )


class CheckedFill:
    """An ``initial`` that remembers what it made, whole, so that ranks can compare it."""

    def __init__(self, initial: Fill) -> None:
        self._initial = initial
        self._made: dict[str, tuple[int, int]] = {}

    def __call__(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        self._initial(name, tensor, generator)
        (self._made[name],) = digests([tensor])

    def check(
        self,
        parameters: Sequence[LogicalParameter],
        mesh: Mesh,
        world: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Raise ReplicaMismatchError where ranks that filled a parameter got different values."""
        check_replicas(
            "initial weights",
            [p.name for p in parameters],
            self._made,
            mesh=mesh,
            group=world,
            device=device,
            advice="initial= must depend on the name and the generator that it is given alone",
        )
