"""What all ranks must agree on before the first collective of training, and the proof that they do.

Owns the exchange of the plan's digest. Invariant: ranks that disagree stop with a message that
names the ranks and the first entry that differs; none of them hangs. Tested by
``tests/distributed/test_agreement.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megamuon.ownership.plan import OwnershipPlan


class PlanMismatchError(RuntimeError):
    """Ranks computed different plans or run with different settings."""


def exchange_plan(
    plan: OwnershipPlan, settings: Mapping[str, str], group: dist.ProcessGroup | None
) -> None:
    """Compare the plan's digest and ``settings`` (text by name, the same names on all ranks) over
    ``group``.

    Raises PlanMismatchError on every rank if one differs from rank 0's. One object exchange when
    all agree.
    """
    if group is None:
        return
    world = dist.get_world_size(group)
    mine = (plan.digest, dict(settings))
    everyone: list[tuple[str, dict[str, str]]] = [mine] * world
    dist.all_gather_object(everyone, mine, group=group)
    if all(other == everyone[0] for other in everyone):
        return
    reference: list[str | None] = [plan.to_json() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(reference, src=dist.get_global_rank(group, 0), group=group)
    first = OwnershipPlan.from_json(reference[0] or "")
    difference = first.first_difference(plan)
    if difference is None and mine != everyone[0]:
        here = {name: text for name, text in settings.items() if text != everyone[0][1].get(name)}
        there = {name: everyone[0][1].get(name) for name in here}
        difference = f"settings {_words(there)} on rank 0, {_words(here)} here"
    differences: list[str | None] = [None] * world
    dist.all_gather_object(differences, difference, group=group)
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(differences) if text]
    shown = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more ranks" if len(lines) > 3 else "")
    raise PlanMismatchError(
        f"the ownership plans of the ranks differ (rank 0 against the others): {shown}."
        " Start all ranks with the same flags, the same code and the same --ns-cost source"
    )


def _words(settings: Mapping[str, str | None]) -> str:
    return " ".join(f"{name}={text}" for name, text in settings.items())


def integers_of_rank_zero(
    values: tuple[int, ...], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[int, ...]:
    """Rank 0's ``values`` on every rank (same length everywhere)."""
    if group is None:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
    return tuple(int(value) for value in tensor.tolist())
