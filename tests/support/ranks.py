"""Starts N gloo ranks for a test, quickly, and never hangs.

Owns process start-up for every multi-rank test.  Invariant: ``run_ranks`` returns each rank's
value or raises one error that names the ranks at fault, within ``timeout`` seconds plus a short
grace, and leaves no process behind.  Ranks are forked from a fork server that has already
imported torch, so a start costs tenths of a second where a spawn costs seconds per rank; the
server never ran parallel code, which a fork of the test process itself could not promise. Tested
by ``tests/distributed/test_ranks.py``.

Use it once per test file (a module-scoped fixture) and let one call do the work of several tests::

    def work(rank, world, folder): ...            # at module level
    values = run_ranks(work, 4, tmp_path)          # values by rank
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "numpy",
    "safetensors.torch",
    "pytest",
    # Ours, which would cost each rank half a second.
    "megamuon.baselines",
    "megamuon.checkpoint.torch_store",
    "megamuon.training.pretrain",
)
GRACE = 10.0  # seconds that the other ranks get to fail by themselves after the first failure
TAIL = 4000  # characters of a rank's output shown in an error


class RankError(AssertionError):
    """One or more ranks failed or did not finish; the text names them and shows the first
    traceback.
    """


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one rank."""

    rank: int
    value: Any = None
    finished: bool = False  # the function returned and its value arrived
    error: str = ""  # "Type: message" of the exception that ended it
    trace: str = ""
    exit_code: int | None = None  # None while it had to be killed for not finishing
    seconds: float = 0.0  # from the start to the report or the death
    output: str = ""  # its stdout and stderr


@dataclass
class _Process:
    rank: int
    process: Any
    pipe: Connection
    log: Path
    outcome: Outcome = field(init=False)
    closed: bool = False

    def __post_init__(self) -> None:
        self.outcome = Outcome(rank=self.rank)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on every rank of a gloo group; return the values
    by rank.

    ``function`` is at module level; ``args`` and values are picklable.  The default group is
    initialised (gloo) before the call and destroyed after it; every rank has one thread and the
    caller's environment.  Raises RankError when a rank raises, dies, or is not done after
    ``timeout`` seconds.
    """
    outcomes = run_ranks_outcomes(function, world_size, *args, timeout=timeout)
    bad = [outcome for outcome in outcomes if not outcome.finished]
    if bad:
        raise RankError(_explain(bad, world_size, timeout))
    return [outcome.value for outcome in outcomes]


def run_ranks_outcomes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    grace: float = GRACE,
) -> list[Outcome]:
    """As ``run_ranks``, for tests of failures: returns what became of each rank and never raises
    for a rank's fault.

    After the first failure the other ranks have ``grace`` seconds left before they are killed.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        started = time.monotonic()
        processes = [
            _start(function, rank, world_size, args, timeout, folder) for rank in range(world_size)
        ]
        try:
            _collect(processes, started, timeout, grace)
        finally:
            for entry in processes:  # all at once: none may notice that another has gone
                if not entry.closed:
                    entry.process.kill()
            for entry in processes:
                _end(entry)
        return [entry.outcome for entry in processes]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Sequence[Any],
    timeout: float,
    folder: Path,
) -> _Process:
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    module = sys.modules[function.__module__]
    log = folder / f"rank-{rank}.log"
    # Pickled here and not by multiprocessing: torch would otherwise share tensors through
    # file descriptors.
    payload = pickle.dumps(
        {
            "module": function.__module__,
            "file": getattr(module, "__file__", None),
            "function": function.__qualname__,
            "rank": rank,
            "world": world_size,
            "timeout": timeout,
            "rendezvous": str(folder / "rendezvous"),
            "log": str(log),
            "path": list(sys.path),
        }
    )
    process = context.Process(
        target=_main,
        args=(payload, pickle.dumps(tuple(args)), _environment(), sender),
        name=f"rank-{rank}",
        daemon=True,
    )
    process.start()
    sender.close()
    return _Process(rank=rank, process=process, pipe=receiver, log=log)


def _context() -> Any:
    """The fork server's context; starts the server, single-threaded, at the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, which happens in the server
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        # Without a name service gloo cannot find the host's address; every rank is on this machine.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _collect(processes: Sequence[_Process], started: float, timeout: float, grace: float) -> None:
    """Take the reports as they come, until all are in, the time is up, or ``grace`` after a
    failure.
    """
    deadline = started + timeout
    while True:
        pending = [entry for entry in processes if not entry.closed]
        remaining = deadline - time.monotonic()
        if not pending or remaining <= 0:
            return
        for pipe in wait([entry.pipe for entry in pending], timeout=remaining):
            entry = next(item for item in pending if item.pipe is pipe)
            seconds = time.monotonic() - started
            entry.closed = True
            try:
                report = pickle.loads(entry.pipe.recv_bytes())
                entry.outcome = Outcome(rank=entry.rank, seconds=seconds, **report)
            except EOFError:
                entry.process.join(timeout=5.0)
                entry.outcome = Outcome(
                    rank=entry.rank, seconds=seconds, error="died without a report"
                )
            if not entry.outcome.finished:
                deadline = min(deadline, time.monotonic() + grace)


def _end(entry: _Process) -> None:
    """Let a rank that has reported leave, reap one that was killed, and keep its output."""
    entry.process.join(timeout=5.0)
    if entry.process.is_alive():  # it has reported and cannot end: its value counts all the same
        entry.process.kill()
        entry.process.join(timeout=5.0)
    output = entry.log.read_text(errors="replace") if entry.log.exists() else ""
    entry.outcome = replace(
        entry.outcome,
        exit_code=entry.process.exitcode if entry.closed else None,
        output=output,
    )
    entry.pipe.close()
    entry.process.close()


def _explain(bad: Sequence[Outcome], world_size: int, timeout: float) -> str:
    """One text: who failed, who did not finish, and the first failure in full."""
    failed = sorted((item for item in bad if item.error), key=lambda item: item.seconds)
    stuck = [item for item in bad if not item.error]
    lines = []
    for item in failed:
        code = f" (exit code {item.exit_code})" if item.exit_code else ""
        lines.append(f"rank {item.rank} of {world_size} failed: {item.error}{code}")
    if stuck:
        names = ", ".join(str(item.rank) for item in stuck)
        reason = "after another rank's failure" if failed else f"within {timeout:.0f} s"
        lines.append(f"ranks that did not finish {reason}: {names}")
    first = failed[0] if failed else stuck[0]
    if first.trace:
        lines.append(f"--- traceback of rank {first.rank}\n{first.trace.rstrip()}")
    if first.output:
        lines.append(f"--- output of rank {first.rank}\n{first.output[-TAIL:].rstrip()}")
    return "\n".join(lines)


def _main(
    payload: bytes, arguments: bytes, environment: Mapping[str, str], pipe: Connection
) -> None:
    """Body of one rank."""
    task = pickle.loads(payload)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = task["path"]
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    finished = _say_where_it_hangs(log, max(task["timeout"] - 1.0, task["timeout"] * 0.9))
    try:
        report = pickle.dumps({"value": _work(task, arguments), "finished": True})
    except BaseException as error:  # a rank must always report, SystemExit included
        message = f"{type(error).__name__}: {error}"
        report = pickle.dumps({"error": message, "trace": traceback.format_exc()})
        sys.stdout.flush()
        pipe.send_bytes(report)
        os._exit(1)  # gloo's destructors may wait for peers that never come
    sys.stdout.flush()
    pipe.send_bytes(report)
    _leave(finished)


def _work(task: Mapping[str, Any], arguments: bytes) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function = _find(task["module"], task["file"], task["function"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task['rendezvous']}",
        rank=task["rank"],
        world_size=task["world"],
        timeout=timedelta(seconds=task["timeout"]),
    )
    return function(task["rank"], task["world"], *pickle.loads(arguments))


def _find(name: str, file: str | None, function: str) -> Callable[..., Any]:
    """The function by module name; by file where the name is not importable (a test file imported
    by path).
    """
    try:
        module = importlib.import_module(name)
    except ImportError:
        if file is None:
            raise
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in function.split("."):
        found = getattr(found, part)
    return found


def _say_where_it_hangs(log: int, seconds: float) -> threading.Event:
    """Write every thread's stack to ``log`` after ``seconds``, shortly before the parent kills
    this rank, unless the event returned is set by then.
    """
    finished = threading.Event()

    def watch() -> None:
        if not finished.wait(seconds):
            os.write(log, stacks().encode(errors="replace"))

    threading.Thread(target=watch, name="watch", daemon=True).start()
    return finished


def stacks() -> str:
    """The Python stacks of all other threads, as text.

    Not ``faulthandler.dump_traceback_later``: that reads the frames without the interpreter's
    lock and now and then kills a process whose threads are running.  The price: a thread that
    hangs while it holds the lock says nothing.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return "".join(
        f"--- thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != own
    )


def _leave(finished: threading.Event) -> None:
    """Wait for the peers, so that nobody loses a message from this rank, then leave."""
    import contextlib

    import torch.distributed as dist

    with contextlib.suppress(Exception):  # a peer that failed has been reported by itself
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    finished.set()
    sys.stdout.flush()
    os._exit(0)
