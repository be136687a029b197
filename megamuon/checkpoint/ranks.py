"""The ranks that save and load together, and how they fail together.

Owns every exchange of this package outside torch.distributed.checkpoint itself.  Invariant: a
step either succeeds on all ranks or raises the same one-line CheckpointError on all of them; no
rank goes on alone, none waits for one that gave up. The exchanges have a gloo group of their own,
because a background save must not interleave its messages with the collectives of training.
Tested by ``tests/distributed/test_checkpoint_ranks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megamuon.mesh import backend_reason

Value = TypeVar("Value")

DEFAULT_TIMEOUT = 1800.0  # seconds; a rank may write for long while the others wait for its report


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text says which file or tensor, what was
    found and what to do.
    """


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The members of one checkpoint; ``group`` is None for a process alone."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @staticmethod
    def create(group: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> Ranks:
        """A new gloo group over ``group`` (all ranks by default).  Collective: every member calls
        it, once per run.

        Without an initialised torch.distributed: this process alone.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        patience = timedelta(seconds=timeout)
        if group is None:
            own = dist.new_group(backend="gloo", timeout=patience)
        else:
            own = dist.new_group(
                ranks=dist.get_process_group_ranks(group),
                backend="gloo",
                timeout=patience,
                use_local_synchronization=True,
            )
        return Ranks(rank=dist.get_rank(own), size=dist.get_world_size(own), group=own)

    def close(self) -> None:
        """Destroy the group.  Call it on every rank, after the last save has been waited for."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def each(self, step: str, work: Callable[[], Value]) -> list[Value]:
        """Run ``work`` on every rank; return the values by rank, or raise the first rank's error
        on all.
        """
        value, problem = _attempt(work, self.rank)
        if self.group is None:
            replies = [(value, problem)]
        else:
            replies = [(None, None)] * self.size
            try:
                dist.all_gather_object(replies, (value, problem), group=self.group)
            except RuntimeError as error:
                raise self.lost(step, problem, error) from error
        _raise_first(step, [reply[1] for reply in replies])
        return [reply[0] for reply in replies]  # type: ignore[misc]

    def first(self, step: str, work: Callable[[], Value]) -> Value:
        """Run ``work`` on rank 0 only; return its value, or raise its error, on every rank."""
        value, problem = _attempt(work, 0) if self.rank == 0 else (None, None)
        if self.group is not None:
            reply = [(value, problem)]
            source = dist.get_global_rank(self.group, 0)
            try:
                dist.broadcast_object_list(reply, src=source, group=self.group)
            except RuntimeError as error:
                raise self.lost(step, problem, error) from error
            value, problem = reply[0]
        _raise_first(step, [problem])
        return value  # type: ignore[return-value]

    def lost(self, step: str, problem: str | None, error: RuntimeError) -> CheckpointError:
        """A peer has gone: say so, and keep this rank's own problem, which may be the cause."""
        own = f"; this rank's own problem: {problem}" if problem else ""
        return CheckpointError(
            f"checkpoint step '{step}': rank {self.rank} lost contact with the other ranks "
            f"({backend_reason(error)}){own}"
        )


def members_of(ranks: Ranks | None) -> Ranks:
    if ranks is not None:
        return ranks
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError(
            "several ranks run: pass ranks=Ranks.create(), made once per run, or ranks=Ranks() "
            "for this rank alone"
        )
    return Ranks()


def one_line(error: BaseException, rank: int) -> str:
    """What to tell the others about ``error``: our own errors as they are, others with type and
    rank.
    """
    text = " ".join(str(error).split())
    if isinstance(error, CheckpointError):
        return text
    return f"rank {rank}: {type(error).__name__}: {text}"


def _attempt(work: Callable[[], Value], rank: int) -> tuple[Value | None, str | None]:
    try:
        return work(), None
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        return None, one_line(error, rank)


def _raise_first(step: str, problems: Sequence[str | None]) -> None:
    found = [problem for problem in problems if problem is not None]
    if found:
        distinct = len(set(found))
        more = f" (and {distinct - 1} other errors on other ranks)" if distinct > 1 else ""
        raise CheckpointError(f"checkpoint step '{step}' failed: {found[0]}{more}")
