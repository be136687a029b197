"""SOAP: Adam in the eigenbasis of Shampoo's factors, in two published variants.

Owns ``SoapConfig``, ``Soap`` and its recipe (Vyas et al., arXiv 2409.11321). With G the gradient, L
and R the averages of G G^T and G^T G, and Q_L and Q_R their eigenbases:

``nikhilvyas``, the authors' code. The first step sets L = (1 - b) G G^T, R likewise, and the bases
by eigh, eigenvalues descending; it changes no weight and decays none. The step t after it:
  G' = Q_L^T G Q_R;  M <- beta1 M + (1 - beta1) G', in the rotated basis;  V likewise with G'^2
  W <- W - lr sqrt(1 - beta2^t) / (1 - beta1^t) Q_L (M / (sqrt(V) + eps)) Q_R^T
  W <- W - lr wd W
  then L and R take in G, and every precondition_frequency steps each basis is sorted by its
  Rayleigh quotients (V with it) and becomes the Q of the QR of L Q_L; M moves to the new basis.

``fb``, facebookresearch/optimizers' eigenvalue-corrected Shampoo. L and R take in G first; every
precondition_frequency steps from start_preconditioning_step on, the bases (I before) follow, by
eigh or by QR iterations; V as above, in the new bases; M is the average of G, not rotated:
  W <- W - lr (Q_L (Q_L^T M' Q_R / (sqrt(V / (1 - beta2^t)) + eps)) Q_R^T + wd W),
  M' = M / (1 - beta1^t)

Invariant: a dim above ``max_precond_dim`` has the identity for its basis, and no factor. All state
of the formula belongs to the whole; beside the pieces lies nothing but ``step``, by which the
variant that skips its first step knows on every piece that it does. Tested by
``tests/optim/test_soap.py``.

[Note: null spaces]

The factor of the longer dim is singular until enough gradients have come in. Adam is not invariant
under rotations of that null space, whose basis the decomposition picks from rounding: two runs
whose gradients differ in the last bit (another order of summation, another sharding) part there,
in the reference codes as well as here. Equal bits in give equal bits out. ``null_space="fixed"``
takes the basis of the null space that is nearest to the former basis instead, as good an eigenbasis
as any, and one that depends smoothly on the gradients. It is for comparisons in FP64: in FP32 the
line between small eigenvalues and rounding is not sharp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamuon.flags import flag
from megamuon.optim.eigen import (
    FactorError,
    check_finite,
    eigen,
    nearest,
    orthogonal_iteration,
    power_iteration,
)
from megamuon.optim.matrix_rule import MatrixRule, count_step
from megamuon.optim.ns_plan import CpuDtype
from megamuon.optim.optimizer import Item, Whole
from megamuon.optim.recipe import Recipe, Work

Variant = Literal["nikhilvyas", "fb"]
Basis = Literal["qr", "eigh"]
NullSpace = Literal["free", "fixed"]

_SQUARE, _STEP, _PIECE_STEP = "exp_avg_sq", "whole_step", "step"
_AVERAGE = {"nikhilvyas": "exp_avg_rotated", "fb": "exp_avg"}
_FACTORS = ("row_factor", "col_factor")
_BASES = ("row_basis", "col_basis")


@dataclass(frozen=True, kw_only=True)
class SoapConfig:
    """SOAP's conventions; the defaults are those of the authors' code.

    ``shampoo_beta``: of L and R; None is beta2. ``normalize_gradient``: bring each update to RMS 1
    (``nikhilvyas`` only). ``null_space``: see [Note: null spaces] (``nikhilvyas`` only). For ``fb``
    only: ``refresh``, whether a basis follows its factor by ``qr_iterations`` with ``qr_tolerance``
    (see ``orthogonal_iteration``) or is made anew by eigh; ``start_preconditioning_step`` (None is
    precondition_frequency). The reference's own settings of ``fb`` are beta1 0.9, eps 1e-12 and
    precondition_frequency 1.
    """

    variant: Variant = "nikhilvyas"
    beta1: float = 0.95
    beta2: float = 0.95
    shampoo_beta: float | None = None
    eps: float = 1e-8
    precondition_frequency: int = 10
    max_precond_dim: int = 10000
    bias_correction: bool = True
    normalize_gradient: bool = False
    null_space: NullSpace = "free"
    refresh: Basis = "qr"
    start_preconditioning_step: int | None = None
    qr_iterations: int = 1
    qr_tolerance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2", "shampoo_beta"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"SoapConfig.{name} = {value}: it lies in [0, 1)")
        if not self.eps > 0.0:
            raise ValueError(f"SoapConfig.eps = {self.eps}: it is a positive number")
        if not 0.0 <= self.qr_tolerance < 1.0:
            raise ValueError(f"SoapConfig.qr_tolerance = {self.qr_tolerance}: it lies in [0, 1)")
        for name in ("precondition_frequency", "max_precond_dim", "qr_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"SoapConfig.{name} = {getattr(self, name)}: it is at least 1")
        for name, choice, allowed in (
            ("variant", self.variant, ("nikhilvyas", "fb")),
            ("refresh", self.refresh, ("qr", "eigh")),
            ("null_space", self.null_space, ("free", "fixed")),
        ):
            if choice not in allowed:
                raise ValueError(
                    f"SoapConfig.{name} = {choice!r}: choose one of {', '.join(allowed)}"
                )
        if self.variant == "nikhilvyas" and self.start_preconditioning_step is not None:
            raise ValueError(
                f"SoapConfig.start_preconditioning_step = {self.start_preconditioning_step}: "
                "variant 'nikhilvyas' always starts with its second step; leave it None"
            )
        if self.variant == "nikhilvyas" and self.refresh != "qr":
            raise ValueError(
                f"SoapConfig.refresh = {self.refresh!r}: variant 'nikhilvyas' refreshes by QR; "
                "leave it 'qr', or choose variant 'fb'"
            )
        for name, default in (("normalize_gradient", False), ("null_space", "free")):
            if self.variant == "fb" and getattr(self, name) != default:
                raise ValueError(
                    f"SoapConfig.{name} = {getattr(self, name)!r}: variant 'fb' has no such rule; "
                    f"leave it {default!r}"
                )
        if self.start < self.precondition_frequency:
            raise ValueError(
                f"SoapConfig.start_preconditioning_step = {self.start_preconditioning_step}: it is "
                f"at least precondition_frequency = {self.precondition_frequency}, or None"
            )

    @property
    def factor_beta(self) -> float:
        """The beta of L and R."""
        return self.beta2 if self.shampoo_beta is None else self.shampoo_beta

    @property
    def start(self) -> int:
        """The step of ``fb``'s first bases."""
        start = self.start_preconditioning_step
        return self.precondition_frequency if start is None else start


@dataclass(frozen=True, kw_only=True)
class SoapFlags:
    """The command line's names of ``SoapConfig``."""

    soap_variant: Literal["nikhilvyas", "fb"] = flag(
        SoapConfig.variant, "SOAP as its authors wrote it, or as facebookresearch/optimizers does"
    )
    soap_beta1: float = flag(SoapConfig.beta1, "decay of SOAP's first moment", low=0.0, below=1.0)
    soap_beta2: float = flag(SoapConfig.beta2, "decay of SOAP's second moment", low=0.0, below=1.0)
    soap_shampoo_beta: float | None = flag(
        SoapConfig.shampoo_beta,
        "decay of SOAP's factors; --soap-beta2 when not given",
        low=0.0,
        below=1.0,
    )
    soap_eps: float = flag(SoapConfig.eps, "added to SOAP's denominator", above=0.0)
    soap_precondition_frequency: int = flag(
        SoapConfig.precondition_frequency,
        "steps from one refresh of SOAP's bases to the next",
        low=1,
    )
    soap_max_precond_dim: int = flag(
        SoapConfig.max_precond_dim, "dims above this keep the identity as their basis", low=1
    )


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    dim: int
    factor: Tensor
    basis: Tensor


class Soap(MatrixRule):
    """SOAP over whole matrices."""

    def __init__(self, config: SoapConfig) -> None:
        self.config = config
        self.skips_first = config.variant == "nikhilvyas"
        self.piece_names = (_PIECE_STEP,) if self.skips_first else ()
        self.whole_names = tuple(self.whole_shapes((1, 1)))

    def piece_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {_PIECE_STEP: ()} if self.skips_first else {}

    def whole_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        sizes = [size if size <= self.config.max_precond_dim else 0 for size in shape]
        square = {
            name: (size, size)
            for names in (_FACTORS, _BASES)
            for name, size in zip(names, sizes, strict=True)
        }
        return {_AVERAGE[self.config.variant]: shape, _SQUARE: shape, **square, _STEP: ()}

    def init_whole(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Zeros, but for the bases, which start as identities."""
        state = super().init_whole(shape, dtype, device)
        for name in _BASES:
            state[name].diagonal().fill_(1.0)
        return state

    @torch.no_grad()
    def prepare(self, item: Item) -> Tensor:
        """The gradient."""
        if self.skips_first:
            self.check_piece(item)
            count_step(item.state, _PIECE_STEP)
        return item.gradient

    @torch.no_grad()
    def directions(self, wholes: Sequence[Whole]) -> list[Tensor]:
        """The update of each with its bias correction; zeros for a step that initialises.
        FactorError for NaN or Inf in a factor.
        """
        for whole in wholes:
            self.check_whole(whole)
        one = self._authors if self.config.variant == "nikhilvyas" else self._corrected
        return [one(whole) for whole in wholes]

    def _authors(self, whole: Whole) -> Tensor:
        """``nikhilvyas``."""
        config, state, gradient = self.config, whole.state, whole.matrix
        step, fixed = count_step(state, _STEP) - 1, config.null_space == "fixed"
        if step == 0:
            self._accumulate(state, gradient)
            for side in self._sides(whole):
                ridged = side.factor.clone()
                ridged.diagonal().add_(1e-30)
                values, basis = (x.flip(-1) for x in _eigen(whole.name, side.name, ridged))
                side.basis.copy_(nearest(basis, values, side.basis) if fixed else basis)
            return torch.zeros_like(gradient)
        average, square = state[_AVERAGE["nikhilvyas"]], state[_SQUARE]
        rotated = _rotate(gradient, state)
        average.mul_(config.beta1).add_(rotated, alpha=1 - config.beta1)
        square.mul_(config.beta2).addcmul_(rotated, rotated, value=1 - config.beta2)
        update = _rotate_back(average / square.sqrt().add_(config.eps), state)
        if config.normalize_gradient:
            update = update / (1e-30 + update.square().mean().sqrt())
        if config.bias_correction:
            update = update * ((1 - config.beta2**step) ** 0.5 / (1 - config.beta1**step))
        self._accumulate(state, gradient)
        if step % config.precondition_frequency == 0:
            plain = _rotate_back(average, state)
            for side in self._sides(whole):
                check_finite("SOAP", whole.name, side.name, side.factor)
                basis, order = power_iteration(side.factor, side.basis, fixed_null_space=fixed)
                side.basis.copy_(basis)
                square.copy_(square.index_select(side.dim, order))
            average.copy_(_rotate(plain, state))
        return update

    def _corrected(self, whole: Whole) -> Tensor:
        """``fb``."""
        config, state, gradient = self.config, whole.state, whole.matrix
        step, start = count_step(state, _STEP), config.start
        corrected = config.bias_correction
        self._accumulate(state, gradient)
        if step == start or (step > start and step % config.precondition_frequency == 0):
            for side in self._sides(whole):
                factor = side.factor / (1 - config.factor_beta**step) if corrected else side.factor
                side.basis.copy_(self._followed(whole.name, side, factor))
        average, square = state[_AVERAGE["fb"]], state[_SQUARE]
        rotated = _rotate(gradient, state)
        square.mul_(config.beta2).addcmul_(rotated, rotated, value=1 - config.beta2)
        average.lerp_(gradient, 1 - config.beta1)
        scales = [1 - b**step if corrected else 1.0 for b in (config.beta1, config.beta2)]
        root = (square / scales[1]).sqrt_().add_(config.eps)
        return _rotate_back(_rotate(average / scales[0], state) / root, state)

    def _accumulate(self, state: dict[str, Tensor], gradient: Tensor) -> None:
        """Take the gradient into the factors."""
        for name, flat in zip(_FACTORS, (gradient, gradient.mT), strict=True):
            if state[name].numel():
                state[name].lerp_(flat @ flat.mT, 1 - self.config.factor_beta)

    def _followed(self, name: str, side: _Side, factor: Tensor) -> Tensor:
        """``fb``'s next basis of a side."""
        if self.config.refresh == "eigh":
            return _eigen(name, side.name, factor)[1]
        check_finite("SOAP", name, side.name, factor)
        return orthogonal_iteration(
            factor, side.basis, self.config.qr_iterations, self.config.qr_tolerance
        )

    def _sides(self, whole: Whole) -> list[_Side]:
        """The sides that have a basis."""
        names = zip((0, 1), _FACTORS, _BASES, ("row", "column"), strict=True)
        sides = [_Side(n, dim, whole.state[f], whole.state[b]) for dim, f, b, n in names]
        return [side for side in sides if side.basis.numel()]

    @torch.no_grad()
    def apply(self, item: Item, direction: Tensor) -> None:
        """The update and the decay, in the variant's order; nothing in a step that initialises."""
        if self.skips_first:
            if int(item.state[_PIECE_STEP]) == 1:
                return
            item.parameter.add_(direction, alpha=-item.lr)
            item.parameter.mul_(1 - item.lr * item.wd)
            return
        step = direction.add(item.parameter, alpha=item.wd) if item.wd else direction
        item.parameter.add_(step, alpha=-item.lr)


def _eigen(name: str, side: str, factor: Tensor) -> tuple[Tensor, Tensor]:
    check_finite("SOAP", name, side, factor)
    try:
        return eigen(factor)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise FactorError(
            f"SOAP item {name!r}: no eigenvectors of its {side} factor ({error}); lower the "
            "learning rate, or use FP64 masters"
        ) from error


def _rotate(matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Q_L^T X Q_R, without the sides that have no basis."""
    left, right = (state[name] for name in _BASES)
    matrix = left.mT @ matrix if left.numel() else matrix
    return matrix @ right if right.numel() else matrix


def _rotate_back(matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Q_L X Q_R^T."""
    left, right = (state[name] for name in _BASES)
    matrix = left @ matrix if left.numel() else matrix
    return matrix @ right.mT if right.numel() else matrix


def _from_flags(flags: SoapFlags, cpu_dtype: CpuDtype) -> SoapConfig:
    return SoapConfig(
        variant=flags.soap_variant,
        beta1=flags.soap_beta1,
        beta2=flags.soap_beta2,
        shampoo_beta=flags.soap_shampoo_beta,
        eps=flags.soap_eps,
        precondition_frequency=flags.soap_precondition_frequency,
        max_precond_dim=flags.soap_max_precond_dim,
    )


def _describe(settings: SoapConfig, flags: SoapFlags) -> list[str]:
    return [
        f"variant {settings.variant}",
        f"betas {settings.beta1}, {settings.beta2}",
        f"bases refreshed every {settings.precondition_frequency} steps",
    ]


def _work(settings: SoapConfig, rows: int, cols: int) -> Work:
    """Of each side of n with a basis, beside m: the factor, the turn there and back, 2 n^2 m each;
    every precondition_frequency updates its new basis, by a product (2 n^3) and a QR (8/3 n^3 with
    Q), or by eigenvectors (9 n^3), and with the former the turn of the momentum, 4 n^2 m.
    """
    products = factorizations = 0.0
    eigenvectors = settings.refresh == "eigh"
    for n, m in ((rows, cols), (cols, rows)):
        if n > settings.max_precond_dim:
            continue
        every = settings.precondition_frequency
        products += 6 * n * n * m + (0 if eigenvectors else 2 * n**3 + 4 * n * n * m) / every
        factorizations += (9 if eigenvectors else 8 / 3) * n**3 / every
    return Work(products=products, factorizations=factorizations)


SOAP = Recipe(
    name="soap",
    settings=SoapConfig,
    build=Soap,
    flags=SoapFlags,
    from_flags=_from_flags,
    describe=_describe,
    work=_work,
    period=lambda settings: settings.precondition_frequency,
)
