"""What all ranks must agree on before the first collective of training, and the proof that they do.

Owns the exchange of the plan's digest, and of the pool's, and what an engine settles in between
(``WorldAgreement``). Invariant: ranks that disagree stop with a message that names the ranks and
the first entry that differs; none of them hangs. Tested by ``tests/distributed/test_agreement.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch
import torch.distributed as dist

from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.config import RuntimeConfig


class PlanMismatchError(RuntimeError):
    """Ranks computed different plans or run with different settings."""


# Fields of RuntimeConfig that ranks may differ in, with the reason; all others are compared.
MAY_DIFFER: Mapping[str, str] = {
    "ns_cost_file": "a path of this machine; what it says is compared as part of the plan",
    "ns_cost_cache": "a path of this machine; what it holds is combined over the ranks",
    "owner_layout": "decides the parameters' layouts, which are compared as such",
    "unit_threshold": "compared as part of the plan, which names the unit that differs",
    "merge_experts": "compared as part of the plan, which names the unit that differs",
    "planner": "compared as part of the plan, which names the setting that differs",
}


def config_texts(config: RuntimeConfig) -> dict[str, str]:
    """Every setting that all ranks must share, as text by name; those of the optimizers one by
    one.
    """
    texts = {
        field.name: _text(getattr(config, field.name))
        for field in fields(config)
        if field.name not in MAY_DIFFER and field.name != "optimizer"
    }
    for field in fields(config.optimizer):
        value = getattr(config.optimizer, field.name)
        parts = fields(value) if is_dataclass(value) else ()
        texts |= {
            f"{field.name}.{part.name}": repr(getattr(value, part.name)) for part in parts
        } or {field.name: repr(value)}
    return texts


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def exchange_settings(settings: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Compare ``settings`` (text by name, the same names on all ranks) over ``group``.

    Comes before everything else that ranks do together, so that ranks which disagree cannot meet in
    different collectives. Raises PlanMismatchError on every rank if one differs from rank 0's.
    """
    if group is None:
        return
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(settings), group=group)
    lines = _differences(everyone, "settings")
    if lines:
        raise PlanMismatchError(_message("the settings of the ranks differ", lines))


def exchange_plan(plan: OwnershipPlan, group: dist.ProcessGroup | None) -> None:
    """Compare the plan's digest over ``group``.

    Raises PlanMismatchError on every rank if one differs from rank 0's. One object exchange when
    all agree.
    """
    if group is None:
        return
    world = dist.get_world_size(group)
    everyone: list[str] = [""] * world
    dist.all_gather_object(everyone, plan.digest, group=group)
    if len(set(everyone)) == 1:
        return
    reference: list[str | None] = [plan.to_json() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(reference, src=dist.get_global_rank(group, 0), group=group)
    difference = OwnershipPlan.from_json(reference[0] or "").first_difference(plan)
    differences: list[str | None] = [None] * world
    dist.all_gather_object(differences, difference, group=group)
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(differences) if text]
    raise PlanMismatchError(
        _message("the ownership plans of the ranks differ (rank 0 against the others)", lines)
    )


def exchange_pool(texts: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Compare the plan of the symmetric pool (``texts`` by name, the same names on all ranks) over
    ``group``.

    Raises PlanMismatchError on every rank if one differs from rank 0's.
    """
    if group is None:
        return
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(texts), group=group)
    lines = _differences(everyone, "pool")
    if lines:
        raise PlanMismatchError(_message("the symmetric pools of the ranks differ", lines))


def _differences(everyone: list[dict[str, str]], what: str) -> list[str]:
    """A line for each rank whose texts are not rank 0's."""
    first = everyone[0]
    lines = []
    for rank, theirs in enumerate(everyone):
        names = [name for name, text in theirs.items() if text != first.get(name)]
        if names:
            there = _words({name: first.get(name) for name in names})
            lines.append(
                f"rank {rank}: {what} {there} on rank 0, {_words({n: theirs[n] for n in names})}"
                " here"
            )
    return lines


def _message(what: str, lines: list[str]) -> str:
    shown = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more ranks" if len(lines) > 3 else "")
    return (
        f"{what}: {shown}."
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
