"""Model definitions: plain modules that know nothing of ranks, owners or runtimes.

Owns the public names of the room.  Invariant: nothing here imports the runtime, and no module holds
parallel code. Tested by ``tests/models``.
"""

from megamuon.models.build import gpt_config_from_flags
from megamuon.models.config import GPTConfig, ModelConfigError, RecomputeConfig
from megamuon.models.flops import count_parameters, flops_per_token
from megamuon.models.gpt import GPT, DecoderLayer
from megamuon.models.presets import PRESETS, register_preset

__all__ = [
    "GPT",
    "PRESETS",
    "DecoderLayer",
    "GPTConfig",
    "ModelConfigError",
    "RecomputeConfig",
    "count_parameters",
    "flops_per_token",
    "gpt_config_from_flags",
    "register_preset",
]
