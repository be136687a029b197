"""Which run a folder of checkpoints belongs to, and what a run may write there.

Owns the identity of a run (kept from launch to launch, new for a run that starts from weights
alone) and the rule of ``--save``.  Invariants: a run writes among checkpoints only where it loaded
from, or where ``--reuse-save-directory`` says so; whatever is refused is refused before anything is
written.  Tested by ``tests/training/test_outputs.py``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from megamuon.arguments import Config, config_to_json
from megamuon.checkpoint import RELEASE, Iteration, Ranks, read_tracker
from megamuon.checkpoint.files import make_directory
from megamuon.checkpoint.tracker import directory_name, iterations
from megamuon.mesh import Mesh
from megamuon.training.failures import TrainingError
from megamuon.training.source import Source

Say = Callable[[str], None]
CONFIG_FILE = "config.json"


def run_identity(source: Source | None, ranks: Ranks) -> str:
    """The run's name in its checkpoints: the loaded one's, or a new one.  A collective."""
    kept = None if source is None or source.weights_only else source.run
    return ranks.first("name the run", lambda: kept or secrets.token_hex(8))


def claim_save_directory(config: Config, source: Source | None, ranks: Ranks, warn: Say) -> None:
    """Make sure that ``--save`` is this run's to write to.  A collective.

    Raises TrainingError, on all ranks, where it holds checkpoints that this run does not go on
    from.
    """
    flags = config.checkpoint
    if flags.save is None or config.training.skip_train:
        return
    directory = Path(flags.save)
    found = ranks.first("look into --save", lambda: _contents(directory))
    if found is None:
        return
    loads = source is not None and (not source.weights_only or source.iteration == RELEASE)
    if loads and ranks.first("compare paths", lambda: _same(directory, source)):
        assert source is not None
        _say_what_is_left(directory, found, source, warn)
        return
    if flags.reuse_save_directory:
        warn(
            f"WARNING: --save {directory} holds {found} of another run: those of the same"
            " iteration will be replaced, and the newest will be this run's"
            " (--reuse-save-directory)"
        )
        return
    load = f"--load {directory}"
    if flags.load is not None and os.path.realpath(flags.load) == os.path.realpath(directory):
        load += " --ckpt-step N" if source is None else " without --finetune"
    raise TrainingError(
        f"--save {directory} holds {found}, which this run {_instead(config, source)}: give"
        f" {load} to continue that run, another --save to begin a new one, or"
        " --reuse-save-directory to write among its checkpoints"
    )


def _instead(config: Config, source: Source | None) -> str:
    """What the run starts from, in place of the checkpoints in its folder."""
    if source is not None:
        what = "takes weights alone from" if source.weights_only else "does not load, but"
        return f"{what} {source}"
    load = config.checkpoint.load
    where = f" (--load {load} has no latest_checkpointed_iteration.txt)"
    return "does not load" + ("" if load is None else where)


def _contents(directory: Path) -> str | None:
    """The checkpoints in a folder, in words; None where there are none."""
    if not directory.is_dir():
        return None
    there: list[Iteration] = [*iterations(directory)]
    if (directory / directory_name(RELEASE)).is_dir():
        there.append(RELEASE)
    tracked = read_tracker(directory)
    if not there and tracked is None:
        return None
    if not there:
        return f"a tracker file that names checkpoint {tracked}"
    some = f"{there[0]} to {there[-1]}" if len(there) > 1 else f"{there[0]}"
    return f"{len(there)} checkpoint{'s' if len(there) > 1 else ''} ({some})"


def _same(directory: Path, source: Source) -> bool:
    return os.path.realpath(directory) == os.path.realpath(source.directory)


def _say_what_is_left(directory: Path, found: str, source: Source, warn: Say) -> None:
    """An older checkpoint was chosen: newer ones are another branch of the same run."""
    newer = [number for number in iterations(directory) if number > _number(source.iteration)]
    if newer:
        warn(
            f"WARNING: {directory} holds {found}, and the run goes on from {source.iteration}: the"
            " newer ones will be replaced as it comes to their iterations"
        )


def _number(iteration: Iteration) -> int:
    return -1 if iteration == RELEASE else iteration


def write_config(config: Config, mesh: Mesh, warn: Say) -> None:
    """``config.json`` in the checkpoint and TensorBoard directories, by rank 0; one with other
    contents keeps a name of its own.

    Raises TrainingError naming the flag whose directory cannot be written.
    """
    if mesh.rank != 0:
        return
    places = {"--save": config.checkpoint.save, "--tensorboard-dir": config.logging.tensorboard_dir}
    for flag, directory in places.items():
        if directory is None:
            continue
        try:
            make_directory(Path(directory))
            _replace(Path(directory) / CONFIG_FILE, config_to_json(config))
            if flag == "--tensorboard-dir" and config.checkpoint.load is None:
                _say_mixed(Path(directory), warn)
        except OSError as error:
            raise TrainingError(
                f"{flag} {directory}: cannot be written ({error.strerror}); name another directory"
            ) from error


def _replace(path: Path, text: str) -> None:
    """Write ``path``; what was there becomes ``config-1.json`` and so on, if it is different."""
    if path.exists():
        if path.read_bytes() == text.encode():
            return
        number = 1
        while (kept := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
            number += 1
        path.rename(kept)
    path.write_text(text, encoding="utf-8")


def _say_mixed(directory: Path, warn: Say) -> None:
    if any(directory.glob("events.out.tfevents.*")):
        warn(
            f"WARNING: --tensorboard-dir {directory} holds the scalars of an earlier run, and this"
            " one loads no checkpoint: their curves will lie over each other"
        )
