"""Checkpoints: layout-free, atomic, verified.  What a save and a load are, whatever the sharding.

Owns the format on disk and the agreement of the ranks about it; knows pieces of named tensors and
JSON documents, and nothing of models, optimizers or plans.  ``store`` has the two calls; the
other files are its parts. Tested by ``tests/checkpoint`` and
``tests/distributed/test_checkpoint_ranks.py``.
"""

from megamuon.checkpoint.loading import (
    Documents,
    Loaded,
    latest,
    load,
    load_indexed,
    read_documents,
    read_index,
    read_tensor,
)
from megamuon.checkpoint.progress import append_progress
from megamuon.checkpoint.ranks import CheckpointError, Ranks
from megamuon.checkpoint.retention import clean_stale
from megamuon.checkpoint.rng import capture_rng, restore_rng
from megamuon.checkpoint.saving import SaveHandle, SaveReport, save
from megamuon.checkpoint.store import Checkpoints
from megamuon.checkpoint.tensors import StoredTensor
from megamuon.checkpoint.tracker import RELEASE, Iteration, read_tracker

__all__ = [
    "RELEASE",
    "CheckpointError",
    "Checkpoints",
    "Documents",
    "Iteration",
    "Loaded",
    "Ranks",
    "SaveHandle",
    "SaveReport",
    "StoredTensor",
    "append_progress",
    "capture_rng",
    "clean_stale",
    "latest",
    "load",
    "load_indexed",
    "read_documents",
    "read_index",
    "read_tensor",
    "read_tracker",
    "restore_rng",
    "save",
]
