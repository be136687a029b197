"""What ``make pretrain`` runs: a small language model on real text, from nothing to a sample.

Owns the default job: the Python standard library's sources as bytes, the ``tiny`` model, Muon on
matrix owners, two Gloo ranks (or all GPUs).  It trains, evaluates and saves, resumes once in a
second launch, and prints a continuation. Invariant: everything it makes lies in ``runs/``, every
command is printed before it runs, and an interrupt ends the children too.  ``RESUME=1`` continues
the last run; ``ARGS`` adds flags to the training script. Tested by
``tests/tools/test_pretrain_default.py``.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megamuon.checkpoint.tracker import read_tracker  # noqa: E402
from megamuon.console import run_script  # noqa: E402
from megamuon.data.corpus import CorpusOptions  # noqa: E402
from megamuon.data.corpus_writer import write_corpus  # noqa: E402
from megamuon.data.tokenizer import ByteTokenizer  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

FOREIGN = {"site-packages", "dist-packages", "__pycache__"}  # not the standard library's own
CPU_RANKS = 2
SEQUENCE = 256
SAMPLES = 16  # per step: 4,096 tokens
STEPS = 240
FIRST_LAUNCH = 200  # the second launch resumes here
EXTENSION = 100  # further steps when a finished run is continued
VALIDATION = "lm loss validation"  # name of the scalar
PROMPT = "def read_lines(path):\n    "


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the job; smaller ones are for its test."""

    steps: int = STEPS
    first_launch: int = FIRST_LAUNCH
    model: str = "tiny"
    runs: Path = ROOT / "runs"
    files: int | None = None  # None: all


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the job runs."""

    ranks: int
    gpu: bool


def machine() -> Machine:
    """All GPUs that torch can use, else two ranks on the CPU."""
    import torch

    count = torch.cuda.device_count()
    return Machine(ranks=count or CPU_RANKS, gpu=count > 0)


def source_files(limit: int | None = None) -> list[str]:
    """The standard library's Python files that are UTF-8 text, in a fixed shuffled order.

    Shuffled, because the validation set is the end of the list and should look like the rest.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(library.rglob("*.py")):
        if FOREIGN & set(path.relative_to(library).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # test data in other encodings
        if text:
            found.append(str(path))
    random.Random(0).shuffle(found)
    return found[:limit]


def prepare_data(settings: Settings) -> str:
    """Tokenize once per Python version; returns the dataset's prefix."""
    name = f"python-{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    if settings.files is not None:
        name += f"-{settings.files}"
    prefix = settings.runs / "data" / name
    wanted = Path(f"{prefix}_text_document.idx")
    if not wanted.exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        print("tokenizing the Python standard library's sources (bytes)", flush=True)
        options = CorpusOptions(append_eod=True)
        files = source_files(settings.files)
        progress, _ = write_corpus(files, str(prefix), ByteTokenizer, options, lambda _: None)
        print(f"{progress.documents:,} files, {progress.tokens:,} tokens", flush=True)
    return f"{prefix}_text_document"


def newest_run(runs: Path) -> Path:
    """The run folder that was made last.  Raises SystemExit where there is none."""
    found = sorted(path.parent for path in runs.glob("*/checkpoints"))
    if not found:
        raise SystemExit(f"RESUME=1: there is no run in {runs}; call it without RESUME first")
    return found[-1]


def new_run(runs: Path) -> Path:
    """A run folder named by the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(1, 100))):
        folder = runs / f"{stamp}{suffix}"
        if not folder.exists():
            (folder / "checkpoints").mkdir(parents=True)
            return folder
    raise SystemExit(f"{runs}: a hundred runs began in this very second")


def training_flags(folder: Path, data: str, where: Machine, settings: Settings) -> list[str]:
    """Flags of ``pretrain_gpt.py`` that both launches share."""
    micro = max(1, SAMPLES // where.ranks)
    steps = settings.steps
    flags = f"""
        --model {settings.model} --tokenizer-type byte
        --data-path {shlex.quote(data)} --split 95,4,1
        --seq-length {SEQUENCE} --micro-batch-size {micro} --global-batch-size {micro * where.ranks}
        --optimizer muon --line D --zero-stage 3
        --lr 1e-2 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters {min(20, steps // 10)}
        --weight-decay 0.1 --adam-beta2 0.95
        --eval-interval {max(1, settings.first_launch // 3)} --eval-iters 16
        --log-interval {max(1, min(10, steps // 4))} --log-throughput
        --save {shlex.quote(str(folder / "checkpoints"))} --save-interval {settings.first_launch}
        --tensorboard-dir {shlex.quote(str(folder / "tensorboard"))}
        --exit-signal-handler
    """
    return shlex.split(flags) + (["--bf16"] if where.gpu else [])


def train_command(where: Machine, flags: Sequence[str]) -> list[str]:
    """The launcher with the training script."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(where.ranks)]
    return [*launcher, str(ROOT / "pretrain_gpt.py"), *flags]


def environment(where: Machine) -> dict[str, str]:
    """One process per core: threads of two ranks would fight for the same cores."""
    variables = dict(os.environ)
    cores = os.cpu_count() or 1
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // where.ranks)) if where.gpu else "1")
    if not where.gpu and sys.platform == "linux":
        # All ranks are on this machine; its own name may not resolve to an address.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return variables


def run(command: Sequence[str], variables: dict[str, str]) -> None:
    """Print and run one command; an interrupt is passed on.  Raises SystemExit where it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    process = subprocess.Popen(command, env=variables, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait()
    except BaseException as error:
        end(process)
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit("interrupted; make pretrain RESUME=1 continues this run") from None
        raise
    if code:
        raise SystemExit(f"the command above failed with exit code {code}")


def end(process: subprocess.Popen[Any], patience: float = 30.0) -> None:
    """End a command and all that it started: ask, wait, then insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns 0, and SystemExit says what failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_json_flag(parser, __file__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--first-launch", type=int, default=None)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--files", type=int, default=None, help="use only so many source files")
    arguments = parser.parse_args(argv)
    first = arguments.first_launch or max(1, arguments.steps * FIRST_LAUNCH // STEPS)
    settings = Settings(
        steps=arguments.steps,
        first_launch=first,
        model=arguments.model,
        runs=arguments.runs.resolve(),
        files=arguments.files,
    )
    # A terminated job must not leave its ranks behind: take SIGTERM like an interrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    resume = os.environ.get("RESUME", "") not in ("", "0")
    folder = job(settings, resume=resume)
    seconds = time.monotonic() - started
    print(f"\ndone in {seconds:.0f} s")
    losses = validation_losses(folder / "tensorboard")
    if losses:
        (first_at, first_loss), (last_at, last_loss) = losses[0], losses[-1]
        print(
            f"validation loss: {first_loss:.3f} nats per byte at iteration {first_at},"
            f" {last_loss:.3f} at iteration {last_at}"
        )
    print(f"checkpoint:  {folder / 'checkpoints'}")
    print(f"TensorBoard: {sys.executable} -m tensorboard.main --logdir {folder / 'tensorboard'}")
    if arguments.json:
        figures = {
            "run": str(folder),
            "seconds": round(seconds, 1),
            "validation_loss": losses[-1][1] if losses else None,
        }
        write_json(arguments.json, __file__, figures)
    return 0


def validation_losses(directory: Path) -> list[tuple[int, float]]:
    """Iteration and validation loss of every evaluation, from the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory))
    reader.Reload()
    if VALIDATION not in reader.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in reader.Scalars(VALIDATION)]


def job(settings: Settings, *, resume: bool) -> Path:
    """Data, two launches (one when resuming) and a sample; returns the run folder."""
    where = machine()
    variables = environment(where)
    folder = newest_run(settings.runs) if resume else new_run(settings.runs)
    data = prepare_data(settings)
    flags = training_flags(folder, data, where, settings)
    flags += shlex.split(os.environ.get("ARGS", ""))
    checkpoints = folder / "checkpoints"
    load = ["--load", str(checkpoints)]
    done = read_tracker(checkpoints)
    print(f"run folder: {folder}", flush=True)
    if done is None:
        stop = ["--exit-interval", str(settings.first_launch)]
        run(train_command(where, [*flags, "--train-iters", str(settings.steps), *stop]), variables)
        print("\nresuming from the checkpoint in a second launch", flush=True)
    steps = settings.steps
    longer: list[str] = []
    if isinstance(done, int) and done >= steps:
        steps = done + EXTENSION  # a longer schedule than the checkpoint's
        longer = ["--override-opt_param-scheduler"]
    last = ["--train-iters", str(steps), *load, "--exit-on-missing-checkpoint", *longer]
    run(train_command(where, [*flags, *last]), variables)
    generate = [sys.executable, str(ROOT / "tools" / "generate.py"), "--load", str(checkpoints)]
    run([*generate, "--prompt", PROMPT, "--tokens", "200"], variables)
    return folder


if __name__ == "__main__":
    sys.exit(run_script(main))
