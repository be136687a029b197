"""Tensor parallelism as a declarative plan, executed on plain local tensors.

Owns the public names of the room. Invariant: a plan is pure data, made from the whole model alone;
applying it needs nothing but a tp rank and a process group, and leaves a module of plain local
tensors whose only parallel code is a fixed set of wrapped forwards. Families of other models,
overrides, linting and a validation mode have their place between the passes of ``plan``. Tested by
``tests/sharding`` and ``tests/distributed/test_tensor_parallel.py``.
"""

from megamuon.sharding.apply import apply_sharding
from megamuon.sharding.roles import Role
from megamuon.sharding.sharding_plan import (
    BoundaryEntry,
    ParameterEntry,
    ShardingPlan,
    plan_sharding,
)
from megamuon.sharding.templates import BoundaryType, Contract, Flow, ShardingError

__all__ = [
    "BoundaryEntry",
    "BoundaryType",
    "Contract",
    "Flow",
    "ParameterEntry",
    "Role",
    "ShardingError",
    "ShardingPlan",
    "apply_sharding",
    "plan_sharding",
]
