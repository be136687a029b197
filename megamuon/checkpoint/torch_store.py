"""What torch.distributed.checkpoint does in a save and in a load: plans, the exchange of them, and
the files through our storage.

Owns every call of it. Invariant: its failures are said in one line, the same on all ranks. No
module imports this one at its top: torch.distributed.checkpoint brings DTensor and sympy, which
take as long to import as torch itself, and ``--help``, the planner and a run without checkpoints
need none of it (``tests/test_start_up.py``). Tested by ``tests/checkpoint/test_store.py`` and
``tests/distributed/test_checkpoint_ranks.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megamuon.checkpoint.dcp_planner import PieceLoadPlanner, PieceSavePlanner
from megamuon.checkpoint.files import FileRecord
from megamuon.checkpoint.ranks import CheckpointError, Ranks, one_line
from megamuon.checkpoint.storage import PieceReader, PieceWriter
from megamuon.checkpoint.tensors import StoredTensor, TensorIndex


def write_pieces(pieces: Sequence[StoredTensor], directory: Path, ranks: Ranks) -> list[FileRecord]:
    """Write this rank's pieces, on rank 0 also the index; the files that this rank wrote.

    Collective. Raises CheckpointError on all ranks alike.
    """
    writer = PieceWriter(directory, ranks.rank)
    _through_torch(
        "write",
        ranks,
        lambda: dcp.save(
            {},
            storage_writer=writer,
            planner=PieceSavePlanner(pieces),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        ),
    )
    return writer.records


def read_pieces(
    wanted: Sequence[StoredTensor],
    directory: Path,
    index: TensorIndex,
    ranks: Ranks,
    *,
    strict: bool,
    ignore: Sequence[str],
) -> PieceLoadPlanner:
    """Fill ``wanted`` from ``directory``; the planner, which knows what was found and filled.

    Collective. ``strict`` and ``ignore`` are those of ``load``. Raises CheckpointError on all ranks
    alike.
    """
    planner = PieceLoadPlanner(wanted, index, source=str(directory), strict=strict, ignore=ignore)
    _through_torch(
        "load",
        ranks,
        lambda: dcp.load(
            {},
            storage_reader=PieceReader(directory, index),
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.group is None,
        ),
    )
    return planner


def _through_torch(step: str, ranks: Ranks, work: Callable[[], object]) -> None:
    """Run a call of torch.distributed.checkpoint and say its failure in one line, the same on all
    ranks.
    """
    try:
        with warnings.catch_warnings():
            # Torch warns whenever one process saves alone, which is what was asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            work()
    except CheckpointException as error:
        rank = min(error.failures)
        problem = one_line(error.failures[rank][0], rank)
        raise CheckpointError(f"checkpoint step '{step}' failed: {problem}") from error
    except RuntimeError as error:
        raise ranks.lost(step, None, error) from error
