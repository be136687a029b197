"""Newton–Schulz coefficient sets, and the restarts that the Gram form needs for each.

Owns the named sets (the polynomials, the safety factors baked into them, the factor that their
source puts on the norm, and what happens past the end of the list) and the search for restart
positions. Invariant: restarts are computed from the coefficients; no list of positions is written
down anywhere. A set's name stands for all of its choices, because "Polar Express with safety 1.01,
1.02 or 1.05, with or without the last polynomial, with or without a factor in the norm" are
different algorithms. Tested by ``tests/optim/test_coefficients.py``, which recomputes the published
slopes and restart tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np

Triple = tuple[float, float, float]  # (a, b, c) of p(x) = a x + b x^3 + c x^5
Extension = Literal["cycle", "repeat", "exact"]

REJECT_CONDITION = 1e8  # a restart list whose max|q| / min|q| reaches this is unsafe in any dtype
HALF_CONDITION = (
    1e3  # 16-bit storage rounds q to about 1e-3, so a wider spread leaves no digit of min|q|
)
_SPURIOUS_EIGENVALUE = 4e-4  # most negative eigenvalue that half-precision rounding puts into X X^T
_GRID_POINTS = 10_000
_LEAST_LOG10 = -10.0


@dataclass(frozen=True, kw_only=True)
class CoefficientSet:
    """One named algorithm. ``extension`` says what follows when more steps are asked for than
    are listed: ``cycle`` starts over, ``repeat`` keeps the last polynomial, ``exact`` accepts
    only the listed number. ``norm_factor`` multiplies the Frobenius norm; ``eps`` is the
    source's constant for the eps normalisations.
    """

    name: str
    polynomials: tuple[Triple, ...]
    default_steps: int
    extension: Extension
    norm_factor: float = 1.0
    eps: float = 1e-7
    source: str

    def sequence(self, steps: int) -> tuple[Triple, ...]:
        """The polynomials of ``steps`` iterations, in order. ValueError if the set does not
        allow that number.
        """
        listed = len(self.polynomials)
        if steps < 1:
            raise ValueError(f"Newton–Schulz steps = {steps}: at least 1 is needed")
        if self.extension == "exact" and steps != listed:
            raise ValueError(
                f"Newton–Schulz steps = {steps}, but the coefficients {self.name!r} are one "
                f"whole of {listed} "
                f"steps: set the steps to {listed} or choose another set"
            )
        if self.extension == "cycle":
            return tuple(self.polynomials[i % listed] for i in range(steps))
        return tuple(self.polynomials[min(i, listed - 1)] for i in range(steps))


@dataclass(frozen=True)
class Restarts:
    """Iterations before which the Gram form restarts, and the worst max|q| / min|q| that they
    leave.
    """

    positions: tuple[int, ...]
    condition: float


def _with_safety(polynomials: Sequence[Triple], safety: float) -> tuple[Triple, ...]:
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in polynomials)


_JORDAN: Triple = (3.4445, -4.7750, 2.0315)
# Polar Express (arXiv 2505.16932) for singular values in [1e-3, 1]: the optimal odd quintics, step
# by step.
_POLAR_EXPRESS_RAW: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_POLAR_EXPRESS_102: tuple[Triple, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# The paper's eight, divided by the powers of 1.01 and rounded, as Megatron's optimizers list them.
_MEGATRON_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)

_SETS: Mapping[str, CoefficientSet] = MappingProxyType(
    {
        one.name: one
        for one in (
            CoefficientSet(
                name="polar_express",
                polynomials=_with_safety(_POLAR_EXPRESS_RAW[:5], 1.05),
                default_steps=5,
                extension="repeat",
                source="Polar Express, safety 1.05 on all five (gram-newton-schulz)",
            ),
            CoefficientSet(
                name="polar_express_101",
                polynomials=_with_safety(_POLAR_EXPRESS_RAW[:-1], 1.01) + _POLAR_EXPRESS_RAW[-1:],
                default_steps=5,
                extension="repeat",
                norm_factor=1.01,
                source=(
                    "Polar Express, safety 1.01 on all but the eighth and on the norm (the paper)"
                ),
            ),
            CoefficientSet(
                name="polar_express_102",
                polynomials=_POLAR_EXPRESS_102,
                default_steps=5,
                extension="repeat",
                norm_factor=1.02,
                source=(
                    "Polar Express, safety 1.02 baked into all but the last and on the norm (dion)"
                ),
            ),
            CoefficientSet(
                name="megatron_polar_express",
                polynomials=_MEGATRON_POLAR_EXPRESS,
                default_steps=5,
                extension="repeat",
                eps=1e-15,
                source=(
                    "Megatron's polar_express: safety 1.01 on all but the eighth, rounded to four"
                    " digits, no factor on the norm (emerging-optimizers)"
                ),
            ),
            CoefficientSet(
                name="quintic",
                polynomials=(
                    (4.0848, -6.8946, 2.9270),
                    (3.9505, -6.3029, 2.6377),
                    (3.7418, -5.5913, 2.3037),
                    (2.8769, -3.1427, 1.2046),
                    (2.8366, -3.0525, 1.2012),
                ),
                default_steps=5,
                extension="cycle",
                source="five quintics of You; Megatron's default",
            ),
            CoefficientSet(
                name="jordan",
                polynomials=(_JORDAN,),
                default_steps=5,
                extension="cycle",
                source="Jordan et al., Muon; torch.optim.Muon",
            ),
            CoefficientSet(
                name="cans",
                polynomials=(
                    (8.4703, -25.1081, 18.6293),
                    (4.1828, -3.1087, 0.5806),
                    (3.9619, -2.9541, 0.5630),
                    (3.2866, -2.4647, 0.5074),
                    (2.2737, -1.6447, 0.4162),
                ),
                default_steps=5,
                extension="repeat",
                source="Chebyshev-accelerated Newton–Schulz",
            ),
            CoefficientSet(
                name="deepseek_v4",
                polynomials=(_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
                default_steps=10,
                extension="repeat",
                source="eight Jordan steps, then two that settle on 1",
            ),
            CoefficientSet(
                name="cubic5",
                polynomials=(
                    (3.3656576, -3.3420992, 0.0),
                    (2.5744352, -1.4957376, 0.0),
                    (2.5368962, -1.4312570, 0.0),
                    (2.4418906, -1.2764040, 0.0),
                    (2.2230472, -0.9630650, 0.0),
                ),
                default_steps=5,
                extension="exact",
                source="arXiv 2606.00371",
            ),
        )
    }
)
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "you": "quintic",
        "asym5": "quintic",
        "simple": "jordan",
        "legacy": "jordan",
        "original": "jordan",
        "polar_express_105": "polar_express",
        "deepseekv4": "deepseek_v4",
    }
)


def coefficient_names() -> tuple[str, ...]:
    """Every accepted name, aliases last."""
    return (*_SETS, *_ALIASES)


def coefficient_set(name: str) -> CoefficientSet:
    """The set called ``name`` (or its alias).  ValueError lists the names that exist."""
    found = _SETS.get(_ALIASES.get(name, name))
    if found is None:
        raise ValueError(
            f"unknown Newton–Schulz coefficients {name!r}: choose one of "
            f"{', '.join(coefficient_names())}"
        )
    return found


def apply_polynomials(values: np.ndarray, coefficients: Sequence[Triple]) -> np.ndarray:
    """The scalar map that the iteration applies to each singular value, in the dtype of
    ``values``.
    """
    for a, b, c in coefficients:
        square = values * values
        values = values * (a + square * (b + square * c))
    return values


def _spread(q: np.ndarray) -> float:
    magnitude = np.abs(q)
    ratio = float(magnitude.max() / magnitude.min())
    return ratio if np.isfinite(ratio) else float("inf")


def _search(
    coefficients: tuple[Triple, ...],
    index: int,
    left: int,
    state: tuple[np.ndarray, np.ndarray, np.ndarray],
    worst: float,
    chosen: tuple[int, ...],
    best: Restarts,
) -> Restarts:
    """Depth-first over the positions; a branch ends as soon as it is no better than the best,
    since the worst spread along a branch only grows.
    """
    if worst >= best.condition and best.positions:
        return best
    total = len(coefficients)
    if index == total:
        return Restarts(chosen, worst) if left == 0 else best
    branches = []
    if left < total - index or index == 0:
        branches.append(False)
    if left and index > 0:
        branches.append(True)
    a, b, c = coefficients[index]
    for restart in branches:
        x, r, q = state
        if restart:
            x = q * x
            r, q = x * x - _SPURIOUS_EIGENVALUE, np.ones_like(x)
        z = a + r * (b + r * c)
        next_q, next_r = q * z, r * z * z
        best = _search(
            coefficients,
            index + 1,
            left - restart,
            (x, next_r, next_q),
            max(worst, _spread(next_q)),
            (*chosen, index) if restart else chosen,
            best,
        )
    return best


@lru_cache(maxsize=256)
def best_restarts(coefficients: tuple[Triple, ...], count: int) -> Restarts:
    """The ``count`` restart positions (each in 1..steps-1) that keep the Gram form's accumulated
    factor q tamest.

    The rule is the autotuner's of Gram Newton–Schulz: singular values x from 1 to 1e-10; at the
    start and at each restart r = x^2 - 4e-4 (the spurious negative eigenvalues of rounding); q and
    r follow the iteration in float64; minimise the maximum over iterations of max|q| / min|q|. An
    overflow counts as infinite. ValueError if ``count`` positions do not exist.
    """
    if not 0 <= count < len(coefficients):
        raise ValueError(
            f"{count} restarts asked of {len(coefficients)} iterations: choose 0 to "
            f"{len(coefficients) - 1}"
        )
    x = np.logspace(0.0, _LEAST_LOG10, _GRID_POINTS)
    start = (x, x * x - _SPURIOUS_EIGENVALUE, np.ones_like(x))
    nothing = Restarts((), float("inf"))
    with np.errstate(all="ignore"):
        return _search(coefficients, 0, count, start, 0.0, (), nothing)


def restart_condition(coefficients: Sequence[Triple], positions: Sequence[int]) -> float:
    """The worst max|q| / min|q| over all iterations with these restarts, by the rule of
    ``best_restarts``.
    """
    x = np.logspace(0.0, _LEAST_LOG10, _GRID_POINTS)
    r, q, worst = x * x - _SPURIOUS_EIGENVALUE, np.ones_like(x), 0.0
    with np.errstate(all="ignore"):
        for index, (a, b, c) in enumerate(coefficients):
            if index in positions and index:
                x = q * x
                r, q = x * x - _SPURIOUS_EIGENVALUE, np.ones_like(x)
            z = a + r * (b + r * c)
            q, r = q * z, r * z * z
            worst = max(worst, _spread(q))
    return worst


@lru_cache(maxsize=256)
def even_restarts(coefficients: tuple[Triple, ...], count: int, limit: float) -> Restarts | None:
    """Among lists of ``count`` restarts whose condition is at most ``limit``, the one whose
    longest stretch without a restart, then whose last stretch, is shortest: rounding drifts with
    the stretch, which matters in BF16.
    """
    total = len(coefficients)
    candidates = []
    for positions in itertools.combinations(range(1, total), count):
        condition = restart_condition(coefficients, positions)
        if condition <= limit:
            edges = (0, *positions, total)
            stretches = [stop - start for start, stop in itertools.pairwise(edges)]
            candidates.append((max(stretches), stretches[-1], condition, positions))
    if not candidates:
        return None
    _, _, condition, positions = min(candidates)
    return Restarts(positions, condition)


@lru_cache(maxsize=256)
def automatic_restarts(
    coefficients: tuple[Triple, ...], *, limit: float = REJECT_CONDITION
) -> Restarts | None:
    """The best list of the fewest restarts (one at least) whose condition stays below ``limit``;
    None if no number of restarts does, or if there are fewer than two iterations.
    """
    for count in range(1, len(coefficients)):
        found = best_restarts(coefficients, count)
        if found.condition < limit:
            return found
    return None
