"""What an owner does with its matrices: Newton–Schulz, Muon, AdamW, SGD and the schedules.

Everything here works on whole local tensors; nothing communicates.
"""

from megamuon.optim.adamw import AdamW, AdamWConfig, Sgd, SgdConfig
from megamuon.optim.coefficients import best_restarts, coefficient_names, coefficient_set
from megamuon.optim.muon import Muon, MuonConfig, update_scale
from megamuon.optim.newton_schulz import (
    Counter,
    NewtonSchulzConfig,
    orthogonalize,
    orthogonalize_many,
)
from megamuon.optim.optimizer import Item, OwnerOptimizer
from megamuon.optim.schedule import Schedule, ScheduleConfig

__all__ = [
    "AdamW",
    "AdamWConfig",
    "Counter",
    "Item",
    "Muon",
    "MuonConfig",
    "NewtonSchulzConfig",
    "OwnerOptimizer",
    "Schedule",
    "ScheduleConfig",
    "Sgd",
    "SgdConfig",
    "best_restarts",
    "coefficient_names",
    "coefficient_set",
    "orthogonalize",
    "orthogonalize_many",
    "update_scale",
]
