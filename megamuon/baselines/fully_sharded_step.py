"""The optimizer step of a fully sharded model: norm, clip, update of the local rows.

Owns ``ShardedPiece`` (the rows of one parameter on this rank, as FSDP2 cut them) and
``FullyShardedStep``. Invariants: the result reads as that of the owner runtime's step; each element
counts once in the norm, though rows of the mesh repeat all of them and tensor-parallel ranks repeat
what is not cut; a parameter that no rank touched is left alone. Tested by
``tests/distributed/test_fully_sharded.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.checkpoint.tensors import StoredTensor
from megamuon.collectives.traffic import Traffic
from megamuon.matrices import LogicalParameter
from megamuon.mesh import Mesh
from megamuon.optim.optimizer import Item, OwnerOptimizer
from megamuon.runtime.config import OptimizerSettings
from megamuon.runtime.exchange import sum_in_order
from megamuon.runtime.step import StepResult

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ShardedPiece:
    """Rows of this rank's tensor-parallel piece of a parameter; none where rows ran out."""

    parameter: LogicalParameter
    tensor: nn.Parameter  # FSDP2's sharded parameter, a DTensor
    first_row: int  # inside the tensor-parallel piece
    tp_rank: int
    counts: bool  # whether this rank speaks for these elements in sums over all ranks

    @property
    def master(self) -> Tensor:
        """The local rows, alive: FSDP2 gathers from this memory."""
        return self.tensor._local_tensor  # type: ignore[attr-defined, no-any-return]

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient of the rows; None where no backward pass since the last step met the
        parameter.
        """
        gradient = self.tensor.grad
        return None if gradient is None else gradient._local_tensor  # type: ignore[attr-defined]

    def stored(self, name: str, data: Tensor) -> StoredTensor:
        """``data``, of the shape of the rows, as a piece of the whole tensor called ``name``."""
        first, *rest = self.parameter.piece_offset(self.tp_rank)
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
        world: dist.ProcessGroup,
        tp_group: dist.ProcessGroup | None,
        settings: OptimizerSettings,
        traffic: Traffic,
    ) -> None:
        self.pieces = tuple(pieces)
        self.optimizer = optimizer
        self.mesh = mesh
        self.world = world
        self.tp_group = tp_group
        self.settings = settings
        self.traffic = traffic
        self.trainable = [piece for piece in self.pieces if piece.parameter.trainable]
        self.state: dict[str, dict[str, Tensor]] = {
            piece.parameter.name: optimizer.init_state(piece.master)
            for piece in self.trainable
            if piece.master.numel()
        }

    @torch.no_grad()
    def __call__(self, lr_of: Callable[[LogicalParameter], float], wd: float) -> StepResult:
        """Clip, then update the local rows of every touched parameter; drops the gradients."""
        gradients: Gradients = {p.parameter.name: p.gradient for p in self.trainable}
        used = {name for name, gradient in gradients.items() if gradient is not None}
        self._sum_partial(gradients)
        norm, touched, nonfinite, zeros = self._norm(gradients, used)
        skipped = bool(nonfinite) or not math.isfinite(norm)
        if not skipped:
            self._clip(gradients, norm)
            self._update(gradients, touched, lr_of, wd)
        for piece in self.trainable:
            piece.tensor.grad = None
        return StepResult(
            gradient_norm=norm,
            skipped=skipped,
            nonfinite=nonfinite,
            untouched=tuple(
                p.parameter.name for p in self.trainable if p.parameter.name not in touched
            ),
            zeros=zeros,
        )

    def _sum_partial(self, gradients: Gradients) -> None:
        """Sum over tensor-parallel ranks what each of them has a part of."""
        partial = [p for p in self.trainable if p.parameter.tp_partial]
        if self.tp_group is None or not partial:
            return
        # Untouched ones as zeros, so that all ranks send equally much.
        parts = [
            torch.zeros_like(p.master) if (g := gradients[p.parameter.name]) is None else g
            for p in partial
        ]
        sum_in_order(parts, self.tp_group)
        gradients.update({p.parameter.name: g for p, g in zip(partial, parts, strict=True)})

    def _norm(
        self, gradients: Gradients, used: set[str]
    ) -> tuple[float, set[str], tuple[str, ...], int | None]:
        """One all-reduce over all ranks: the squared norm, a zero count, an entry per parameter.

        An entry sums one per rank that used the parameter; a rank whose gradient is not finite adds
        twice the number of ranks, which no count of uses can reach.
        """
        ranks = dist.get_world_size(self.world)
        entries = [0.0] * len(self.trainable)  # Python's numbers: a tensor element costs 5 us
        total, zeros = 0.0, 0.0
        present = [
            (place, piece, gradient)
            for place, piece in enumerate(self.trainable)
            if (gradient := gradients[piece.parameter.name]) is not None and gradient.numel()
        ]
        held = [gradient for _, _, gradient in present]
        norms = torch._foreach_norm(held, dtype=torch.float64) if held else []
        squares = torch.stack(norms).cpu().square().tolist() if norms else []
        for (place, piece, _), square in zip(present, squares, strict=True):
            if not math.isfinite(square):
                entries[place] += 2 * ranks
            elif piece.counts:
                total += square
        counted = [g for _, piece, g in present if piece.counts]
        if self.settings.count_zeros and counted:
            zeros = float(torch.stack([(gradient == 0).sum() for gradient in counted]).sum())
        for place, piece in enumerate(self.trainable):
            entries[place] += piece.parameter.name in used
        vector = torch.tensor(
            [total, zeros, *entries], dtype=torch.float64, device=self.mesh.device
        )
        if ranks > 1:
            self.traffic.sent("norm", "world", vector.numel() * vector.element_size())
        dist.all_reduce(vector, group=self.world)
        total, zeros, *entries = vector.tolist()
        names = [piece.parameter.name for piece in self.trainable]
        named = list(zip(names, entries, strict=True))
        nonfinite = tuple(name for name, entry in named if entry >= 2 * ranks)
        norm = float("nan") if nonfinite else math.sqrt(total)
        touched = {name for name, entry in named if entry > 0}
        return norm, touched, nonfinite, int(zeros) if self.settings.count_zeros else None

    def _clip(self, gradients: Gradients, norm: float) -> None:
        clip = self.settings.clip
        factor = clip / (norm + 1e-6)
        present = [gradient for gradient in gradients.values() if gradient is not None]
        if clip > 0 and factor < 1 and present:
            torch._foreach_mul_(present, factor)

    def _update(
        self,
        gradients: Gradients,
        touched: set[str],
        lr_of: Callable[[LogicalParameter], float],
        wd: float,
    ) -> None:
        items: list[Item] = []
        for piece in self.trainable:
            parameter = piece.parameter
            if parameter.name not in touched or parameter.name not in self.state:
                continue
            gradient = gradients[parameter.name]
            if gradient is None:  # used on other tensor-parallel ranks only
                gradient = torch.zeros_like(piece.master)
            items.append(
                Item(
                    name=parameter.name,
                    parameter=piece.master,
                    gradient=gradient,
                    state=self.state[parameter.name],
                    lr=lr_of(parameter),
                    wd=wd if self.settings.decays(parameter) else 0.0,
                    logical_shape=parameter.shape,
                )
            )
        if items:
            self.optimizer.update(items)
