"""The datasets of the flags, built by all ranks of a run together.

Owns the barrier and the comparison that the data room asks its caller for.  Invariant: ranks
whose indices differ stop with a message that names them, before the first batch.  Tested by
``tests/distributed/test_pretrain_ranks.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megamuon.agreement import Difference, compare, gather_objects
from megamuon.arguments import Config
from megamuon.data.build import build_train_valid_test
from megamuon.data.identity import data_identity
from megamuon.data.index_cache import Ranks
from megamuon.data.tokenizer import Tokenizer
from megamuon.mesh import launched_local_rank
from megamuon.training.builders import data_spec
from megamuon.training.failures import TrainingError


def build_datasets(
    config: Config, tokenizer: Tokenizer, samples: Sequence[int]
) -> tuple[Any, Any, Any]:
    """Training, validation and test set for ``samples`` of each; None where nothing is asked for.

    A collective.  Raises what the data room raises, and TrainingError where ranks see other data.
    """
    train, valid, test = samples
    spec = data_spec(config, tokenizer, (train, valid, test))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return build_train_valid_test(spec)
    rank, local = dist.get_rank(), launched_local_rank()
    ranks = Ranks(
        rank=rank,
        local_rank=rank if local is None else local,
        world_size=dist.get_world_size(),
    )
    return build_train_valid_test(spec, ranks=ranks, barrier=_barrier, compare=_compare)


def data_identities(config: Config, tokenizer: Tokenizer, samples: Sequence[int]) -> dict[str, Any]:
    """What the tokenizer and the datasets for ``samples`` are, by content, as JSON values; see
    ``megamuon.data.identity``.  By this process alone.
    """
    train, valid, test = samples
    spec = data_spec(config, tokenizer, (train, valid, test))
    return {"tokenizer": tokenizer.identity(), **data_identity(spec)}


def _barrier(label: str) -> None:
    gather_objects(label, dist.group.WORLD)


def _compare(label: str, digest: str) -> None:
    def differ(found: Sequence[Difference]) -> TrainingError:
        return TrainingError(
            f"{label}: ranks {[one.rank for one in found[:8]]} have other contents than rank 0: let"
            " all ranks read the same files"
        )

    compare({label: digest}, dist.group.WORLD, differ)
