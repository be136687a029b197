"""The optimizer step of a fully sharded model: norm, clip, update of the local rows.

Owns ``ShardedPiece`` (the rows of one parameter on this rank, as FSDP2 cut them) and
``FullyShardedStep``. Invariant: each element counts once in the norm, though replicas
repeat all of them and tensor-parallel ranks repeat what is not cut; the rest is as in every step
(``runtime.step_parts``). Tested by ``tests/distributed/test_fully_sharded.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megamuon.checkpoint.tensors import StoredTensor
from megamuon.collectives.traffic import Traffic
from megamuon.matrices import LogicalParameter
from megamuon.mesh import Mesh
from megamuon.optim.optimizer import Item, OwnerOptimizer
from megamuon.ownership.holdings import summed_over_tp
from megamuon.runtime.config import OptimizerSettings
from megamuon.runtime.exchange import sum_in_order
from megamuon.runtime.step_parts import (
    LocalGradient,
    NormReduction,
    RateOf,
    Rates,
    StepResult,
    clip_,
)

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ShardedPiece:
    """Rows of this rank's tensor-parallel piece of a parameter; none where rows ran out."""

    parameter: LogicalParameter
    tensor: DTensor  # FSDP2's sharded parameter
    first_row: int  # inside the tensor-parallel piece
    tp_rank: int
    counts: bool  # whether this rank speaks for these elements in sums over all ranks

    @property
    def master(self) -> Tensor:
        """The local rows, alive: FSDP2 gathers from this memory."""
        return self.tensor._local_tensor

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient of the rows; None where no backward pass since the last step met the
        parameter.
        """
        gradient = self.tensor.grad
        return gradient._local_tensor if isinstance(gradient, DTensor) else None

    def stored(self, name: str, data: Tensor) -> StoredTensor:
        """``data``, of the shape of the rows, as a piece of the whole tensor called ``name``."""
        first, *rest = self.parameter.piece(self.tp_rank).offset
        return StoredTensor(
            name=name,
            shape=self.parameter.shape,
            offset=(first + self.first_row, *rest),
            data=data,
        )


class FullyShardedStep:
    """Optimizer state and updates of this rank's rows."""

    def __init__(
        self,
        pieces: Sequence[ShardedPiece],
        optimizer: OwnerOptimizer,
        *,
        mesh: Mesh,
        world: dist.ProcessGroup | None,
        tp_group: dist.ProcessGroup | None,
        settings: OptimizerSettings,
        traffic: Traffic,
    ) -> None:
        self.pieces = tuple(pieces)
        self.optimizer = optimizer
        self.tp_group = tp_group
        self.clip = settings.clip
        self.trainable = [piece for piece in self.pieces if piece.parameter.trainable]
        self._names = tuple(piece.parameter.name for piece in self.trainable)
        self._decayed = frozenset(
            piece.parameter.name for piece in self.trainable if settings.decays(piece.parameter)
        )
        self._reduce_norm = NormReduction(
            self._names,
            group=world if mesh.world_size > 1 else None,
            device=mesh.device,
            traffic=traffic,
            count_zeros=settings.count_zeros,
        )
        self.state: dict[str, dict[str, Tensor]] = {
            piece.parameter.name: optimizer.init_state(piece.master)
            for piece in self.trainable
            if piece.master.numel()
        }

    @torch.no_grad()
    def __call__(self, lr_of: RateOf, wd: float) -> StepResult:
        """Clip, then update the local rows of every touched parameter; drops the gradients."""
        gradients: Gradients = {p.parameter.name: p.gradient for p in self.trainable}
        used = [name for name, gradient in gradients.items() if gradient is not None]
        self._sum_partial(gradients)
        held = [
            LocalGradient(gradient, place, piece.counts)
            for place, piece in enumerate(self.trainable)
            if (gradient := gradients[piece.parameter.name]) is not None and gradient.numel()
        ]
        found = self._reduce_norm(held, used)
        if not found.skipped:
            clip_([g for g in gradients.values() if g is not None], found.norm, self.clip)
            rates = Rates(lr_of=lr_of, wd=wd, decayed=self._decayed)
            items = list(self._items(gradients, found.touched, rates))
            if items:
                self.optimizer.update(items)
        for piece in self.trainable:
            piece.tensor.grad = None
        return found.result(self._names)

    def _sum_partial(self, gradients: Gradients) -> None:
        """Sum over tensor-parallel ranks what each of them has a part of."""
        summed = {p.name for p in summed_over_tp(p.parameter for p in self.trainable)}
        partial = [p for p in self.trainable if p.parameter.name in summed]
        if self.tp_group is None or not partial:
            return
        # Untouched ones as zeros, so that all ranks send equally much.
        parts = [
            torch.zeros_like(p.master) if (g := gradients[p.parameter.name]) is None else g
            for p in partial
        ]
        sum_in_order(parts, self.tp_group)
        gradients.update({p.parameter.name: g for p, g in zip(partial, parts, strict=True)})

    def _items(self, gradients: Gradients, touched: Set[str], rates: Rates) -> Iterator[Item]:
        for piece in self.trainable:
            parameter = piece.parameter
            if parameter.name not in touched or parameter.name not in self.state:
                continue
            gradient = gradients[parameter.name]
            if gradient is None:  # used on other tensor-parallel ranks only
                gradient = torch.zeros_like(piece.master)
            yield rates.item(
                parameter,
                master=piece.master,
                gradient=gradient,
                state=self.state[parameter.name],
            )
