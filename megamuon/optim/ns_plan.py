"""The plan of a Newton–Schulz call for one shape: form, dtype, restarts and kernel.

Owns ``NewtonSchulzConfig``, ``NewtonSchulzPlan`` and the ``Counter`` of what ran. Invariant: a plan
depends only on the configuration, the shape, the kind of device and the input's dtype, so every
rank and every restart of a run comes to the same one. What a CPU is fast at is part of the
configuration (``cpu_dtype``): whoever measures it (``ns_probe``) sees to it that all ranks agree.
Tested by ``tests/optim/test_ns_plan.py``.
"""

from __future__ import annotations

from collections import Counter as Multiset
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch

from megamuon.kernels import symmetric
from megamuon.optim.coefficients import (
    HALF_CONDITION,
    REJECT_CONDITION,
    CoefficientSet,
    Triple,
    automatic_restarts,
    coefficient_set,
    even_restarts,
)

Form = Literal["auto", "standard", "gram"]
DtypeName = Literal["auto", "fp64", "fp32", "fp16", "bf16"]
CpuDtype = Literal["fp32", "bf16"]
Normalization = Literal["max", "clamp", "add"]

# On CPUs small matrices spend their time in calls. Measured with AVX512-BF16 on one thread:
# below so many rows FP32 is faster than BF16 (50 x 87: 0.18 against 0.43 ms) ...
LEAST_ROWS = 112
# ... and the further calls of the Gram form cost as much as so many multiplications and additions
# (50 x 87: 0.22 against 0.18 ms of the standard form).
_CALLS = {torch.float32: 2.4e6, torch.float64: 2.4e6, torch.bfloat16: 2e7, torch.float16: 2e7}

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(kw_only=True)
class Counter:
    """Counts what ran, for tests and logs: ``matrices`` in all, the same ``by_kernel`` (as
    "gram/fp16" or "standard/fp32/symmetric"), and ``fallbacks``, matrices whose Gram form broke
    and that were iterated again.
    """

    matrices: int = 0
    fallbacks: int = 0
    by_kernel: Multiset[str] = field(default_factory=Multiset)

    def count(self, kernel: str, matrices: int) -> None:
        self.matrices += matrices
        self.by_kernel[kernel] += matrices


@dataclass(frozen=True, kw_only=True)
class NewtonSchulzPlan:
    """What a configuration comes to for one shape on one kind of device."""

    form: Literal["standard", "gram"]
    dtype: torch.dtype
    restarts: tuple[int, ...]
    symmetric: bool

    @property
    def kernel(self) -> str:
        return f"{self.form}/{_NAMES[self.dtype]}" + ("/symmetric" if self.symmetric else "")


@dataclass(frozen=True, kw_only=True)
class NewtonSchulzConfig:
    """How to orthogonalise.

    ``coefficients``: a set's name, or a tuple of (a, b, c). ``steps``: None takes the set's own
    number.
    ``form``: auto takes the Gram form where its aspect ratio alpha = long / short pays, alpha > 3 s
    / (1 + s), and on CPUs only where that saves more than its further calls cost.
    ``dtype``: auto iterates in FP64 for FP64 input, else in FP16 on CUDA, in ``cpu_dtype`` on CPUs
    and in FP32 elsewhere.
    ``cpu_dtype``: of auto on CPUs, for matrices of at least ``LEAST_ROWS`` rows and columns;
    smaller ones are iterated in FP32. BF16 pays where the CPU multiplies it natively (AMX,
    AVX512-BF16), which ``ns_probe.bf16_gain`` measures; elsewhere it is emulated, hundreds of
    times slower. A Gram form that was asked for and is not safe in BF16 stays in FP32.
    ``normalization``: ``max`` divides by max|G|, then by the norm (scale-invariant); ``clamp``
    divides by max(norm, eps) and ``add`` by norm + eps, as other implementations do. ``eps``: None
    takes the set's own. ``norm_in_iteration_dtype`` casts before taking the norm, as
    torch.optim.Muon does; not with ``max``.
    ``restarts``: of the Gram form; auto computes them from the coefficients.
    ``symmetric_fraction``: s, the time of a symmetric product over that of a full one; None takes
    the device's.
    ``symmetric_kernel``: False multiplies whole matrices even where the symmetric product is
    faster.
    """

    coefficients: str | tuple[Triple, ...] = "polar_express"
    steps: int | None = None
    form: Form = "auto"
    dtype: DtypeName = "auto"
    cpu_dtype: CpuDtype = "fp32"
    normalization: Normalization = "max"
    eps: float | None = None
    norm_in_iteration_dtype: bool = False
    restarts: Literal["auto"] | tuple[int, ...] = "auto"
    symmetric_fraction: float | None = None
    symmetric_kernel: bool = True

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("form", self.form, ("auto", "standard", "gram")),
            ("dtype", self.dtype, ("auto", *_DTYPES)),
            ("cpu_dtype", self.cpu_dtype, ("fp32", "bf16")),
            ("normalization", self.normalization, ("max", "clamp", "add")),
        ):
            if value not in allowed:
                raise ValueError(
                    f"NewtonSchulzConfig.{name} = {value!r}: choose one of {', '.join(allowed)}"
                )
        if self.norm_in_iteration_dtype and self.normalization == "max":
            raise ValueError(
                "norm_in_iteration_dtype needs normalization 'clamp' or 'add', and it is 'max'"
            )
        if self.symmetric_fraction is not None and not 0.5 <= self.symmetric_fraction <= 1.0:
            raise ValueError(
                f"symmetric_fraction = {self.symmetric_fraction}: it lies between 0.5 and 1"
            )
        steps = len(self.polynomials)  # raises on an unknown name or an impossible number of steps
        if self.restarts != "auto" and (
            list(self.restarts) != sorted(set(self.restarts))
            or not all(0 < position < steps for position in self.restarts)
        ):
            raise ValueError(
                f"restarts = {self.restarts}: positions must rise and lie in 1..{steps - 1} "
                f"for {steps} steps"
            )
        if self.form == "gram" and self.dtype != "auto":
            self._restarts_or_raise(_DTYPES[self.dtype])

    @property
    def named_set(self) -> CoefficientSet:
        """The named set, or the given coefficients as one (its last polynomial repeats)."""
        if isinstance(self.coefficients, str):
            return coefficient_set(self.coefficients)
        return CoefficientSet(
            name="custom",
            polynomials=self.coefficients,
            default_steps=len(self.coefficients),
            extension="repeat",
            source="given by the caller",
        )

    @property
    def polynomials(self) -> tuple[Triple, ...]:
        """One (a, b, c) per iteration."""
        chosen = self.named_set
        return chosen.sequence(chosen.default_steps if self.steps is None else self.steps)

    def plan(
        self, rows: int, cols: int, *, device_type: str, input_dtype: torch.dtype
    ) -> NewtonSchulzPlan:
        """Form, dtype, restarts and kernel for (rows, cols) matrices. ValueError if ``form`` is
        ``gram`` and the coefficients have no safe Gram form in the dtype.
        """
        return _plan(self, min(rows, cols), max(rows, cols), device_type, input_dtype)

    def _restarts_or_raise(self, dtype: torch.dtype) -> tuple[int, ...]:
        restarts = _gram_restarts(self, dtype)
        if restarts is None:
            raise ValueError(
                f"coefficients {self.coefficients!r}, {len(self.polynomials)} steps and "
                f"restarts {self.restarts!r} have no safe Gram form in {_NAMES[dtype]}: set form "
                "to 'standard' or 'auto', or dtype to fp32 (BF16 needs two restarts)"
            )
        return restarts


@lru_cache(maxsize=256)
def _gram_restarts(config: NewtonSchulzConfig, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Restarts of the Gram form in ``dtype``, or None if none make it safe. BF16 keeps 8 bits of
    the accumulated factor, which one restart leaves too inaccurate on square and on decaying
    spectra, so it takes two at least.
    """
    bf16 = dtype == torch.bfloat16
    if config.restarts != "auto":
        return None if bf16 and len(config.restarts) < 2 else config.restarts
    half = dtype in (torch.float16, torch.bfloat16)
    found = automatic_restarts(
        config.polynomials, limit=HALF_CONDITION if half else REJECT_CONDITION
    )
    if found is not None and bf16 and len(found.positions) < 2:
        found = even_restarts(config.polynomials, 2, found.condition)
    return None if found is None else found.positions


def _saved(short: int, long: int, fraction: float, steps: int, restarts: int) -> float:
    """Multiplications and additions that the Gram form saves: [T (2as + 2s + 2a)] - [(1 + r) 2a
    (1 + s) + s (2T + 6 (T - 1 - r))] times n^3, with a = long / n; where it is 0, a = 3s / (1 + s).
    """
    ratio = long / short
    each = 2.0 * ratio * (1.0 + fraction) - 6.0 * fraction
    return (steps - 1 - restarts) * each * short**3


def _dtype(
    config: NewtonSchulzConfig, short: int, device_type: str, input_dtype: torch.dtype
) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if input_dtype == torch.float64:
        return torch.float64
    if device_type == "cuda":
        return torch.float16
    if device_type == "cpu" and short >= LEAST_ROWS:
        asked_for_gram = config.form == "gram" or config.restarts != "auto"
        dtype = _DTYPES[config.cpu_dtype]
        if not asked_for_gram or _gram_restarts(config, dtype) is not None:
            return dtype
    return torch.float32


@lru_cache(maxsize=4096)
def _plan(
    config: NewtonSchulzConfig, short: int, long: int, device_type: str, input_dtype: torch.dtype
) -> NewtonSchulzPlan:
    dtype = _dtype(config, short, device_type, input_dtype)
    use_symmetric = config.symmetric_kernel and symmetric.pays(short, device_type, dtype)
    fraction = config.symmetric_fraction
    if fraction is None:
        fraction = symmetric.time_fraction(short, device_type, dtype) if use_symmetric else 1.0
    restarts: tuple[int, ...] | None = None
    if config.form == "gram":
        restarts = config._restarts_or_raise(dtype)
    elif config.form == "auto" and long * (1.0 + fraction) > 3.0 * fraction * short:
        restarts = _gram_restarts(config, dtype)
        if restarts is not None and device_type == "cpu":
            saved = _saved(short, long, fraction, len(config.polynomials), len(restarts))
            restarts = restarts if saved > _CALLS[dtype] else None
    return NewtonSchulzPlan(
        form="standard" if restarts is None else "gram",
        dtype=dtype,
        restarts=restarts or (),
        symmetric=use_symmetric,
    )
