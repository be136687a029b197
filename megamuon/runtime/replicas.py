"""Digests of weights and buffers, compared over ranks that must start equal.

Owns the digest of a tensor and its comparison over ranks. Invariant: ranks whose weights or buffers
differ stop before the first step, all of them, with a message that names tensors and ranks; when
all agree it costs one all-reduce of 32 bytes for each tensor. Tested by
``tests/distributed/test_replicas.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.agreement import PlanMismatchError
from megamuon.mesh import Mesh

SHOWN = 3  # tensors named in an error
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = 65521  # places are told apart modulo this prime
_CHUNK = 32 * _WEIGHTS  # elements at a time, so that a large tensor needs no copy of its size
_NOBODY = torch.iinfo(torch.int64).min


class ReplicaMismatchError(PlanMismatchError):
    """Ranks hold different values of what is one tensor."""


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Two integers ``(2,)`` of the bits of ``tensor``, on its device: their sum, and their sum
    weighted by place. Integers wrap alike everywhere, so no device or order of additions matters.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        place = torch.arange(1, len(part) + 1, device=part.device) % _WEIGHTS + 1
        total += torch.stack([part.sum(), (part * place).sum() + start * part.sum()])
    return total


def digests(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """``digest`` of each, read back at once."""
    if not tensors:
        return []
    found = torch.stack([digest(tensor).to(tensors[0].device) for tensor in tensors]).tolist()
    return [(int(first), int(second)) for first, second in found]


def check_replicas(
    what: str,
    names: Sequence[str],
    found: Mapping[str, tuple[int, int]],
    *,
    cut: Collection[str] = (),
    mesh: Mesh,
    group: dist.ProcessGroup | None,
    device: torch.device,
    advice: str,
) -> None:
    """Compare ``found``, digests by name, over all ranks of ``group``; a collective.

    ``names`` are equal on all ranks; one that a rank has no digest of is not compared there. Names
    in ``cut`` are compared between ranks of one tp rank only, which hold the same piece. Raises
    ReplicaMismatchError on all ranks alike.
    """
    if group is None or not names:
        return
    table = torch.full((mesh.tp, len(names), 2), _NOBODY, dtype=torch.int64)
    for place, name in enumerate(names):
        if name in found:
            unsharded = mesh.tp_rank if name in cut else 0
            table[unsharded, place] = torch.tensor(found[name], dtype=torch.int64)
    held = table != _NOBODY
    both = torch.stack([table, torch.where(held, ~table, _NOBODY)]).to(device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    most, least = both.cpu()
    # ~ turns the order round: the largest complement is that of the smallest number.
    differs = ((most != ~least) & (most != _NOBODY) & (least != _NOBODY)).any(2).any(0)
    wrong = [name for name, differ in zip(names, differs.tolist(), strict=True) if differ]
    if wrong:
        shown = wrong[:SHOWN]
        lines = _who(shown, found, cut, mesh, group)
        rest = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ReplicaMismatchError(
            f"{len(wrong)} of {len(names)} {what} differ between the ranks: {'; '.join(lines)}"
            f"{rest}. {advice}"
        )


def _who(
    names: Sequence[str],
    found: Mapping[str, tuple[int, int]],
    cut: Collection[str],
    mesh: Mesh,
    group: dist.ProcessGroup,
) -> list[str]:
    """For each name the ranks that differ from the first that holds the same piece."""
    mine = (mesh.tp_rank, {name: found[name] for name in names if name in found})
    everyone: list[tuple[int, dict[str, tuple[int, int]]]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    lines = []
    for name in names:
        first: dict[int, tuple[int, tuple[int, int]]] = {}
        others: dict[int, list[int]] = {}
        for rank, (tp_rank, theirs) in enumerate(everyone):
            if name not in theirs:
                continue
            unsharded = tp_rank if name in cut else 0
            if theirs[name] != first.setdefault(unsharded, (rank, theirs[name]))[1]:
                others.setdefault(first[unsharded][0], []).append(rank)
        for reference, ranks in others.items():
            listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            word = "rank" if len(ranks) == 1 else "ranks"
            lines.append(f"{name} on {word} {listed} is not that of rank {reference}")
    return lines


def agree_on_problem(problem: str | None, group: dist.ProcessGroup | None) -> str | None:
    """The first problem that a rank reports, with its rank, on all ranks; None: nobody has any."""
    if group is None:
        return problem
    everyone: list[str | None] = [problem] * dist.get_world_size(group)
    dist.all_gather_object(everyone, problem, group=group)
    return next(
        (f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None), None
    )
