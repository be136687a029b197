"""Which samples form the micro-batches of each data-parallel rank.

Owns the ``single`` and ``cyclic`` samplers. Invariants: all ranks yield the same number of
micro-batches; at one step no two ranks hold the same sample; the whole state is
``consumed_samples``, so a resume continues exactly where the run stopped, for any number of loader
workers. Source: Megatron-LM's samplers. Tested by ``tests/data_room/test_sampler.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

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
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    data_sharding: bool = True  # cyclic only: each rank draws from a range of its own

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
    permutation.
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
    ) -> None:
        self.step = micro_batch_size * data_parallel_size
        self.active = total_samples - total_samples % self.step
        if self.active < 1:
            raise ValueError(
                f"{total_samples} samples are fewer than one step of {self.step} "
                "(--micro-batch-size "
                f"{micro_batch_size} on {data_parallel_size} data-parallel ranks)"
            )
        if consumed_samples % self.step:
            raise ValueError(
                f"consumed_samples {consumed_samples} is not a multiple of {self.step}, the "
                "samples of a micro-step; "
                "cyclic data needs the batch layout that the run began with"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank = data_parallel_rank
        self.size = data_parallel_size
        self.data_sharding = data_sharding

    def epoch_indices(self, epoch: int) -> list[int]:
        """This rank's samples of one epoch, in order."""
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            bucket = self.active // self.size
            order = torch.randperm(bucket, generator=generator)
            return (order + self.rank * bucket).tolist()
        # Megatron-LM permutes whole micro-batches' worth of samples; what exceeds the active
        # ones would reach only some of the ranks.
        whole = self.total_samples // self.micro_batch_size * self.micro_batch_size
        order = torch.randperm(whole, generator=generator)
        return order[: self.active][self.rank :: self.size].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        epoch, done = divmod(self.consumed_samples, self.active)
        while True:
            indices = self.epoch_indices(epoch)
            for start in range(done // self.size, len(indices), self.micro_batch_size):
                yield indices[start : start + self.micro_batch_size]
            epoch, done = epoch + 1, 0


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
    )
