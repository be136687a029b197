"""The command line of an entry script: parsed, or explained.

Owns what happens to a bad command line: every problem on a line of its own by the first rank of
a node, exit code 2. Tested by ``tests/training/test_command_line.py``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megamuon.arguments import Config, ConfigError, ExtraArgsProvider, ParsedConfig, parse_config
from megamuon.data.blend import parse_blend
from megamuon.mesh import MeshError, launched_as, local_world_size, mesh_from_environment
from megamuon.metrics import write_line
from megamuon.models import PRESETS
from megamuon.training.source import read_checkpoint_args

EXIT_USAGE = 2
# A launcher ends the other ranks when the first one fails: let local rank 0 speak before that.  A
# rank that still lives afterwards was started by hand, and its line may be the only one.
SILENT_SECONDS = 3.0


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
