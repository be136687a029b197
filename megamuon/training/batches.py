"""Endless-looking streams of micro-batches over finite datasets.

Owns where a run stands in its datasets.  Invariants: the position is one number, consumed samples
over all data-parallel ranks (the tensor-parallel ranks of a place read
the same); a stream that is never read builds no loader, so a set that is used up is no error
until somebody asks for more; batches arrive on this rank's device.  Tested by
``tests/training/test_batches.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megamuon.data.build import data_loader
from megamuon.data.sampler import SamplerSpec
from megamuon.mesh import Mesh
from megamuon.metrics import Timers
from megamuon.training.failures import Phase, TrainingError


class BatchStream:
    """Micro-batches of one split for this rank, from ``consumed`` samples on; ``layout`` as in
    ``SamplerSpec``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        split: str,
        consumed: int,
        micro_batch: int,
        kind: str,
        mesh: Mesh,
        phase: Phase,
        timers: Timers | None = None,
        layout: tuple[int, int] | None = None,
    ) -> None:
        self.dataset = dataset
        self.split = split
        self.consumed = consumed
        self.micro_batch = micro_batch
        self.kind = kind
        self.mesh = mesh
        self.phase = phase
        self.timers = timers or Timers()
        self.layout = layout
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Any:
        before = self.phase.name
        self.phase("reading a batch")
        with self.timers.time("batch-generator", 2):
            if self._batches is None:
                self._batches = self._open()
            try:
                batch = next(self._batches)
            except StopIteration:
                raise TrainingError(
                    f"the {self.split} set of {len(self.dataset)} samples is used up: use"
                    " --dataloader-type cyclic to start over, or fewer steps"
                ) from None
        self.phase(before)
        return _moved(batch, self.mesh.device)

    def _open(self) -> Iterator[Any]:
        if self.dataset is None:
            raise TrainingError(
                f"there is no {self.split} set: give it a share in --split, or a path of its own"
            )
        spec = SamplerSpec(
            kind=self.kind,  # type: ignore[arg-type]
            consumed_samples=self.consumed,
            micro_batch_size=self.micro_batch,
            data_parallel_rank=self.mesh.sample_rank,
            data_parallel_size=self.mesh.sample_ranks,
            layout=self.layout,
        )
        pinned = self.mesh.device.type == "cuda"
        return iter(data_loader(self.dataset, spec, num_workers=0, pin_memory=pinned))


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
