"""What an owner does with its matrices: Muon, NorMuon, Shampoo, SOAP, AdamW, SGD, the schedules.

Everything here works on whole local tensors; nothing communicates.
"""

from megamuon.optim.adamw import AdamW, AdamWConfig, Sgd, SgdConfig
from megamuon.optim.coefficients import best_restarts, coefficient_names, coefficient_set
from megamuon.optim.eigen import FactorError
from megamuon.optim.muon import Muon, MuonConfig, update_scale
from megamuon.optim.newton_schulz import (
    Counter,
    NewtonSchulzConfig,
    orthogonalize,
    orthogonalize_many,
)
from megamuon.optim.normuon import NorMuon, NorMuonConfig
from megamuon.optim.optimizer import Item, MatrixOptimizer, OwnerOptimizer, Whole
from megamuon.optim.recipe import Recipe, StateSizes, Work, state_sizes
from megamuon.optim.registry import RECIPES, register, rest_of
from megamuon.optim.schedule import Schedule, ScheduleConfig
from megamuon.optim.shampoo import GraftingConfig, Shampoo, ShampooConfig
from megamuon.optim.soap import Soap, SoapConfig

__all__ = [
    "RECIPES",
    "Recipe",
    "StateSizes",
    "Work",
    "register",
    "rest_of",
    "state_sizes",
    "AdamW",
    "AdamWConfig",
    "Counter",
    "FactorError",
    "GraftingConfig",
    "Item",
    "MatrixOptimizer",
    "Muon",
    "MuonConfig",
    "NewtonSchulzConfig",
    "NorMuon",
    "NorMuonConfig",
    "OwnerOptimizer",
    "Schedule",
    "ScheduleConfig",
    "Sgd",
    "SgdConfig",
    "Shampoo",
    "ShampooConfig",
    "Soap",
    "SoapConfig",
    "Whole",
    "best_restarts",
    "coefficient_names",
    "coefficient_set",
    "orthogonalize",
    "orthogonalize_many",
    "update_scale",
]
