"""The command line of an entry script: parsed, or explained; and the same on all ranks.

Owns what happens to a bad command line: every problem on a line of its own by the first rank of
a node, exit code 2. Owns which flags ranks must share, before anything is built from them: all but
those that only say where a machine keeps something (a path, a name) and the live display; whether
there is something to load or to save is shared, since ranks do both together. Tested by
``tests/training/test_command_line.py`` and ``tests/distributed/test_bad_input.py``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megamuon.agreement import Difference, compare
from megamuon.arguments import (
    Config,
    ConfigError,
    ExtraArgsProvider,
    ParsedConfig,
    parse_config,
    specs_by_dest,
    values_from_config,
)
from megamuon.data.blend import parse_blend
from megamuon.mesh import MeshError, launched_as, local_world_size, mesh_from_environment
from megamuon.metrics import write_line
from megamuon.models import PRESETS
from megamuon.training.failures import TrainingError
from megamuon.training.folders import read_folder_args
from megamuon.training.source import read_checkpoint_args

# Flags that ranks need not share, or share in part; see ``shared_values``.
MAY_DIFFER = {"progress", "logging_level"}
GIVEN_ALIKE = {"load", "save", "pretrained_checkpoint"}  # on all ranks, or on none
EQUAL_TEXT = {"sample_prompt"}  # its length decides how many forwards the ranks make together
SHOWN = 5  # differences that the message lists

EXIT_USAGE = 2
# A launcher ends the other ranks when the first one fails: let local rank 0 speak before that.  A
# rank that still lives afterwards was started by hand, and its line may be the only one.
SILENT_SECONDS = 8.0  # a busy node's launcher takes seconds to notice


def data_problems(config: Config) -> list[str]:
    """What is wrong with the word lists of the data flags, read as the datasets will read them."""
    flags = config.data
    lists = {
        "--data-path": flags.data_path,
        "--train-data-path": flags.train_data_path,
        "--valid-data-path": flags.valid_data_path,
        "--test-data-path": flags.test_data_path,
    }
    problems: list[str] = []
    for flag, words in lists.items():
        try:
            if words:
                parse_blend(words, flag)
        except ValueError as error:
            problems.append(str(error))
    return problems


def parse_command_line(
    argv: Sequence[str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
) -> ParsedConfig:
    """The configuration, or SystemExit(2) after every problem was printed on standard error.

    ``extra_args_provider(parser)`` adds a script's own flags; their values are in ``.extra``.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        parsed = parse_config(
            words,
            presets=PRESETS,
            world_size=mesh_from_environment(device="cpu").world_size,
            local_world_size=local_world_size(),
            defaults=defaults,
            extra_args_provider=extra_args_provider,
            read_checkpoint_args=read_checkpoint_args,
            read_folder_args=read_folder_args,
        )
        problems = data_problems(parsed.config)
        if problems:
            raise ConfigError(problems)
        return parsed
    except (ConfigError, MeshError) as error:
        rank, first_of_node = launched_as()
        if first_of_node:
            write_line(f"error: {error}".replace("\n", "\nerror: "), sys.stderr)
        else:
            time.sleep(SILENT_SECONDS)
            first = str(error).splitlines()[0]
            write_line(f"rank {rank}: error: {first}", sys.stderr)
        raise SystemExit(EXIT_USAGE) from None


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

    Collective: one exchange of objects over the default group.
    """

    def differ(found: Sequence[Difference]) -> TrainingError:
        problems = [
            f"{specs_by_dest()[one.name].flag} is {one.first!r} on rank 0 and {one.value!r} on"
            f" rank {one.rank}"
            for one in found
        ]
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        return TrainingError(
            f"the flags of the ranks differ: {'; '.join(problems[:SHOWN])}{more}."
            " Start all ranks with the same command line"
        )

    compare(shared_values(config), dist.group.WORLD, differ)
