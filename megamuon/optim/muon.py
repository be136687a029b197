"""Muon: momentum, Newton–Schulz, decoupled weight decay, scaled update.

Owns ``MuonConfig`` (every convention in which published Muons differ, as explicit fields), ``Muon``
and its recipe. Invariants: each matrix is orthogonalised once per update, whole, and its scale
comes from its logical shape; parameters and momentum change in place, views included;
``MuonConfig.torch_preset`` reproduces ``torch.optim.Muon`` bit for bit. The momentum lies beside
the pieces of a matrix; the whole has no state. Tested by ``tests/optim/test_muon.py``, against
``torch.optim.Muon`` itself among others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megamuon.flags import flag
from megamuon.optim.coefficients import Triple
from megamuon.optim.matrix_rule import MatrixRule
from megamuon.optim.newton_schulz import Counter, NewtonSchulzConfig, orthogonalize_many
from megamuon.optim.ns_plan import CpuDtype
from megamuon.optim.optimizer import Item, Whole
from megamuon.optim.recipe import Recipe

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


@dataclass(frozen=True, kw_only=True)
class MuonFlags:
    """The command line's names of ``MuonConfig``: Megatron's, with ours for the iteration."""

    muon_preset: Literal["megamuon", "torch"] = flag(
        "megamuon", "megamuon: the flags below; torch: bit for bit what torch.optim.Muon does"
    )
    muon_momentum: float = flag(MuonConfig.momentum, "Muon's momentum", low=0.0, below=1.0)
    muon_momentum_form: Literal["sgd", "ema"] = flag(
        MuonConfig.momentum_form,
        "sgd: buffer = momentum*buffer + gradient; ema: a weighted mean of the two",
    )
    muon_nesterov: bool = flag(
        MuonConfig.nesterov,
        "Nesterov momentum in Muon, on by default; --no-muon-nesterov turns it off",
        names=("--muon-nesterov",),
        off_names=("--no-muon-nesterov",),
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "spectral",
        "scale of the orthogonal update: sqrt(max(rows, cols)), sqrt(rows/cols) or sqrt(max(1, "
        "rows/cols))",
    )
    muon_extra_scale_factor: float = flag(0.2, "further factor of the update", above=0.0)
    muon_num_ns_steps: int = flag(5, "Newton-Schulz iterations", low=1)
    muon_coefficient_type: Literal[
        "polar_express",
        "quintic",
        "jordan",
        "polar_express_101",
        "polar_express_102",
        "megatron_polar_express",
        "cans",
        "deepseek_v4",
        "cubic5",
    ] = flag(
        NewtonSchulzConfig.coefficients,
        "coefficients of the Newton-Schulz polynomials: polar_express, the paper's with safety "
        "1.05 (gram-newton-schulz, DMuon); polar_express_101, the paper's own choices; "
        "polar_express_102, dion's; megatron_polar_express, what Megatron calls polar_express; "
        "quintic, Megatron's default; jordan, torch.optim.Muon's; cans, deepseek_v4 and cubic5, as "
        "in Megatron",
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = flag(
        "highest", "given to torch.set_float32_matmul_precision"
    )
    ns_form: Literal["auto", "standard", "gram"] = flag(
        NewtonSchulzConfig.form,
        "iterate on the matrix, on its Gram matrix, or on whichever costs less for the shape",
    )
    ns_dtype: Literal["auto", "fp32", "fp16", "bf16"] = flag(
        NewtonSchulzConfig.dtype,
        "dtype of the iteration; auto = fp16 on GPUs; on CPUs bf16 where a measurement at the "
        "start finds it faster on all ranks, else fp32; a resumed run keeps what it had (fp64 "
        "with --fp64)",
    )
    ns_restarts: tuple[int, ...] | None = flag(
        None,
        "iterations before which the Gram form restarts; computed from the coefficients when not "
        "given",
        low=1,
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


def _from_flags(flags: MuonFlags, cpu_dtype: CpuDtype) -> MuonConfig:
    """``--muon-preset torch`` starts from the conventions of ``torch.optim.Muon``."""
    if flags.muon_preset == "torch":
        preset = MuonConfig.torch_preset(
            momentum=flags.muon_momentum,
            nesterov=flags.muon_nesterov,
            ns_steps=flags.muon_num_ns_steps,
        )
        schulz = preset.newton_schulz
        if flags.muon_coefficient_type != "jordan":  # torch's own set
            schulz = replace(schulz, coefficients=flags.muon_coefficient_type)
        return replace(
            preset,
            scale=flags.muon_scale_mode,
            extra_scale=flags.muon_extra_scale_factor,
            newton_schulz=schulz,
        )
    return MuonConfig(
        momentum=flags.muon_momentum,
        nesterov=flags.muon_nesterov,
        momentum_form=flags.muon_momentum_form,
        scale=flags.muon_scale_mode,
        extra_scale=flags.muon_extra_scale_factor,
        newton_schulz=NewtonSchulzConfig(
            coefficients=flags.muon_coefficient_type,
            steps=flags.muon_num_ns_steps,
            form=flags.ns_form,
            dtype=flags.ns_dtype,
            cpu_dtype=cpu_dtype,
            restarts="auto" if flags.ns_restarts is None else flags.ns_restarts,
        ),
    )


def _describe(settings: MuonConfig, flags: Any) -> list[str]:
    schulz, nesterov = settings.newton_schulz, ", nesterov" if settings.nesterov else ""
    return [
        f"momentum {settings.momentum} ({settings.momentum_form}{nesterov})",
        f"scale {settings.scale} x {settings.extra_scale}",
        f"Newton-Schulz {flags.muon_coefficient_type}, {len(schulz.polynomials)} steps,"
        f" form {schulz.form}, dtype {schulz.dtype}",
        f"weight decay {flags.weight_decay}",
        f"clip {flags.clip_grad}",
    ]


MUON = Recipe(
    name="muon",
    settings=MuonConfig,
    build=Muon,
    flags=MuonFlags,
    from_flags=_from_flags,
    describe=_describe,
    newton_schulz=lambda settings: settings.newton_schulz,
)
