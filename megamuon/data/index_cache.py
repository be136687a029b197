"""A content-addressed cache of index arrays, shared by the ranks of a job.

Owns the files ``{digest}-{kind}-{split}-{name}.npy`` and ``...-description.txt`` of a cache
directory. Invariants: the digest covers every input of the arrays, so a file is never stale; files
appear by rename, the description last, so that a set is complete or not there; what is loaded has
the hash that its description states, or is untouched since it was written (``[Note: seals]``);
nothing is unpickled. Rank 0 builds first, then each machine's
local rank 0 where it cannot see the result (no shared file system), the others wait with a bound.
There is no communication in here: the caller passes a barrier and compares the hashes. Tested by
``tests/data_room/test_index_cache.py``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megamuon.data.temporary import temporary_path

"""[Note: seals]

A description holds the sha256 of its arrays, and of each file the size and the times of its last
change as they were when the set was complete. A file with the same size and times has not been
written since, not even by somebody who set its modification time back (that moves the time of
change), so its bytes need not be read to be known. A file that was copied, restored or touched has
other times, and is hashed. The times of a file system advance in ticks: a store waits until a tick
has certainly passed, so that a later write cannot carry the same time. The description carries a
hash of itself.
"""

Arrays = Mapping[str, NDArray[Any]]
Barrier = Callable[[str], None]
Compare = Callable[[str, str], None]
Result = TypeVar("Result")
FORMAT = 2  # part of every digest: raise it when an algorithm behind the arrays changes
_HASH_BYTES = 1 << 24
_POLL_SECONDS = 0.1
_LATE_SECONDS = 30.0
_TICK_SECONDS = 0.02  # above the tick of a kernel's file times (at most 10 ms)


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

    @functools.cached_property
    def description(self) -> str:
        """Canonical text of the inputs."""
        content = {"format": FORMAT, "kind": self.kind, "split": self.split, "inputs": self.inputs}
        return json.dumps(content, indent=4, sort_keys=True)

    @functools.cached_property
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
            loaded = _store(entry, build())
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
            stored = json.loads(entry.path("description").read_text(encoding="utf-8"))
            claimed, seals = stored["arrays_sha256"], stored["seals"]
            if stored["digest"] != entry.digest or stored.pop("sha256") != _hash_of(stored):
                return None
            arrays = _mapped(entry)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
            return None
        if not self.trust and seals != _seals(entry) and hash_arrays(arrays) != claimed:
            return None
        return arrays, claimed


def _mapped(entry: CacheEntry) -> Arrays:
    return {
        name: np.load(entry.path(name), mmap_mode="r", allow_pickle=False) for name in entry.names
    }


def _seals(entry: CacheEntry) -> dict[str, list[int]]:
    """Size and times of every array's file. See [Note: seals]."""
    found = {name: os.stat(entry.path(name)) for name in entry.names}
    return {name: [at.st_size, at.st_mtime_ns, at.st_ctime_ns] for name, at in found.items()}


def _settled_seals(entry: CacheEntry) -> dict[str, list[int]] | None:
    """The seals once no later change can have the same times; None where times are whole seconds,
    which would take too long to wait for.
    """
    seals = _seals(entry)
    newest = max(changed for _, _, changed in seals.values())
    if all(changed % 1_000_000_000 == 0 for _, _, changed in seals.values()):
        return None
    time.sleep(max(0.0, min(_TICK_SECONDS, _TICK_SECONDS - (time.time_ns() - newest) * 1e-9)))
    return seals


def _hash_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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


def _store(entry: CacheEntry, arrays: Arrays) -> tuple[Arrays, str]:
    """Write a set; its arrays, mapped, and their hash."""
    if set(arrays) != set(entry.names):
        raise ValueError(f"{entry.kind}: built {sorted(arrays)}, expected {sorted(entry.names)}")
    try:
        entry.directory.mkdir(parents=True, exist_ok=True)
        # The hash and the disk keep different parts of the machine busy.
        with ThreadPoolExecutor(max_workers=1) as other:
            hashed = other.submit(hash_arrays, arrays)
            for name, array in arrays.items():
                _replace(entry.path(name), array)
            digest = hashed.result()
        content = json.loads(entry.description)
        content |= {"digest": entry.digest, "arrays_sha256": digest}
        content["seals"] = _settled_seals(entry)
        content["sha256"] = _hash_of(content)
        _replace(entry.path("description"), json.dumps(content, indent=4))
        return _mapped(entry), digest
    except OSError as error:
        raise IndexCacheError(
            f"{entry.directory}: the index cache cannot be written ({error.strerror}); set "
            "--data-cache-path"
        ) from error


def _replace(path: Path, content: NDArray[Any] | str) -> None:
    temporary = temporary_path(path)
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
