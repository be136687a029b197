"""All ranks run the same command line, or none runs.

Owns the comparison of the resolved flags over the ranks, before anything is built from them.
Invariant: ranks whose flags differ stop with one message that names flag and values; a flag that
only says where this machine keeps something (a path, a name) may differ, and so may the live
display. Tested by ``tests/distributed/test_bad_input.py``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megamuon.arguments import Config, specs_by_dest, values_from_config
from megamuon.training.failures import TrainingError

MAY_DIFFER = {"progress", "logging_level"}
SHOWN = 5  # differences that the message lists


def shared_values(config: Config) -> dict[str, Any]:
    """Flags by dest that must be equal on all ranks: all but free text and the display's."""
    return {
        dest: value
        for dest, value in values_from_config(config).items()
        if dest not in MAY_DIFFER
        and (specs_by_dest()[dest].value_type is not str or specs_by_dest()[dest].choices)
    }


def check_same_flags(config: Config) -> None:
    """Raise TrainingError on every rank where a rank's flags differ from rank 0's.

    Collective: one exchange of objects over the default group; nothing on one rank.
    """
    if dist.get_world_size() == 1:
        return
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, shared_values(config))
    problems = [
        f"{specs_by_dest()[dest].flag} is {everyone[0][dest]!r} on rank 0 and {value!r} on rank"
        f" {rank}"
        for rank, values in enumerate(everyone)
        for dest, value in values.items()
        if value != everyone[0][dest]
    ]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise TrainingError(
            f"the flags of the ranks differ: {'; '.join(problems[:SHOWN])}{more}."
            " Start all ranks with the same command line"
        )
