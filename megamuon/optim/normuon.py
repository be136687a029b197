"""NorMuon: Muon whose orthogonalised update is normalised neuron by neuron.

Owns ``NorMuonConfig``, ``NorMuon`` and its recipe (Li et al., "NorMuon: Making Muon more efficient
and scalable", arXiv 2510.05491). With o the orthogonalised matrix: v <- lerp(v, mean of o^2 along
each row, 1 - beta2); o <- o / (sqrt(v) + eps); o <- o times (its norm before / its norm now). Then
Muon's scale and decay. Invariant: the Frobenius norm of the update is Muon's.

The momentum lies beside the pieces; ``neuron_square``, v, belongs to the whole, since the means run
over whole rows (or columns) of what Newton–Schulz gave. Tested by ``tests/optim/test_normuon.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megamuon.flags import flag
from megamuon.optim.matrix_rule import MatrixRule
from megamuon.optim.muon import MUON, Muon, MuonConfig
from megamuon.optim.newton_schulz import Counter
from megamuon.optim.ns_plan import CpuDtype
from megamuon.optim.optimizer import Item, Whole
from megamuon.optim.recipe import Recipe

Neurons = Literal["rows", "longer_dim"]
EpsForm = Literal["add_to_root", "clamp_square"]

_SQUARE = "neuron_square"


@dataclass(frozen=True, kw_only=True)
class NorMuonConfig:
    """NorMuon's conventions; the defaults are those of the authors' code, but for ``muon``.

    ``muon``: momentum, Newton–Schulz, scale and decay, with this package's defaults (the authors
    take ``momentum_form="ema"`` and ``scale="original"``, dion ``"sgd"``). ``beta2``: 0.95
    everywhere. ``neurons``: what has a second moment of its own, the rows (the authors, dion) or
    the indices of the longer dim, rows for square matrices (NVIDIA Emerging-Optimizers).
    ``eps_form``: ``add_to_root`` divides by sqrt(v) + eps (the authors with 1e-10, dion with 1e-8),
    ``clamp_square`` by sqrt(max(v, eps)) (Emerging-Optimizers with 1e-8).
    """

    muon: MuonConfig = field(default_factory=MuonConfig)
    beta2: float = 0.95
    neurons: Neurons = "rows"
    eps: float = 1e-10
    eps_form: EpsForm = "add_to_root"

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta2 < 1.0:
            raise ValueError(f"NorMuonConfig.beta2 = {self.beta2}: it lies in [0, 1)")
        if not 0.0 < self.eps < 1.0:
            raise ValueError(
                f"NorMuonConfig.eps = {self.eps}: it lies in (0, 1), so that rows of zeros are safe"
            )
        for name, value, allowed in (
            ("neurons", self.neurons, ("rows", "longer_dim")),
            ("eps_form", self.eps_form, ("add_to_root", "clamp_square")),
        ):
            if value not in allowed:
                raise ValueError(
                    f"NorMuonConfig.{name} = {value!r}: choose one of {', '.join(allowed)}"
                )


@dataclass(frozen=True, kw_only=True)
class NorMuonFlags:
    """The command line's names of ``NorMuonConfig``, beside Muon's flags."""

    normuon_beta2: float = flag(
        NorMuonConfig.beta2,
        "decay of NorMuon's second moment of each row; the muon flags hold too",
        low=0.0,
        below=1.0,
    )
    normuon_eps: float = flag(
        NorMuonConfig.eps, "added to NorMuon's denominator", above=0.0, below=1.0
    )


class NorMuon(MatrixRule):
    """NorMuon. ``counter`` counts its Newton–Schulz calls."""

    def __init__(self, config: NorMuonConfig, *, counter: Counter | None = None) -> None:
        self.config = config
        self.muon = Muon(config.muon, counter=counter)
        self.counter = self.muon.counter
        self.piece_names = self.muon.piece_names
        self.whole_names = (_SQUARE,)

    def piece_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return self.muon.piece_shapes(shape)

    def whole_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        rows, cols = shape
        return {_SQUARE: (rows, 1) if self._mean_dim(rows, cols) == 1 else (1, cols)}

    def _mean_dim(self, rows: int, cols: int) -> int:
        """The dim along which each neuron's entries lie."""
        return 1 if self.config.neurons == "rows" or rows >= cols else 0

    @torch.no_grad()
    def prepare(self, item: Item) -> Tensor:
        """Muon's input of Newton–Schulz."""
        return self.muon.prepare(item)

    @torch.no_grad()
    def directions(self, wholes: Sequence[Whole]) -> list[Tensor]:
        """The orthogonalised matrices, normalised, with the norms that they had."""
        for whole in wholes:
            self.check_whole(whole)
        updates = self.muon.directions(wholes)
        return [self._normalise(o, w.state[_SQUARE]) for o, w in zip(updates, wholes, strict=True)]

    def _normalise(self, update: Tensor, square: Tensor) -> Tensor:
        eps = self.config.eps
        mean = update.square().mean(dim=self._mean_dim(*update.shape), keepdim=True)
        square.lerp_(mean, 1 - self.config.beta2)
        if self.config.eps_form == "add_to_root":
            root = square.sqrt().add_(eps)
        else:
            root = square.clamp(min=eps).sqrt_()
        result = update / root
        norms = [torch.linalg.vector_norm(x) for x in (update, result)]
        return result.mul_(norms[0] / (norms[1] + eps))

    @torch.no_grad()
    def apply(self, item: Item, direction: Tensor) -> None:
        """Muon's scale and decay."""
        self.muon.apply(item, direction)


def _from_flags(flags: NorMuonFlags, cpu_dtype: CpuDtype) -> NorMuonConfig:
    muon = MUON.from_flags(flags, cpu_dtype)
    return NorMuonConfig(muon=muon, beta2=flags.normuon_beta2, eps=flags.normuon_eps)


def _describe(settings: NorMuonConfig, flags: NorMuonFlags) -> list[str]:
    own = f"second moment {settings.beta2} per {settings.neurons}"
    return [own, *MUON.describe(settings.muon, flags)]


NORMUON = Recipe(
    name="normuon",
    settings=NorMuonConfig,
    build=NorMuon,
    flags=NorMuonFlags,
    from_flags=_from_flags,
    reads=("muon",),
    describe=_describe,
    newton_schulz=lambda settings: settings.muon.newton_schulz,
)
