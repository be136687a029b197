"""``RuntimeConfig``: the settings of the owner runtime.

Owns ``RuntimeConfig`` and ``OptimizerSettings``: plain values, no flags. Invariant: every rank
builds an equal configuration; its text takes part in the exchange of the plan's digest. Tested by
``tests/runtime/test_config.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch

from megamuon.matrices import Kind, LogicalParameter
from megamuon.optim import (
    RECIPES,
    MatrixOptimizer,
    NewtonSchulzConfig,
    OwnerOptimizer,
    Recipe,
    rest_of,
    state_sizes,
)
from megamuon.optim.optimizer import MASTER_DTYPES
from megamuon.ownership.estimate import StateBytes
from megamuon.ownership.settings import PlannerSettings
from megamuon.ownership.units import UNIT_THRESHOLD
from megamuon.runtime.schedule import Lagged, Schedule

FABRICS = ("auto", "host", "nccl")
COMPUTE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# What an operator of csrc/ can be made with, in bytes and in slots of a ring.
ALIGNMENT = 256
LARGEST_CHUNK = 1 << 20
MOST_SLOTS = 64


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Which optimizer goes where.

    ``matrices`` names the recipe of declared matrices; ``matrix`` are its settings, where it is one
    of whole matrices, and ``rest`` those of the recipe that trains everything else (AdamW; under
    "sgd", SGD). None takes the recipe's defaults.
    """

    matrices: str = "muon"
    matrix: Any = None
    rest: Any = None
    clip: float = 1.0  # global gradient norm; 0 switches clipping off
    decay_qk_norm: bool = False  # weight decay on the gains of query and key norms too
    count_zeros: bool = False  # of the averaged gradients, in each step's result

    def __post_init__(self) -> None:
        if self.matrices not in RECIPES:
            raise ValueError(f"matrices={self.matrices!r}: choose one of {', '.join(RECIPES)}")
        recipe = self.recipe
        rest = rest_of(self.matrices)
        wanted = {"matrix": recipe.settings if recipe.whole else None, "rest": rest.settings}
        for name, kind in wanted.items():
            value = getattr(self, name)
            if value is None and kind is not None:
                object.__setattr__(self, name, kind())  # frozen, and a default depends on another
            elif value is not None and type(value) is not kind:
                wants = f"a {kind.__name__}" if kind is not None else "None"
                raise ValueError(f"{name}={value!r}: matrices={self.matrices!r} takes {wants}")

    @property
    def recipe(self) -> Recipe:
        """Of declared matrices."""
        return RECIPES[self.matrices]

    @property
    def whole_matrices(self) -> bool:
        """Whether declared matrices are trained by an optimizer that needs them whole."""
        return self.recipe.whole

    @property
    def newton_schulz(self) -> NewtonSchulzConfig | None:
        """The iteration that an update of a matrix is made of; None where it is made of others."""
        orthogonalizes = self.recipe.newton_schulz
        return None if orthogonalizes is None else orthogonalizes(self.matrix)

    def matrix_optimizer(self) -> MatrixOptimizer:
        """What trains declared matrices, where it needs them whole."""
        return self.recipe.build(self.matrix)

    def elementwise_optimizer(self) -> OwnerOptimizer:
        """What trains everything that is no matrix, and matrices that are not needed whole."""
        return rest_of(self.matrices).build(self.rest)

    def state_bytes(self, width: int = 4) -> StateBytes:
        """What the optimizers keep, with ``width`` bytes to a value: those of a master."""
        flat = state_sizes(self.elementwise_optimizer()).piece * width
        if not self.whole_matrices:
            return StateBytes(flat=flat, piece=flat)
        sizes = state_sizes(self.matrix_optimizer())
        whole = lru_cache(lambda rows, cols: sizes.whole(rows, cols) * width)
        return StateBytes(flat=flat, piece=sizes.piece * width, whole=whole)

    def decays(self, parameter: LogicalParameter) -> bool:
        """Megatron's rule: no decay on biases and on 1-D parameters; query and key norms by
        flag.
        """
        if parameter.kind is Kind.QK_NORM:
            return self.decay_qk_norm
        return parameter.kind is not Kind.VECTOR and len(parameter.shape) > 1


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How a model is sharded and its bytes move."""

    # 3 gathers weights twice per pass, 2 keeps them from forward to backward, 1 keeps them always
    zero_stage: int = 3
    collectives: str = "ready"  # falls back to grouped, with a note, where there is no fabric
    fabric: str = "auto"  # what collectives="ready" runs on: one of FABRICS
    ring_slots: int = 8  # ready: chunks on the way between two ranks, per source
    chunk_bytes: int = 65536  # ready: of gathers and reductions
    publish_tile_bytes: int = 524288  # ready: of new weights on the way to other replicas
    collective_deadline: float = 600.0  # ready: seconds without progress until all ranks abort
    matrix_update: str = "owner"  # or gather: every rank works on every whole matrix (line B)
    publish: str = "async"  # HSDP: or sync, a step returns when all leaders have the new weights
    compute_dtype: torch.dtype = torch.float32
    gather_dtype: torch.dtype | None = None  # what gathers and publishes send; None: compute_dtype
    reduce_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32  # float64 in tests
    owner_layout: bool = True  # False: every parameter in even slices
    schedule: Schedule = field(default_factory=Lagged)  # when gathers and reductions start
    unit_threshold: int = UNIT_THRESHOLD
    merge_experts: bool = False
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    ns_cost: str = "measured"  # or file, or closed-form
    ns_cost_file: str | None = None
    ns_cost_cache: str | None = None  # a directory; measured times are kept there
    check_collective_order: bool = False  # every call says which layer group it is for
    seed: int = 1234
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)

    def __post_init__(self) -> None:
        if self.zero_stage not in (1, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage}: choose 1, 2 or 3")
        for name, choices in (
            ("matrix_update", ("owner", "gather")),
            ("publish", ("async", "sync")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose {' or '.join(choices)}")
        self._check_operators()
        if (
            self.gather_dtype is not None
            and self.gather_dtype.itemsize > self.compute_dtype.itemsize
        ):
            raise ValueError(
                f"gather_dtype={self.gather_dtype}: wider than the compute dtype"
                f" {self.compute_dtype}, which would only be rounded on arrival"
            )
        for name in ("compute_dtype", "gather_dtype", "reduce_dtype"):
            if (dtype := getattr(self, name)) not in (None, *COMPUTE_DTYPES):
                raise ValueError(
                    f"{name}={dtype}: choose torch.bfloat16 or torch.float32 (float64 for tests);"
                    " FP16 would need loss scaling, which there is none of"
                )
        if self.master_dtype not in MASTER_DTYPES:
            raise ValueError(
                f"master_dtype={self.master_dtype}: masters are torch.float32 (float64 for tests);"
                " compute_dtype=torch.bfloat16 is what makes a model compute in BF16"
            )
        wide = torch.float64 in (self.compute_dtype, self.master_dtype, self.reduce_dtype)
        dtypes = {self.compute_dtype, self.master_dtype, self.reduce_dtype}
        if wide and dtypes != {torch.float64}:
            raise ValueError(
                f"float64 replaces every dtype or none, got {sorted(map(str, dtypes))}"
            )
        if self.owner_layout == (self.matrix_update == "gather"):
            if self.owner_layout:
                raise ValueError(
                    "matrix_update='gather' puts slices together: it goes with owner_layout=False"
                )
            if self.optimizer.whole_matrices:
                raise ValueError(
                    f"{self.optimizer.matrices} needs whole matrices: owner_layout=False goes with"
                    " matrix_update='gather', or with matrices='adam'"
                )

    def _check_operators(self) -> None:
        """What the operators of ``collectives="ready"`` can be built with."""
        if self.fabric not in FABRICS:
            raise ValueError(f"fabric={self.fabric!r}: choose one of {', '.join(FABRICS)}")
        if not 1 <= self.ring_slots <= MOST_SLOTS:
            raise ValueError(f"ring_slots={self.ring_slots}: choose 1 to {MOST_SLOTS}")
        for name, size in (
            ("chunk_bytes", self.chunk_bytes),
            ("publish_tile_bytes", self.publish_tile_bytes),
        ):
            if size < ALIGNMENT or size % ALIGNMENT:
                raise ValueError(f"{name}={size}: choose a multiple of {ALIGNMENT} bytes")
        if self.chunk_bytes > LARGEST_CHUNK:
            raise ValueError(
                f"chunk_bytes={self.chunk_bytes}: choose at most {LARGEST_CHUNK} bytes"
            )
        if not (math.isfinite(self.collective_deadline) and self.collective_deadline > 0):
            raise ValueError(
                f"collective_deadline={self.collective_deadline}: choose seconds, more than 0"
            )
        if self.collectives == "ready" and not self.owner_layout:
            raise ValueError(
                "collectives='ready' moves owners' segments: it goes with owner_layout=True; use"
                " collectives='grouped' for even slices"
            )

    def dtypes_of(self, own: str) -> tuple[torch.dtype, torch.dtype]:
        """What a group computes in and what its gathers send; ``own`` is the dtype that its
        parameters declare, or "". An island is never narrower than the run around it.
        """
        if not own:
            return self.compute_dtype, self.sent_dtype
        compute = torch.promote_types(getattr(torch, own), self.compute_dtype)
        return compute, compute

    @property
    def sent_dtype(self) -> torch.dtype:
        """What gathers and publishes send."""
        return self.gather_dtype or self.compute_dtype


# Fields of RuntimeConfig that ranks may differ in, with the reason; all others are compared.
MAY_DIFFER: Mapping[str, str] = {
    "ns_cost_file": "a path of this machine; what it says is compared as part of the plan",
    "ns_cost_cache": "a path of this machine; what it holds is combined over the ranks",
    "owner_layout": "decides the parameters' layouts, which are compared as such",
    "unit_threshold": "compared as part of the plan, which names the unit that differs",
    "merge_experts": "compared as part of the plan, which names the unit that differs",
    "planner": "compared as part of the plan, which names the setting that differs",
}


def config_texts(config: RuntimeConfig) -> dict[str, str]:
    """Every setting that all ranks must share, as text by name; those of the optimizers one by
    one.
    """
    texts = {
        entry.name: _text(getattr(config, entry.name))
        for entry in fields(config)
        if entry.name not in MAY_DIFFER and entry.name != "optimizer"
    }
    for entry in fields(config.optimizer):
        value = getattr(config.optimizer, entry.name)
        parts = fields(value) if is_dataclass(value) else ()
        texts |= {
            f"{entry.name}.{part.name}": repr(getattr(value, part.name)) for part in parts
        } or {entry.name: repr(value)}
    return texts


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
