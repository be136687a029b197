"""Check every file of a folder's checkpoints against the sizes and SHA-256 of its manifest.

Owns the order of the checks: each ``iter_N`` and ``release`` by itself, then whether the tracker
names the newest whole one. Invariant: nothing is written, and every problem has a line of its own
beside those of whole checkpoints. Tested by ``tests/tools/test_verify_checkpoint.py``.

    python tools/verify_checkpoint.py checkpoints
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))  # works from a checkout, not installed

from megamuon.checkpoint import CheckpointError, Iteration  # noqa: E402
from megamuon.checkpoint.manifest import (  # noqa: E402
    check_content,
    check_present,
    read_manifest,
)
from megamuon.checkpoint.retention import is_work  # noqa: E402
from megamuon.checkpoint.tracker import (  # noqa: E402
    RELEASE,
    TRACKER,
    directory_name,
    iterations,
    read_tracker,
)
from megamuon.console import run_script  # noqa: E402


def checkpoint_problems(directory: Path, iteration: Iteration) -> list[str]:
    """What is wrong with one checkpoint, a line for each file; empty for a whole one."""
    folder = directory / directory_name(iteration)
    problems = []
    try:
        manifest = read_manifest(folder)
        if manifest.iteration != iteration:
            problems.append(
                f"{folder}: its manifest is of iteration {manifest.iteration}: rename the folder"
            )
    except CheckpointError as error:
        return [str(error)]
    for name, record in manifest.files.items():
        alone = type(manifest)(**{**vars(manifest), "files": {name: record}})
        try:
            check_present(folder, alone)
            check_content(folder, alone, [name])
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def tracker_problem(directory: Path, whole: Sequence[int]) -> str | None:
    """Why a resume would not take the newest of ``whole``, the whole checkpoints ascending; a
    tracker at ``release`` is right as it is.
    """
    try:
        tracked = read_tracker(directory)
    except CheckpointError as error:
        return str(error)
    if tracked == RELEASE or (whole and tracked == whole[-1]):
        return None
    path = directory / TRACKER
    if not whole:
        return f"{path} names {tracked}: there is no whole checkpoint" if tracked else None
    named = "is missing" if tracked is None else f"names {tracked}"
    return f"{path} {named}: the newest whole checkpoint is {whole[-1]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 where all is whole, 1 with a line for each problem, 2 where nothing is found."""
    parser = argparse.ArgumentParser(description="Check checkpoints against their manifests.")
    parser.add_argument("directory", type=Path, help="what --save or --load names")
    parser.add_argument("--ckpt-step", type=int, help="check this iteration alone")
    arguments = parser.parse_args(argv)
    directory, step = arguments.directory, arguments.ckpt_step
    numbered = iterations(directory)
    found: list[Iteration] = [*numbered]
    if (directory / RELEASE).is_dir():
        found.append(RELEASE)
    if step is not None:
        found = [number for number in found if number == step]
    if not found:
        wanted = "no checkpoint" if step is None else f"no {directory_name(step)}"
        print(f"{directory}: {wanted} is there", file=sys.stderr)
        return 2
    whole, count = [], 0
    for iteration in found:
        problems = checkpoint_problems(directory, iteration)
        for problem in problems:
            print(problem)
        if not problems:
            print(f"{directory / directory_name(iteration)}: whole")
            if iteration != RELEASE:
                whole.append(int(iteration))
        count += len(problems)
    if step is None:
        for entry in sorted(directory.iterdir()):
            if is_work(entry.name):
                print(f"note: {entry} is a save under way or what a killed one left")
        if problem := tracker_problem(directory, whole):
            print(problem)
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
