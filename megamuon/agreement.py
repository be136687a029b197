"""Comparison of settings, plans and digests over all ranks before training, and later agreements.

Owns the comparison of named values over the ranks of a group (``compare``): of flags, of the
runtime's settings, of an operator's, of the pool's; the exchange of the plan's digest; and what an
engine settles with the others in between (``WorldAgreement``). Invariant: ranks that disagree stop
with a message that names the ranks and the first entry that differs; none of them hangs. Tested by
``tests/distributed/test_agreement.py`` and ``tests/distributed/test_bad_input.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megamuon.ownership.plan import OwnershipPlan

Value = TypeVar("Value")


class PlanMismatchError(RuntimeError):
    """Ranks computed different plans or run with different settings."""


class Difference(NamedTuple):
    """A value that is not rank 0's (of the group)."""

    rank: int
    name: str
    first: object  # rank 0's; None where it has none of this name
    value: object


def gather_objects(own: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Every rank's ``own``, by rank of ``group``; one's own where there is none. A collective; the
    objects travel over Gloo, also beside NCCL.
    """
    if group is None:
        return [own]
    everyone = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def compare(
    values: Mapping[str, object],
    group: dist.ProcessGroup | None,
    error: Callable[[Sequence[Difference]], Exception],
) -> None:
    """Compare ``values`` by name over ``group`` (None: one rank); a collective.

    Raises ``error`` of all differences, by rank, on every rank alike. Comes before whatever else
    depends on the values, so that ranks which disagree cannot meet in different collectives.
    """
    everyone = gather_objects(dict(values), group)
    found = [
        Difference(rank, name, everyone[0].get(name), value)
        for rank, theirs in enumerate(everyone)
        for name, value in theirs.items()
        if value != everyone[0].get(name)
    ]
    if found:
        raise error(found)


def exchange_settings(settings: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Compare ``settings`` over ``group``. Raises PlanMismatchError on every rank if one differs
    from rank 0's.
    """
    compare(settings, group, lambda found: _mismatch("settings", "the settings", found))


def exchange_pool(texts: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """The same of the plan of the symmetric pool."""
    compare(texts, group, lambda found: _mismatch("pool", "the symmetric pools", found))


def _mismatch(what: str, whose: str, found: Sequence[Difference]) -> PlanMismatchError:
    lines = []
    for rank, differences in groupby(found, key=lambda one: one.rank):
        named = list(differences)
        there = " ".join(f"{one.name}={one.first}" for one in named)
        here = " ".join(f"{one.name}={one.value}" for one in named)
        lines.append(f"rank {rank}: {what} {there} on rank 0, {here} here")
    return PlanMismatchError(_message(f"{whose} of the ranks differ", lines))


def exchange_plan(plan: OwnershipPlan, group: dist.ProcessGroup | None) -> None:
    """Compare the plan's digest over ``group``.

    Raises PlanMismatchError on every rank if one differs from rank 0's. One object exchange when
    all agree.
    """
    if group is None:
        return
    if len(set(gather_objects(plan.digest, group))) == 1:
        return
    reference: list[str | None] = [plan.to_json() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(reference, src=dist.get_global_rank(group, 0), group=group)
    difference = OwnershipPlan.from_json(reference[0] or "").first_difference(plan)
    differences = gather_objects(difference, group)
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(differences) if text]
    raise PlanMismatchError(
        _message("the ownership plans of the ranks differ (rank 0 against the others)", lines)
    )


def _message(what: str, lines: list[str]) -> str:
    shown = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more ranks" if len(lines) > 3 else "")
    return (
        f"{what}: {shown}."
        " Start all ranks with the same flags, the same code and the same --ns-cost source"
    )


def integers_of_rank_zero(
    values: tuple[int, ...], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[int, ...]:
    """Rank 0's ``values`` on every rank (same length everywhere)."""
    if group is None:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
    return tuple(int(value) for value in tensor.tolist())


@dataclass(frozen=True, kw_only=True)
class WorldAgreement:
    """What all ranks of ``group`` settle together (``engine.Agreement``); None: one rank."""

    group: dist.ProcessGroup | None
    device: torch.device

    def rank_zeros(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """See Agreement."""
        return integers_of_rank_zero(values, self.group, self.device)

    def largest(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """See Agreement."""
        if self.group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(int(value) for value in tensor.tolist())
