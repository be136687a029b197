"""The owner runtime: layer groups, hooks, buffers and the optimizer step.

Owns the public names of the room. It is the only room that knows the others. Tested by
``tests/runtime`` and ``tests/distributed``.
"""

from megamuon.runtime.config import OptimizerSettings, RuntimeConfig
from megamuon.runtime.runtime import Runtime
from megamuon.runtime.shard import shard
from megamuon.runtime.step_parts import StepResult
from megamuon.runtime.trainable import TrainableRuntime

__all__ = [
    "OptimizerSettings",
    "Runtime",
    "RuntimeConfig",
    "StepResult",
    "TrainableRuntime",
    "shard",
]
