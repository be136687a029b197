"""Muon: momentum, Newton–Schulz, decoupled weight decay, scaled update.

Owns ``MuonConfig`` (every convention in which published Muons differ, as explicit fields) and
``Muon``. Invariants: each matrix is orthogonalised once per update, whole, and its scale comes from
its logical shape; parameters and momentum change in place, views included;
``MuonConfig.torch_preset`` reproduces ``torch.optim.Muon`` bit for bit. The momentum lies beside
the pieces of a matrix; the whole has no state. Tested by ``tests/optim/test_muon.py``, against
``torch.optim.Muon`` itself among others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megamuon.optim.coefficients import Triple
from megamuon.optim.newton_schulz import Counter, NewtonSchulzConfig, orthogonalize_many
from megamuon.optim.optimizer import Item, Whole
from megamuon.optim.whole import MatrixRule

MomentumForm = Literal["sgd", "ema"]
Scale = Literal["match_rms_adamw", "spectral", "unit_rms_norm", "shape_scaling", "original"]
DecayOrder = Literal["before_update", "after_update"]

_MOMENTUM = "momentum_buffer"
_SCALES: tuple[str, ...] = (
    "match_rms_adamw",
    "spectral",
    "unit_rms_norm",
    "shape_scaling",
    "original",
)


def update_scale(scale: Scale, rows: int, cols: int) -> float:
    """The factor on the orthogonalised update of a (rows, cols) logical matrix.

    ``match_rms_adamw`` 0.2 sqrt(max(rows, cols)) (Moonlight, torch); ``spectral`` sqrt(max(rows,
    cols)) (Megatron; with an extra scale of 0.2 it is the former); ``unit_rms_norm`` sqrt(rows /
    cols) (Megatron; dion calls it "spectral_norm"); ``shape_scaling`` or ``original`` sqrt(max(1,
    rows / cols)) (Jordan).
    """
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if scale == "spectral":
        return math.sqrt(max(rows, cols))
    if scale == "unit_rms_norm":
        return math.sqrt(rows / cols)
    if scale in ("shape_scaling", "original"):
        return math.sqrt(max(1, rows / cols))
    raise ValueError(f"Muon scale {scale!r}: choose one of {', '.join(_SCALES)}")


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon's conventions.

    ``momentum_form``: ``sgd`` is buf = mu buf + g, with the Nesterov input g + mu buf; ``ema`` is
    buf += (1 - mu)(g - buf), with the Nesterov input g + mu (buf - g). Up to a constant factor,
    which Newton–Schulz takes out, they agree; their buffers differ by that factor, 1 - mu.
    ``decay_order``: decay the weights before the update is added (torch, Megatron) or after. The
    decay is decoupled: a factor 1 - lr wd with the base learning rate, never the scaled one.
    """

    momentum: float = 0.95
    nesterov: bool = True
    momentum_form: MomentumForm = "sgd"
    scale: Scale = "match_rms_adamw"
    extra_scale: float = 1.0
    decay_order: DecayOrder = "before_update"
    newton_schulz: NewtonSchulzConfig = field(default_factory=NewtonSchulzConfig)

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"MuonConfig.momentum = {self.momentum}: it lies in [0, 1)")
        if not (math.isfinite(self.extra_scale) and self.extra_scale > 0.0):
            raise ValueError(
                f"MuonConfig.extra_scale = {self.extra_scale}: it is a positive number"
            )
        for name, value, allowed in (
            ("momentum_form", self.momentum_form, ("sgd", "ema")),
            ("scale", self.scale, _SCALES),
            ("decay_order", self.decay_order, ("before_update", "after_update")),
        ):
            if value not in allowed:
                raise ValueError(
                    f"MuonConfig.{name} = {value!r}: choose one of {', '.join(allowed)}"
                )

    @classmethod
    def torch_preset(
        cls,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Triple = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
    ) -> MuonConfig:
        """``torch.optim.Muon``, with its argument names and defaults and bit for bit its results
        (torch 2.13): EMA momentum, BF16 iteration with the norm taken in BF16, the standard
        form. Slow on CPUs without AMX or AVX512-BF16, which emulate BF16.
        """
        return cls(
            momentum=momentum,
            nesterov=nesterov,
            momentum_form="ema",
            scale="original" if adjust_lr_fn is None else adjust_lr_fn,
            newton_schulz=NewtonSchulzConfig(
                coefficients=(ns_coefficients,),
                steps=ns_steps,
                form="standard",
                dtype="bf16",
                normalization="clamp",
                eps=eps,
                norm_in_iteration_dtype=True,
                symmetric_kernel=False,
            ),
        )


class Muon(MatrixRule):
    """Muon. ``counter`` counts its Newton–Schulz calls."""

    piece_names: tuple[str, ...] = (_MOMENTUM,)
    whole_names: tuple[str, ...] = ()

    def __init__(self, config: MuonConfig, *, counter: Counter | None = None) -> None:
        self.config = config
        self.counter = Counter() if counter is None else counter

    def piece_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {_MOMENTUM: shape}

    def whole_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}

    @torch.no_grad()
    def prepare(self, item: Item) -> Tensor:
        """Advance the momentum; the piece's part of the input of Newton–Schulz (without Nesterov
        the buffer itself).
        """
        self.check_piece(item)
        buffer, gradient, mu = item.state[_MOMENTUM], item.gradient, self.config.momentum
        if self.config.momentum_form == "ema":
            buffer.lerp_(gradient, 1 - mu)
            return gradient.lerp(buffer, mu) if self.config.nesterov else buffer
        buffer.mul_(mu).add_(gradient)
        return gradient.add(buffer, alpha=mu) if self.config.nesterov else buffer

    @torch.no_grad()
    def directions(self, wholes: Sequence[Whole]) -> list[Tensor]:
        """The orthogonalised matrices."""
        matrices = [whole.matrix for whole in wholes]
        return orthogonalize_many(matrices, self.config.newton_schulz, counter=self.counter)

    @torch.no_grad()
    def apply(self, item: Item, direction: Tensor) -> None:
        """Decay and add, with the scale of the logical shape."""
        rows, cols = item.logical_shape
        ratio = update_scale(self.config.scale, rows, cols) * self.config.extra_scale
        before = self.config.decay_order == "before_update"
        if before:
            item.parameter.mul_(1 - item.lr * item.wd)
        item.parameter.add_(direction, alpha=-(item.lr * ratio))
        if not before:
            item.parameter.mul_(1 - item.lr * item.wd)
