"""The training loop and what a run does around it.

Owns ``pretrain`` and what entry scripts need to write their providers.  Invariant: it stands on
top of all other rooms, and none of them imports it.  Tested by ``tests/training`` and
``tests/distributed/test_pretrain_*.py``.
"""

from megamuon.training.builders import data_spec, model_config, tokenizer_of
from megamuon.training.command_line import parse_command_line
from megamuon.training.datasets import build_datasets, data_identities
from megamuon.training.pretrain import pretrain
from megamuon.training.sampling import sample_text
from megamuon.training.source import read_checkpoint_args

__all__ = [
    "build_datasets",
    "data_identities",
    "data_spec",
    "model_config",
    "parse_command_line",
    "pretrain",
    "read_checkpoint_args",
    "sample_text",
    "tokenizer_of",
]
