"""Saving: layout-free, atomic, optionally in the background.

Owns the order of the steps of a save: every rank streams its pieces into a partial directory
(through torch.distributed.checkpoint), rank 0 adds the documents and, when all have reported, the
manifest, then renames the directory, then replaces the tracker.  Invariant: at any instant the
tracker names a complete checkpoint; a failure on any rank leaves the one before in place and
raises the same error on all ranks. Tested by ``tests/checkpoint/test_store.py`` and
``tests/distributed/test_checkpoint_ranks.py``.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megamuon.checkpoint.files import (
    FileRecord,
    encode_json,
    make_directory,
    write_durably,
)
from megamuon.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    write_manifest,
)
from megamuon.checkpoint.ranks import CheckpointError, Ranks, members_of, one_line
from megamuon.checkpoint.retention import (
    clean_stale,
    make_partial,
    publish,
    remove,
    retain,
)
from megamuon.checkpoint.tensors import INDEX, StoredTensor
from megamuon.checkpoint.tracker import (
    Iteration,
    directory_name,
    write_tracker,
)

Value = TypeVar("Value")

_DOCUMENT = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = {INDEX.removesuffix(".json"), MANIFEST.removesuffix(".json")}


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a finished save wrote."""

    directory: Path  # iter_0000100 itself
    iteration: Iteration
    size: int  # bytes of all files of all ranks
    seconds: float  # from the call to the tracker; in the background for an asynchronous save
    not_deleted: str | None = None  # why a retired checkpoint is still there


class SaveHandle:
    """A save under way or done."""

    def __init__(self) -> None:
        self._future: Future[SaveReport] = Future()
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        """Whether this rank's part has ended.  Ranks may differ for a moment: never branch a
        collective on it.
        """
        return self._future.done()

    def wait(self) -> SaveReport:
        """Wait for the end; raise the save's CheckpointError, the same one on all ranks."""
        report = self._future.result()
        if self._thread is not None:
            self._thread.join()
        return report


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One save, as a rank's thread needs it."""

    directory: Path
    iteration: Iteration
    pieces: Sequence[StoredTensor]
    documents: Mapping[str, bytes]
    rank_documents: Mapping[str, str]
    ranks: Ranks
    retain_interval: int | None
    retired: tuple[Iteration, ...]
    run: str | None
    started: float
    write_pieces: Callable[[Sequence[StoredTensor], Path, Ranks], list[FileRecord]]


def save(
    directory: Path,
    iteration: Iteration,
    tensors: Sequence[StoredTensor],
    *,
    documents: Mapping[str, Any],
    rank_documents: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
    asynchronous: bool = False,
    retain_interval: int | None = None,
    retired: Sequence[Iteration] = (),
    run: str | None = None,
) -> SaveHandle:
    """Save the pieces that all ranks list as ``directory/iter_<iteration>`` and make it the
    latest.  Collective.

    ``documents``: JSON values; those of rank 0 are written, one file each.  ``rank_documents``:
    one value per rank, written as the list by rank (random states).  ``ranks``: None for a
    process alone.  ``asynchronous``: the tensors are copied to host memory now, a thread does the
    rest; wait for the handle before the next save to this directory.  ``run``: which run this is,
    kept in the manifest.  ``retired``: earlier checkpoints of it that are deleted once this one is
    complete, with a ``retain_interval``; see ``retention.retain``.

    Raises CheckpointError (from here, or from ``wait`` when asynchronous) on all ranks alike:
    pieces that do not cover their tensors exactly once, a document that is not JSON, a file that
    cannot be written.  The tracker then still names the previous checkpoint.
    """
    members = members_of(ranks)
    handle = SaveHandle()
    started = time.monotonic()

    def prepare() -> _Job:
        # Slow to import, see there. Here, and not in a thread that may outlive the main one.
        from megamuon.checkpoint.torch_store import write_pieces

        directory_name(iteration)
        return _Job(
            directory=Path(directory),
            iteration=iteration,
            pieces=[_staged(piece) for piece in tensors] if asynchronous else list(tensors),
            documents=_encoded(documents),
            rank_documents=_encoded_by_rank(rank_documents or {}, documents),
            ranks=members,
            retain_interval=retain_interval,
            retired=tuple(retired),
            run=run,
            started=started,
            write_pieces=write_pieces,
        )

    prepared = _outcome(prepare)
    if not asynchronous:
        handle._future.set_result(_run_save(prepared, members))
        return handle

    def background() -> None:
        try:
            handle._future.set_result(_run_save(prepared, members))
        except BaseException as error:  # kept for wait()
            handle._future.set_exception(error)

    # Not a daemon: a program that ends normally completes its last save.
    handle._thread = threading.Thread(target=background, name=f"save-{iteration}", daemon=False)
    handle._thread.start()
    return handle


def _run_save(prepared: tuple[_Job | None, str | None], ranks: Ranks) -> SaveReport:
    """All steps of a save, on every rank.  Each exchange ends a step on all ranks alike."""

    def ready() -> None:
        if prepared[0] is None:
            raise CheckpointError(prepared[1])

    ranks.each("prepare", ready)
    job = prepared[0]
    assert job is not None  # ready() raised otherwise
    final = job.directory / directory_name(job.iteration)
    partial = ranks.first("make directory", lambda: _open_partial(job))
    try:
        records = _write_pieces(job, partial)
        gathered = ranks.each("report files", lambda: (records, job.rank_documents))
        manifest = ranks.first("seal", lambda: _seal(job, partial, gathered))
        ranks.first("publish", lambda: publish(partial, final))
    except CheckpointError:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):  # the cause matters more, and the next save cleans
                remove(partial)
        raise
    ranks.first("tracker", lambda: write_tracker(job.directory, job.iteration))
    kept = ranks.first("retain", lambda: _retire(job))
    return SaveReport(
        directory=final,
        iteration=job.iteration,
        size=manifest.size,
        seconds=time.monotonic() - job.started,
        not_deleted=kept,
    )


def _open_partial(job: _Job) -> Path:
    make_directory(job.directory)
    clean_stale(job.directory)
    return make_partial(job.directory, job.iteration)


def _write_pieces(job: _Job, partial: Path) -> list[FileRecord]:
    return job.write_pieces(job.pieces, partial, job.ranks)


def _seal(
    job: _Job, partial: Path, gathered: Sequence[tuple[list[FileRecord], Mapping[str, str]]]
) -> Manifest:
    """Write the documents and then the manifest (rank 0)."""
    documents = dict(job.documents)
    for name in job.rank_documents:
        values = ",\n".join(of_rank[name] for _, of_rank in gathered)
        documents[name] = f"[\n{values}\n]\n".encode()
    records = [record for of_rank, _ in gathered for record in of_rank]
    for name, text in documents.items():
        records.append(write_durably(partial / f"{name}.json", [text]))
    return write_manifest(
        partial, job.iteration, job.ranks.size, sorted(documents), records, run=job.run
    )


def _retire(job: _Job) -> str | None:
    """Delete what is retired; why that failed, which makes the new checkpoint no worse."""
    try:
        retain(job.directory, job.retired, job.iteration, job.retain_interval, job.run)
    except OSError as error:
        return str(error)
    return None


def _staged(piece: StoredTensor) -> StoredTensor:
    """The piece on a copy in host memory: training goes on and changes the original."""
    return replace(piece, data=piece.data.detach().to("cpu", copy=True))


def _encoded(documents: Mapping[str, Any]) -> dict[str, bytes]:
    """JSON text of each document, taken now: the caller may change the values while a thread
    writes.
    """
    encoded = {}
    for name, value in documents.items():
        if not _DOCUMENT.fullmatch(name) or name in _RESERVED:
            raise CheckpointError(
                f"document name {name!r} must match {_DOCUMENT.pattern} and be none of "
                f"{sorted(_RESERVED)}"
            )
        try:
            encoded[name] = encode_json(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"document {name!r} is not JSON: {error}") from error
    return encoded


def _encoded_by_rank(documents: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, str]:
    both = sorted(set(documents) & set(shared))
    if both:
        raise CheckpointError(f"documents {both} are given both for rank 0 and by rank")
    return {name: text.decode().rstrip() for name, text in _encoded(documents).items()}


def _outcome(work: Callable[[], Value]) -> tuple[Value | None, str | None]:
    """The value, or the problem in one line, to be exchanged at the first step."""
    try:
        return work(), None
    except Exception as error:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return None, one_line(error, rank)
