"""All ranks run the same command line, or none runs.

Owns the comparison of the resolved flags over the ranks, before anything is built from them.
Invariant: ranks whose flags differ stop with one message that names flag and values; a flag that
only says where this machine keeps something (a path, a name) may differ, and so may the live
display, but whether there is something to load or to save may not: ranks do both together. Tested
by ``tests/distributed/test_bad_input.py``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megamuon.arguments import Config, specs_by_dest, values_from_config
from megamuon.training.failures import TrainingError

MAY_DIFFER = {"progress", "logging_level"}
GIVEN_ALIKE = {"load", "save", "pretrained_checkpoint"}  # on all ranks, or on none
EQUAL_TEXT = {"sample_prompt"}  # its length decides how many forwards the ranks make together
SHOWN = 5  # differences that the message lists


def shared_values(config: Config) -> dict[str, Any]:
    """Flags by dest that must be equal on all ranks: all but most free text and the display's.

    Of ``GIVEN_ALIKE`` it holds only whether the flag was given.
    """
    shared = {}
    for dest, value in values_from_config(config).items():
        spec = specs_by_dest()[dest]
        is_text = spec.value_type is str and not spec.choices
        if dest in GIVEN_ALIKE:
            shared[dest] = "not given" if value is None else "given"
        elif dest not in MAY_DIFFER and (not is_text or dest in EQUAL_TEXT):
            shared[dest] = value
    return shared


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
