"""Checkpoints in and out of the forms of other programs.

Owns what a Hugging Face folder of a decoder means here: its ``config.json`` as values of flags, its
tensors as a ``TensorIndex`` that any layout on any ranks is filled from, and the way back.
Invariants: nothing is unpickled and nothing is guessed from a path; every field of a config and
every stored tensor is used, known to be harmless, or refused by name.  Knows flags as values by
dest and no ranks. Tested by ``tests/conversion``.
"""

from megamuon.conversion.families import FAMILIES, ConversionError, Family
from megamuon.conversion.hf_config import (
    config_from_flags,
    flags_from_config,
    model_type_of,
    read_config,
)
from megamuon.conversion.hf_index import folder_index

__all__ = [
    "FAMILIES",
    "ConversionError",
    "Family",
    "config_from_flags",
    "flags_from_config",
    "folder_index",
    "model_type_of",
    "read_config",
]
