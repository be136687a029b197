"""Shampoo: each block of a matrix preconditioned from both sides.

Owns ``ShampooConfig``, ``Shampoo`` and its recipe, after the 2-D case of
facebookresearch/optimizers (Shi et al., arXiv 2309.06497; Gupta et al., arXiv 1802.09568). With G
the gradient, w = 1 if beta2 = 1 else 1 - beta2, and t the step from 1 on, for each block:

  L <- beta2 L + w G G^T,  R <- beta2 R + w G^T G
  every precondition_frequency steps, from start_preconditioning_step on:
      L' = (L / (1 - beta2^t))^(-1/4), R' likewise (no bias correction if beta2 = 1); I before
  E = EMA of G with beta1;  F = (beta3 E + (1 - beta3) G, with the former E) / (1 - beta3
      beta1^(t-1));  with beta3 = beta1 that is E / (1 - beta1^t)
  P = L' F R', and with grafting P <- P_graft before the start step, then |P_graft| / |P| P
  W <- W - lr (P + wd W)   (decoupled decay)

Invariant: a block's state depends on nothing but the block's gradients. The factors need raw
gradients and whole blocks, so nothing lies beside the pieces and the whole has all the state:
``exp_avg`` and ``graft_square`` of the matrix's shape, factors and inverse roots (see
[Note: blocks]), ``failed_inversions`` and ``whole_step``. Tested by
``tests/optim/test_shampoo.py``.

[Note: blocks]

Dims above ``max_preconditioner_dim`` are split, as the reference does, and each block has factors
of its own. ``row_factor`` is (rows, number of column blocks x block height): the factor of block
(i, j) lies at the rows of i, from column j x height on; ``col_factor`` is likewise (cols, number of
row blocks x block width). A short last block leaves a rest of zeros.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megamuon.flags import flag
from megamuon.optim.eigen import FactorError, Perturbation, check_finite, inverse_root
from megamuon.optim.matrix_rule import MatrixRule, count_step
from megamuon.optim.ns_plan import CpuDtype
from megamuon.optim.optimizer import Item, Whole
from megamuon.optim.recipe import Recipe, Work

Decay = Literal["decoupled", "l2", "corrected", "independent"]
Graft = Literal["none", "sgd", "adagrad", "rmsprop", "adam"]

_AVERAGE, _SQUARE, _STEP, _FAILED = "exp_avg", "graft_square", "whole_step", "failed_inversions"
_FACTORS = ("row_factor", "col_factor")
_ROOTS = ("row_inverse_root", "col_inverse_root")
_SIDES = ("row", "column")
_TINY = 1e-16  # the reference's guard of the grafting quotient


@dataclass(frozen=True, kw_only=True)
class GraftingConfig:
    """The rule whose step sizes Shampoo takes: V <- beta2 V + (1 - beta2) G^2 (adagrad: V + G^2),
    P_graft = F / (sqrt(V) + eps), with V / (1 - beta2^t) for adam; sgd is P_graft = F. Defaults
    of the reference's AdamPreconditionerConfig.
    """

    rule: Graft = "none"
    beta2: float = 0.999
    eps: float = 1e-10

    def __post_init__(self) -> None:
        allowed = ("none", "sgd", "adagrad", "rmsprop", "adam")
        if self.rule not in allowed:
            raise ValueError(
                f"GraftingConfig.rule = {self.rule!r}: choose one of {', '.join(allowed)}"
            )
        if not 0.0 < self.beta2 < 1.0:
            raise ValueError(f"GraftingConfig.beta2 = {self.beta2}: it lies in (0, 1)")
        if not self.eps > 0.0:
            raise ValueError(f"GraftingConfig.eps = {self.eps}: it is a positive number")

    @property
    def squares(self) -> bool:
        """Whether the rule keeps a second moment."""
        return self.rule in ("adagrad", "rmsprop", "adam")


@dataclass(frozen=True, kw_only=True)
class ShampooConfig:
    """Shampoo's conventions; the defaults are those of facebookresearch/optimizers.

    ``beta1`` 0 turns the momentum off; ``beta3`` None is beta1. ``start_preconditioning_step`` None
    is precondition_frequency. ``perturbation``: where eps enters (see ``inverse_root``).
    ``tolerated_failures``: inversions of a matrix that may fail in a row, its former roots staying
    in use; one more raises FactorError. ``decay``: ``decoupled`` P + wd W, ``l2`` G + wd W,
    ``corrected`` P + wd (lr / peak_lr) W, ``independent`` P + (wd / peak_lr) W.
    """

    beta1: float = 0.9
    beta2: float = 1.0
    beta3: float | None = None
    eps: float = 1e-12
    inverse_exponent: float = 0.25
    perturbation: Perturbation = "after"
    precondition_frequency: int = 1
    start_preconditioning_step: int | None = None
    bias_correction: bool = True
    grafting: GraftingConfig = field(default_factory=GraftingConfig)
    max_preconditioner_dim: int = 1024
    tolerated_failures: int = 3
    decay: Decay = "decoupled"
    peak_lr: float | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("beta1", 0.0, 1.0), ("beta3", 0.0, 1.0)):
            value = getattr(self, name)
            if value is not None and not low <= value < high:
                raise ValueError(f"ShampooConfig.{name} = {value}: it lies in [0, 1)")
        if not 0.0 < self.beta2 <= 1.0:
            raise ValueError(f"ShampooConfig.beta2 = {self.beta2}: it lies in (0, 1]; 1 is a sum")
        for name in ("eps", "inverse_exponent"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"ShampooConfig.{name} = {value}: it is a positive number")
        for name, least in (
            ("precondition_frequency", 1),
            ("max_preconditioner_dim", 1),
            ("tolerated_failures", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(
                    f"ShampooConfig.{name} = {getattr(self, name)}: it is at least {least}"
                )
        if self.start < self.precondition_frequency:
            raise ValueError(
                f"ShampooConfig.start_preconditioning_step = {self.start_preconditioning_step}: it "
                f"is at least precondition_frequency = {self.precondition_frequency}, or None"
            )
        for name, choice, allowed in (
            ("perturbation", self.perturbation, ("after", "before")),
            ("decay", self.decay, ("decoupled", "l2", "corrected", "independent")),
        ):
            if choice not in allowed:
                raise ValueError(
                    f"ShampooConfig.{name} = {choice!r}: choose one of {', '.join(allowed)}"
                )
        needs_peak = self.decay in ("corrected", "independent")
        if needs_peak and not (self.peak_lr is not None and self.peak_lr > 0.0):
            raise ValueError(
                f"ShampooConfig.peak_lr = {self.peak_lr}: decay {self.decay!r} needs the "
                "schedule's largest learning rate, a positive number"
            )

    @property
    def start(self) -> int:
        """The step of the first inversion."""
        start = self.start_preconditioning_step
        return self.precondition_frequency if start is None else start


@dataclass(frozen=True, kw_only=True)
class ShampooFlags:
    """The command line's names of ``ShampooConfig``."""

    shampoo_beta1: float = flag(
        ShampooConfig.beta1, "decay of Shampoo's momentum", low=0.0, below=1.0
    )
    shampoo_beta2: float = flag(
        ShampooConfig.beta2, "decay of Shampoo's factors; 1 sums them", above=0.0, high=1.0
    )
    shampoo_eps: float = flag(ShampooConfig.eps, "added to the factors' eigenvalues", above=0.0)
    shampoo_precondition_frequency: int = flag(
        ShampooConfig.precondition_frequency,
        "steps from one inversion of the factors to the next",
        low=1,
    )
    shampoo_max_preconditioner_dim: int = flag(
        ShampooConfig.max_preconditioner_dim,
        "dims above this are split into blocks with factors of their own",
        low=1,
    )
    shampoo_grafting: Literal["none", "sgd", "adagrad", "rmsprop", "adam"] = flag(
        GraftingConfig.rule, "rule whose step sizes Shampoo takes; none = its own"
    )


@dataclass(frozen=True, slots=True)
class _Block:
    rows: slice
    cols: slice
    factors: tuple[tuple[slice, slice], tuple[slice, slice]]  # where its factors lie: row, column


def _blocks(rows: int, cols: int, largest: int) -> Iterator[_Block]:
    """The blocks of a matrix. See [Note: blocks]."""
    height, width = min(rows, largest), min(cols, largest)
    for i, top in enumerate(range(0, rows, height)):
        bottom = min(top + height, rows)
        for j, left in enumerate(range(0, cols, width)):
            right = min(left + width, cols)
            vertical, horizontal = slice(top, bottom), slice(left, right)
            beside = slice(j * height, j * height + bottom - top)
            below = slice(i * width, i * width + right - left)
            yield _Block(vertical, horizontal, ((vertical, beside), (horizontal, below)))


class Shampoo(MatrixRule):
    """Shampoo over whole matrices."""

    def __init__(self, config: ShampooConfig) -> None:
        self.config = config
        self.piece_names = ()
        self.whole_names = tuple(self.whole_shapes((1, 1)))

    def piece_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}

    def whole_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        rows, cols = shape
        largest = self.config.max_preconditioner_dim
        row = (rows, min(rows, largest) * math.ceil(cols / largest))
        col = (cols, min(cols, largest) * math.ceil(rows / largest))
        shapes = dict(zip(_FACTORS + _ROOTS, (row, col, row, col), strict=True))
        if self.config.beta1:
            shapes[_AVERAGE] = (rows, cols)
        if self.config.grafting.squares:
            shapes[_SQUARE] = (rows, cols)
        return {**shapes, _FAILED: (), _STEP: ()}

    def init_whole(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Zeros, but for the inverse roots, which start as identities."""
        state = super().init_whole(shape, dtype, device)
        rows, cols = shape
        for block in _blocks(rows, cols, self.config.max_preconditioner_dim):
            for name, place in zip(_ROOTS, block.factors, strict=True):
                state[name][place].diagonal().fill_(1.0)
        return state

    @torch.no_grad()
    def prepare(self, item: Item) -> Tensor:
        """The gradient, with the decay if that is l2."""
        if self.config.decay == "l2" and item.wd:
            return item.gradient.add(item.parameter, alpha=item.wd)
        return item.gradient

    @torch.no_grad()
    def directions(self, wholes: Sequence[Whole]) -> list[Tensor]:
        """P of each. FactorError for NaN or Inf in a factor, and for too many failures."""
        for whole in wholes:
            self.check_whole(whole)
        return [self._direction(whole) for whole in wholes]

    def _direction(self, whole: Whole) -> Tensor:
        config, state, gradient = self.config, whole.state, whole.matrix
        step = count_step(state, _STEP)
        start = config.start
        blocks = list(_blocks(*gradient.shape, config.max_preconditioner_dim))
        self._accumulate(state, gradient, blocks)
        if step == start or (step > start and step % config.precondition_frequency == 0):
            self._invert(whole, blocks, step)
        filtered = self._filtered(state, gradient, step)
        graft = self._graft(state, filtered, step)
        if graft is not None and step < start:
            return graft
        result = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        for block in blocks:
            left, right = (state[n][p] for n, p in zip(_ROOTS, block.factors, strict=True))
            part = left @ filtered[block.rows, block.cols] @ right
            if graft is not None:
                wanted = torch.linalg.vector_norm(graft[block.rows, block.cols])
                part = part * (wanted / (torch.linalg.vector_norm(part) + _TINY))
            result[block.rows, block.cols] = part
        return result

    def _accumulate(
        self, state: dict[str, Tensor], gradient: Tensor, blocks: Sequence[_Block]
    ) -> None:
        """Add the gradient to the factors and to the grafting rule's second moment."""
        beta2 = self.config.beta2
        weight = 1.0 if beta2 == 1.0 else 1 - beta2
        for block in blocks:
            part = gradient[block.rows, block.cols]
            for name, place, product in zip(
                _FACTORS, block.factors, (part @ part.mT, part.mT @ part), strict=True
            ):
                state[name][place].mul_(beta2).add_(product, alpha=weight)
        if self.config.grafting.squares:
            summed = self.config.grafting.rule == "adagrad"
            decay = 1.0 if summed else self.config.grafting.beta2
            state[_SQUARE].mul_(decay).addcmul_(
                gradient, gradient, value=1.0 if summed else 1 - decay
            )

    def _invert(self, whole: Whole, blocks: Sequence[_Block], step: int) -> None:
        """New inverse roots of all blocks. One that fails leaves its former root in use."""
        config, state = self.config, whole.state
        correct = config.bias_correction and config.beta2 < 1.0
        correction = 1 - config.beta2**step if correct else 1.0
        failure: RuntimeError | None = None
        for block in blocks:
            for side in range(2):
                place = block.factors[side]
                factor = state[_FACTORS[side]][place] / correction
                check_finite("Shampoo", whole.name, _SIDES[side], factor)
                try:
                    root = inverse_root(
                        factor, config.inverse_exponent, config.eps, config.perturbation
                    )
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    failure = error
                    continue
                check_finite("Shampoo", whole.name, f"inverted {_SIDES[side]}", root)
                state[_ROOTS[side]][place] = root
        if failure is None:
            state[_FAILED].zero_()
            return
        failed = count_step(state, _FAILED)
        message = (
            f"Shampoo item {whole.name!r}: step {step} could not invert its factors ({failure}), "
            f"for the {failed}. time in a row"
        )
        if failed > config.tolerated_failures:
            raise FactorError(
                f"{message}; ShampooConfig.tolerated_failures = {config.tolerated_failures}. Raise "
                "eps, or lower the learning rate"
            ) from failure
        warnings.warn(f"{message}; the former inverse roots stay in use", stacklevel=2)

    def _filtered(self, state: dict[str, Tensor], gradient: Tensor, step: int) -> Tensor:
        """The gradient's moving average, bias-corrected; advances the average."""
        beta1 = self.config.beta1
        beta3 = beta1 if self.config.beta3 is None else self.config.beta3
        if not beta1:
            return gradient
        average = state[_AVERAGE]
        filtered = average if beta3 == beta1 else average.lerp(gradient, 1 - beta3)
        average.lerp_(gradient, 1 - beta1)
        if self.config.bias_correction:
            return filtered / (1 - beta3 * beta1 ** (step - 1))
        return filtered

    def _graft(self, state: dict[str, Tensor], filtered: Tensor, step: int) -> Tensor | None:
        """P_graft; None without grafting."""
        grafting = self.config.grafting
        if grafting.rule == "none":
            return None
        if grafting.rule == "sgd":
            return filtered.clone()
        correction = 1 - grafting.beta2**step if grafting.rule == "adam" else 1.0
        return filtered / (state[_SQUARE] / correction).sqrt_().add_(grafting.eps)

    @torch.no_grad()
    def apply(self, item: Item, direction: Tensor) -> None:
        """W - lr (P + decay W)."""
        decay = 0.0 if self.config.decay == "l2" else item.wd
        if self.config.peak_lr is not None:
            if self.config.decay == "corrected":
                decay = item.wd * item.lr / self.config.peak_lr
            elif self.config.decay == "independent":
                decay = item.wd / self.config.peak_lr
        step = direction.add(item.parameter, alpha=decay) if decay else direction
        item.parameter.add_(step, alpha=-item.lr)


def _from_flags(flags: ShampooFlags, cpu_dtype: CpuDtype) -> ShampooConfig:
    return ShampooConfig(
        beta1=flags.shampoo_beta1,
        beta2=flags.shampoo_beta2,
        eps=flags.shampoo_eps,
        precondition_frequency=flags.shampoo_precondition_frequency,
        max_preconditioner_dim=flags.shampoo_max_preconditioner_dim,
        grafting=GraftingConfig(rule=flags.shampoo_grafting),
    )


def _describe(settings: ShampooConfig, flags: ShampooFlags) -> list[str]:
    return [
        f"betas {settings.beta1}, {settings.beta2}",
        f"inverted every {settings.precondition_frequency} steps",
        f"blocks up to {settings.max_preconditioner_dim}",
        f"grafting {settings.grafting.rule}",
    ]


def _work(settings: ShampooConfig, rows: int, cols: int) -> Work:
    """Of each block h x w: both factors and both sides of the product, 2 (h^2 w + h w^2) each;
    every precondition_frequency updates its roots, by eigenvectors (9 n^3) and a product (2 n^3).
    """
    products = factorizations = 0.0
    every = settings.precondition_frequency
    for block in _blocks(rows, cols, settings.max_preconditioner_dim):
        h, w = block.rows.stop - block.rows.start, block.cols.stop - block.cols.start
        products += 4 * (h * h * w + h * w * w) + 2 * (h**3 + w**3) / every
        factorizations += 9 * (h**3 + w**3) / every
    return Work(products=products, factorizations=factorizations)


SHAMPOO = Recipe(
    name="shampoo",
    settings=ShampooConfig,
    build=Shampoo,
    flags=ShampooFlags,
    from_flags=_from_flags,
    describe=_describe,
    work=_work,
    period=lambda settings: settings.precondition_frequency,
)
