"""Failures of a run: one line that says what, where and what to do; exit codes.

Owns the classes of errors that need no traceback, the phase that a rank is in, and the last words
of a rank whose peers are gone.  Invariants: every failure ends with a non-zero exit code on every
rank; no rank waits for a peer that has left, and it repeats what that one said; a line that several
ranks would print alike is printed once. Tested by ``tests/training/test_failures.py`` and
``tests/distributed/test_pretrain_failures.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from megamuon.agreement import PlanMismatchError
from megamuon.arguments import ConfigError
from megamuon.checkpoint import CheckpointError
from megamuon.collectives import CollectiveError
from megamuon.console import write_text
from megamuon.matrices import RoutingError
from megamuon.mesh import MeshError, backend_reason, launcher_keeps_store
from megamuon.metrics import WriterError, write_line
from megamuon.models import ModelConfigError
from megamuon.optim.eigen import FactorError
from megamuon.ownership import CostError, PlanError
from megamuon.profiling import ProfilingError
from megamuon.sharding import ShardingError

EXIT_FAILURE = 1
TRACEBACK_VARIABLE = "MEGAMUON_TRACEBACK"
DEBUG_LEVEL = 10  # --logging-level at or below which tracebacks are shown
DESTROY_SECONDS = 10.0
LOOK_UP_SECONDS = 5.0  # patience of a rank that asks whether another has said its line
CAUSE_SECONDS = (
    0.3  # patience of a rank that asks why another has left; that one spoke before it did
)
CAUSE_LENGTH = 300  # characters of its line that are repeated
LINGER_SECONDS = 3.0  # how long the rank that hosts the store stays for such questions


class TrainingError(RuntimeError):
    """Training cannot go on for a reason that the user can act on."""


KNOWN: tuple[type[BaseException], ...] = (
    TrainingError,
    CheckpointError,
    CollectiveError,
    ConfigError,
    CostError,
    FactorError,
    MeshError,
    ModelConfigError,
    PlanError,
    PlanMismatchError,
    ProfilingError,
    RoutingError,
    ShardingError,
    WriterError,
)
# In these phases the input of the user is read, so plain errors of these types speak of it.
INPUT_PHASES = ("reading datasets", "reading a batch")
INPUT_ERRORS = (ValueError, OSError, ImportError, IndexError, RuntimeError)
ENGINE_LOST = "lost contact: "  # how the operators' engine begins, once per rank that passes it on
LOST = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "gloo",
    ENGINE_LOST.strip(),
    "nccl",
    "socket",
    "timed out",
    "timeout",
)


LOST_CONTACT = "lost contact with the other ranks"
ANSWERED = "megamuon/failure/answered"  # ranks that know whether their line has been said
CAUSE = "megamuon/failure/cause"  # the line of the first rank that failed by itself


class Phase:
    """What this rank is doing, for the message of a failure."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.name = "starting"
        self.iteration = 0

    def __call__(self, name: str, iteration: int | None = None) -> None:
        """Enter a phase; ``iteration`` counts from 1 and stays when not given."""
        self.name = name
        if iteration is not None:
            self.iteration = iteration

    def __str__(self) -> str:
        where = f" of iteration {self.iteration}" if self.iteration else ""
        return f"{self.name}{where}"


def lost_peers(error: BaseException) -> bool:
    """Whether ``error`` is a collective's way of saying that another rank is gone or stuck."""
    backend = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    if isinstance(error, backend):
        return True
    text = str(error).lower()
    foreign = isinstance(error, CollectiveError) or not isinstance(error, KNOWN)
    return foreign and isinstance(error, RuntimeError) and any(word in text for word in LOST)


def describe(error: BaseException, phase: Phase) -> tuple[str, bool]:
    """The line to print, and whether a traceback would tell the user more than the line."""
    first = " ".join(str(error).split()) or type(error).__name__
    if lost_peers(error):
        reason = backend_reason(error).replace(ENGINE_LOST, "")
        return f"rank {phase.rank} {LOST_CONTACT} during {phase}: {reason}", False
    if isinstance(error, KNOWN):
        return f"error: {str(error).strip() or type(error).__name__}", False
    if isinstance(error, torch.OutOfMemoryError):
        return f"rank {phase.rank} is out of memory during {phase}: {first[:500]}", False
    if phase.name in INPUT_PHASES and isinstance(error, INPUT_ERRORS):
        return f"error: {first}", False
    return f"rank {phase.rank} failed during {phase}: {type(error).__name__}: {first}", True


def report(error: BaseException, phase: Phase, *, debug: bool = False) -> None:
    """Print the failure on standard error, once where several ranks fail alike."""
    line, unknown = describe(error, phase)
    if LOST_CONTACT in line:
        line += _cause()
    else:
        _tell(line)
        if not unknown and _said_elsewhere(line):
            return
    if unknown or debug or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        line = "".join(traceback.format_exception(error)) + line
    write_line(line, sys.stderr)


def forget_cause() -> None:
    """Before a run in a process group that may have seen another one fail."""
    with contextlib.suppress(Exception):
        dist.distributed_c10d._get_default_store().delete_key(CAUSE)


def _tell(line: str) -> None:
    """Leave ``line`` for the ranks that are about to lose this one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with contextlib.suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        if _answers(store) and not store.check([CAUSE]):
            store.set(CAUSE, line.splitlines()[0][:CAUSE_LENGTH])


def _cause() -> str:
    """What the rank that is gone has said, to be appended; empty where it did not say anything."""
    with contextlib.suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        end = time.monotonic() + CAUSE_SECONDS
        while _answers(store):
            if store.check([CAUSE]):
                return f" ({store.get(CAUSE).decode()})"
            if time.monotonic() > end:
                break
            time.sleep(0.05)
    return ""


def _answers(store: dist.Store) -> bool:
    """Whether the store is alive.  Torch prints a stack when it asks one that died with its rank,
    so a connection of our own is tried before.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return True
    try:
        socket.create_connection((store.host, store.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _said_elsewhere(line: str) -> bool:
    """Whether another rank has claimed this very line.  Without an answer, say it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    try:
        store = dist.distributed_c10d._get_default_store()  # the only store that all ranks share
        store.set_timeout(timedelta(seconds=LOOK_UP_SECONDS))
        key = hashlib.sha256(line.encode()).hexdigest()[:32]
        said = store.add(f"megamuon/failure/{key}", 1) > 1
        store.add(ANSWERED, 1)
        return said
    except Exception:  # the store may have died with its rank
        return False


def linger(rank: int) -> None:
    """Keep the store of rank 0 alive until the other ranks have asked it, or for a moment.

    Under torchrun the store is the agent's and outlives the ranks.  Otherwise a rank that asks
    after rank 0 has gone would print its line below the stack of a failed look-up.
    """
    if rank != 0 or not dist.is_initialized() or launcher_keeps_store():
        return
    end = time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        while time.monotonic() < end and store.add(ANSWERED, 0) < dist.get_world_size():
            time.sleep(0.02)


def leave_group() -> None:
    """Destroy the process group; end the process where that hangs on a peer that is gone."""
    if not dist.is_initialized():
        return

    def destroy() -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    thread = threading.Thread(target=destroy, daemon=True)
    thread.start()
    thread.join(DESTROY_SECONDS)
    if thread.is_alive():
        end_process(EXIT_FAILURE)


def end_process(code: int) -> None:
    """Leave at once, without destructors that may wait for peers."""
    write_text("", sys.stdout)
    write_text("", sys.stderr)
    os._exit(code)
