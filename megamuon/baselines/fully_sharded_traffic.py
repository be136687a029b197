"""Bytes that FSDP2 sends, counted as the owner runtime's are.

Owns the counting shells around FSDP2's collectives. Invariant: what is sent, and when, is as
without them; FSDP2's padding is counted, because it travels. Tested by
``tests/distributed/test_fully_sharded.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megamuon.collectives.traffic import Traffic


class _Counted:
    """One of FSDP2's collectives of a group, and the count of its bytes."""

    def __init__(self, collective: Any, traffic: Traffic, operation: str) -> None:
        self.collective = collective
        self.traffic = traffic
        self.operation = operation

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the collective does it."""
        allocated: Tensor = self.collective.allocate(*args, **kwargs)
        return allocated

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **how: Any
    ) -> Any:
        others = dist.get_world_size(group) - 1
        # A gather sends its input to all others, a reduction to each other rank that rank's part.
        part = input_tensor if self.operation == "gather" else output_tensor
        self.traffic.sent(self.operation, "shard", others * part.numel() * part.element_size())
        return self.collective(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, **how
        )


def count_traffic(modules: Sequence[FSDPModule], traffic: Traffic, replicas: int) -> None:
    """Count all gathers and reductions of ``modules`` in ``traffic``.

    A mean over ``replicas`` counts as the least that an all-reduce needs: each rank sends its part
    to every replica and gets it back, ``2 (replicas - 1) / replicas`` of the bytes.
    """

    def over_replicas(reduced: Tensor) -> None:
        nbytes = reduced.numel() * reduced.element_size()
        traffic.sent("reduce", "replicate", 2 * (replicas - 1) * nbytes // replicas)

    for module in modules:
        group = module._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        module.set_custom_all_gather(_Counted(group._all_gather_comm, traffic, "gather"))
        module.set_custom_reduce_scatter(_Counted(group._reduce_scatter_comm, traffic, "reduce"))
        if replicas > 1:
            module.set_all_reduce_hook(over_replicas)
