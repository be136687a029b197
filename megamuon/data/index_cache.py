"""A content-addressed cache of index arrays, shared by the ranks of a job.

Owns the files ``{digest}-{kind}-{split}-{name}.npy`` and ``...-description.txt`` of a cache
directory. Invariants: the digest covers every input of the arrays, so a file is never stale; files
appear by rename, the description last, so that a set is complete or not there; what is loaded has
the hash that its description states; nothing is unpickled. Rank 0 builds first, then each machine's
local rank 0 where it cannot see the result (no shared file system), the others wait with a bound.
There is no communication in here: the caller passes a barrier and compares the hashes. Tested by
``tests/data_room/test_index_cache.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
Barrier = Callable[[str], None]
Compare = Callable[[str, str], None]
Result = TypeVar("Result")
FORMAT = 1  # part of every digest: raise it when an algorithm behind the arrays changes
_HASH_BYTES = 1 << 24
_POLL_SECONDS = 0.1
_LATE_SECONDS = 30.0


class IndexCacheError(RuntimeError):
    """The cache cannot be written, or another rank did not deliver in time."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who this process is; the defaults are a single process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """One set of arrays: where it lies and everything that it depends on (JSON-able)."""

    directory: Path
    kind: str
    split: str
    names: tuple[str, ...]
    inputs: Mapping[str, Any] = field(hash=False)

    @property
    def description(self) -> str:
        """Canonical text of the inputs."""
        content = {"format": FORMAT, "kind": self.kind, "split": self.split, "inputs": self.inputs}
        return json.dumps(content, indent=4, sort_keys=True)

    @property
    def digest(self) -> str:
        """The address: a hash of the description."""
        return hashlib.sha256(self.description.encode()).hexdigest()[:32]

    def path(self, name: str) -> Path:
        """The file of one array, or of the description."""
        suffix = "txt" if name == "description" else "npy"
        return self.directory / f"{self.digest}-{self.kind}-{self.split}-{name}.{suffix}"


@dataclass(frozen=True, kw_only=True)
class IndexCache:
    """Load or build cache entries as one rank of a job.

    ``trust`` (``--dataloader-fast-cache-load``) skips hashing what is loaded. ``timeout`` is in
    seconds.
    """

    ranks: Ranks = Ranks()
    barrier: Barrier | None = None
    compare: Compare | None = None
    timeout: float = 600.0
    trust: bool = False

    def staged(self, label: str, work: Callable[[], Result]) -> Result:
        """Run ``work`` (which calls ``arrays``) in the order rank 0, local ranks 0, all others.

        Every rank enters both barriers whatever it finds in the cache, so ranks cannot get out of
        step.
        """
        if self.barrier is None or self.ranks.world_size == 1:
            return work()
        leader, local_leader = self.ranks.rank == 0, self.ranks.local_rank == 0
        result: Result | None = None
        failure: Exception | None = None
        for turn, phase in (
            (leader, f"{label}: rank 0 builds the indices"),
            (local_leader and not leader, f"{label}: local ranks 0 build the indices"),
        ):
            try:
                result = work() if turn else result
            except Exception as error:  # raised after the barriers: nobody waits for this rank
                failure = error
            self.barrier(phase)
        if failure is not None:
            raise failure
        return result if result is not None else work()

    def arrays(self, entry: CacheEntry, build: Callable[[], Arrays]) -> tuple[Arrays, str]:
        """The entry's arrays, mapped read-only, and their hash; a local rank 0 may build them.

        Raises IndexCacheError, naming the path, if the directory cannot be written or the file does
        not come.
        """
        loaded = self._load(entry)
        if loaded is None and self.ranks.local_rank == 0:
            _store(entry, build())
            loaded = self._load(entry)
            if loaded is None:
                raise IndexCacheError(
                    f"{entry.path('description')}: changed under us; is the disk sound?"
                )
        if loaded is None:
            loaded = self._wait(entry)
        return loaded

    def check(self, label: str, digest: str) -> None:
        """Hand a hash to the caller's comparison across ranks."""
        if self.compare is not None:
            self.compare(label, digest)

    def _wait(self, entry: CacheEntry) -> tuple[Arrays, str]:
        # After the barriers the files exist; only a network file system may show them late.
        timeout = self.timeout if self.barrier is None else min(self.timeout, _LATE_SECONDS)
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            loaded = self._load(entry)
            if loaded is not None:
                return loaded
            time.sleep(_POLL_SECONDS)
        raise IndexCacheError(
            f"rank {self.ranks.rank}: {entry.path('description')} did not appear within "
            f"{timeout:g} s; local "
            f"rank 0 of this machine builds it (does --data-cache-path lie where both can see it?)"
        )

    def _load(self, entry: CacheEntry) -> tuple[Arrays, str] | None:
        """None where the entry is absent, incomplete or damaged: it is rebuilt then."""
        try:
            text = entry.path("description").read_text(encoding="utf-8")
            stored = json.loads(text)
            if stored["digest"] != entry.digest:
                return None
            arrays = {
                name: np.load(entry.path(name), mmap_mode="r", allow_pickle=False)
                for name in entry.names
            }
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None
        claimed = stored.get("arrays_sha256")
        if not isinstance(claimed, str) or (not self.trust and hash_arrays(arrays) != claimed):
            return None
        return arrays, claimed


def hash_arrays(arrays: Arrays) -> str:
    """sha256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        flat = np.ascontiguousarray(array).reshape(-1)
        step = max(1, _HASH_BYTES // flat.itemsize)
        for start in range(0, flat.size, step):
            digest.update(flat[start : start + step].data)
    return digest.hexdigest()


def _store(entry: CacheEntry, arrays: Arrays) -> None:
    if set(arrays) != set(entry.names):
        raise ValueError(f"{entry.kind}: built {sorted(arrays)}, expected {sorted(entry.names)}")
    content = json.loads(entry.description)
    content |= {"digest": entry.digest, "arrays_sha256": hash_arrays(arrays)}
    try:
        entry.directory.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            _replace(entry.path(name), array)
        _replace(entry.path("description"), json.dumps(content, indent=4))
    except OSError as error:
        raise IndexCacheError(
            f"{entry.directory}: the index cache cannot be written ({error.strerror}); set "
            "--data-cache-path"
        ) from error


def _replace(path: Path, content: NDArray[Any] | str) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.uname().nodename}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                np.save(file, content, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
