"""The exchange at the end of a ZeRO-3 forward pass: layers that some rank uses again.

Owns ``Rounds``, the exchange by which ranks that have finished their forward pass learn what others
still need. Invariant: every rank of a replica makes the same number of exchanges in a pass, and
gathers the same groups after each. Tested by ``tests/distributed/test_runtime_rules.py`` and
``tests/distributed/test_runtime_fuzz.py``.

[Note: gathered again]

ZeRO-3 drops the weights of a layer as soon as it has computed. A rank may use that layer again in
the same pass, and others may not, or at another place; a second gather cannot take part in the
frozen order, because nobody else expects it. So the rank first issues the rest of the order, as
every rank does by the end of its pass, and then asks. All others are asked when their own pass is
over: they take part in the gathers that anyone wants, and only when nobody wants more does the pass
end for all of them. In a pass without such a layer that is one exchange of a few bytes.

A layer that was used again is *kept* during the next pass, from its first use on, as ZeRO-2 keeps
all: a model that does so in every pass pays the extra gathers once. A pass in which no rank uses it
twice ends that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamuon.collectives.base import named
from megamuon.collectives.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Round:
    """What all ranks of a replica said in one exchange."""

    over: bool  # every rank has finished its pass
    wanted: tuple[int, ...]  # groups that some rank needs again now, ascending
    reused: frozenset[int]  # groups that some rank has used more than once so far


class Rounds:
    """The exchanges of ``count`` groups over ``group``, the ranks of a replica."""

    def __init__(self, group: dist.ProcessGroup, count: int, traffic: Traffic) -> None:
        self.group = group
        self.count = count
        self.traffic = traffic
        self._share = 2 * (dist.get_world_size(group) - 1) / dist.get_world_size(group)

    def exchange(self, *, over: bool, wanted: Iterable[int] = (), reused: Iterable[int]) -> Round:
        """Tell the replica and hear from it; blocks until every rank has come. Raises
        CollectiveError where a peer was lost.
        """
        # On the host, whatever the model computes on: the answer decides what the host launches.
        said = torch.zeros(1 + 2 * self.count, dtype=torch.uint8)
        said[0] = not over
        for place in (*(1 + g for g in wanted), *(1 + self.count + g for g in reused)):
            said[place] = 1
        with named("end of the forward pass"):
            dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group)
        self.traffic.sent("pass_end", "shard", int(self._share * said.numel()))
        marks = said.nonzero().flatten().tolist()
        return Round(
            over=0 not in marks,
            wanted=tuple(m - 1 for m in marks if 0 < m <= self.count),
            reused=frozenset(m - 1 - self.count for m in marks if m > self.count),
        )
