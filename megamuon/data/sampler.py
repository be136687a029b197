"""Which samples form the micro-batches of each data-parallel rank.

Owns the ``single`` and ``cyclic`` samplers. Invariants: all ranks yield the same number of
micro-batches; at one step no two ranks hold the same sample; the whole state is
``consumed_samples`` and, for ``cyclic``, the layout in which the run began, so a resume continues
exactly where the run stopped, for any number of loader workers and of ranks.
Source: Megatron-LM's samplers. Tested by
``tests/data_room/test_sampler.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SamplerKind = Literal["single", "cyclic"]
SAMPLERS: tuple[SamplerKind, ...] = ("single", "cyclic")


@dataclass(frozen=True, kw_only=True)
class SamplerSpec:
    """A rank's part of the batches; ``consumed_samples`` counts over all ranks since the start of
    the run.
    """

    kind: SamplerKind = "single"
    consumed_samples: int = 0
    micro_batch_size: int
    data_parallel_rank: int = 0  # among the ranks with samples of their own (Mesh.sample_ranks)
    data_parallel_size: int = 1
    data_sharding: bool = True  # cyclic only: each rank draws from a range of its own
    # cyclic only: micro-batch size and data-parallel ranks of the run's first launch, whose order
    # is kept; None: those of this one
    layout: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in SAMPLERS:
            raise ValueError(f"--dataloader-type {self.kind!r}: not one of {', '.join(SAMPLERS)}")
        if self.micro_batch_size < 1:
            raise ValueError(f"--micro-batch-size {self.micro_batch_size}: must be at least 1")
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise ValueError(
                f"data-parallel rank {self.data_parallel_rank} is not in [0, "
                f"{self.data_parallel_size})"
            )
        if self.layout is not None and min(self.layout) < 1:
            raise ValueError(f"layout {self.layout}: sizes must be at least 1")
        if self.consumed_samples < 0:
            raise ValueError(f"consumed_samples {self.consumed_samples} is negative")


class SingleSampler:
    """In order, once: step by step, rank r takes the r-th micro-batch; an incomplete last step is
    dropped.
    """

    def __init__(
        self,
        *,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        if total_samples < 1:
            raise ValueError(f"no samples to draw from: total_samples {total_samples}")
        if consumed_samples >= total_samples:
            raise ValueError(
                f"all samples are drawn: consumed_samples {consumed_samples} of {total_samples}; "
                "the dataset was "
                "built for fewer steps than the run asks for"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank = data_parallel_rank
        self.step = micro_batch_size * data_parallel_size

    def __len__(self) -> int:
        """Micro-batches that this rank still yields."""
        return (self.total_samples - self.consumed_samples) // self.step

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples + self.rank * self.micro_batch_size
        for number in range(len(self)):
            start = first + number * self.step
            yield list(range(start, start + self.micro_batch_size))


class CyclicSampler:
    """Without end: each epoch is a fresh permutation, seeded with the epoch's number.

    An epoch has ``total - total % (micro_batch_size * data_parallel_size)`` samples, so ranks stay
    in step. With ``data_sharding`` a rank permutes a range of its own; else ranks take turns on one
    permutation.  Both depend on the layout, so a run keeps that of its first launch (``layout``:
    micro-batch size, data-parallel ranks) and deals the samples in that order to any ranks: no
    sample comes twice in an epoch.
    """

    def __init__(
        self,
        *,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool = True,
        layout: tuple[int, int] | None = None,
    ) -> None:
        self.order_micro, self.order_size = layout or (micro_batch_size, data_parallel_size)
        self.order_step = self.order_micro * self.order_size
        self.active = total_samples - total_samples % self.order_step
        if self.active < 1:
            raise ValueError(
                f"{total_samples} samples are fewer than one step of {self.order_step} "
                "(--micro-batch-size "
                f"{self.order_micro} on {self.order_size} data-parallel ranks)"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank = data_parallel_rank
        self.size = data_parallel_size
        self.data_sharding = data_sharding

    def epoch_order(self, epoch: int) -> Tensor:
        """The samples of one epoch in the order in which the ranks together draw them, (active,)
        int64.
        """
        generator = torch.Generator().manual_seed(epoch)
        if not self.data_sharding:
            # Megatron-LM permutes whole micro-batches' worth of samples; what exceeds the active
            # ones would reach only some of the ranks.
            whole = self.total_samples // self.order_micro * self.order_micro
            order = torch.randperm(whole, generator=generator)[: self.active]
            turns = order.view(-1, self.order_micro, self.order_size)  # step, sample, rank
            return turns.transpose(1, 2).reshape(-1)
        bucket = self.active // self.order_size
        order = torch.randperm(bucket, generator=generator).view(-1, 1, self.order_micro)
        starts = bucket * torch.arange(self.order_size).view(1, -1, 1)
        return (order + starts).reshape(-1)  # step, rank, sample

    def __iter__(self) -> Iterator[list[int]]:
        position = self.consumed_samples + self.rank * self.micro_batch_size
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        while True:
            batch: list[int] = []
            while len(batch) < self.micro_batch_size:  # a micro-batch may reach over an epoch's end
                wanted, start = divmod(position + len(batch), self.active)
                if wanted != epoch:
                    epoch, order = wanted, self.epoch_order(wanted)
                batch += order[start : start + self.micro_batch_size - len(batch)].tolist()
            yield batch
            position += self.micro_batch_size * self.size


def build_sampler(total_samples: int, spec: SamplerSpec) -> SingleSampler | CyclicSampler:
    """The sampler of ``spec`` over a dataset of ``total_samples``; a batch sampler for torch's
    ``DataLoader``.
    """
    if spec.kind == "single":
        return SingleSampler(
            total_samples=total_samples,
            consumed_samples=spec.consumed_samples,
            micro_batch_size=spec.micro_batch_size,
            data_parallel_rank=spec.data_parallel_rank,
            data_parallel_size=spec.data_parallel_size,
        )
    return CyclicSampler(
        total_samples=total_samples,
        consumed_samples=spec.consumed_samples,
        micro_batch_size=spec.micro_batch_size,
        data_parallel_rank=spec.data_parallel_rank,
        data_parallel_size=spec.data_parallel_size,
        data_sharding=spec.data_sharding,
        layout=spec.layout,
    )
