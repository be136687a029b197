"""Memory that all ranks of a machine share: one segment per rank, all of one size.

Owns making, mapping and giving up the segments.  Invariants: making is collective and ends alike
everywhere: every rank has the memory, or every rank raises the same error; no name stays behind in
/dev/shm (a rank that is killed outright in the milliseconds between making and mapping is the
exception); the memory is unmapped when it is closed *and* nothing uses it: tensors over it, and
engines that were given ``mapped``, keep what they use. Tested by
``tests/distributed/test_symmetric.py``.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import socket
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.collectives.base import CollectiveError
from megamuon.collectives.host_library import HostLibrary, library

T = TypeVar("T")

FOLDER = Path("/dev/shm")


class SymmetricMemoryUnavailable(CollectiveError):  # noqa: N818  (what is wrong, like FileNotFound)
    """The ranks cannot share memory: they are on different machines, or one lacks the library."""


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a rank tells the others before any memory is made."""

    machine: str  # equal where memory can be shared
    host: str
    pid: int
    nonce: str
    label: str
    nbytes: int
    unavailable: str  # why this rank cannot take part, "" if it can


class _Mapping:
    """One mapped segment; unmapped when nothing refers to this object any more."""

    def __init__(self, using: HostLibrary, address: int, nbytes: int) -> None:
        self.address = address
        finalizer = weakref.finalize(self, using.unmap_segment, address, nbytes)
        # At the end of the process the system unmaps, after the last thread that might still read.
        finalizer.atexit = False


class SymmetricMemory:
    """This rank's segment, and where this process sees those of the others."""

    def __init__(self, group: dist.ProcessGroup | None, nbytes: int, *, label: str) -> None:
        """Collective over ``group`` (None: a world of one): ``nbytes`` zeros on every rank.

        ``label`` (letters, digits, - and _) names the memory in errors. Raises
        SymmetricMemoryUnavailable where the ranks cannot share memory, CollectiveError where they
        ask for different memory or a segment cannot be had; on all ranks alike.
        """
        self.rank = 0 if group is None else dist.get_rank(group)
        self.nbytes = nbytes
        self.label = label
        facts = _exchange(group, _own_facts(label, nbytes))
        _check_facts(facts)
        self.pids = tuple(fact.pid for fact in facts)
        self._mappings = _make(group, self.rank, facts)
        self.bases = tuple(mapping.address for mapping in self._mappings)
        own = (ctypes.c_char * nbytes).from_address(self.bases[self.rank])
        own.mapping = self._mappings[self.rank]  # a tensor keeps the array, the array the mapping
        self._own: ctypes.Array | None = own

    @property
    def mapped(self) -> object:
        """What keeps all segments mapped as long as somebody holds it."""
        return self._mappings

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements at byte ``offset`` of this rank's own segment.

        Each call gives a tensor of its own storage: autograd counts the writes to a storage, and
        those of one lease must not look like changes of another.
        """
        if self._own is None:
            raise CollectiveError(f"symmetric memory {self.label!r} is closed")
        end = offset + numel * dtype.itemsize
        if offset < 0 or numel < 0 or end > self.nbytes or offset % dtype.itemsize:
            raise ValueError(
                f"symmetric memory {self.label!r}: {numel} x {dtype} at byte {offset} does not fit "
                f"in {self.nbytes} bytes, or is not aligned to {dtype.itemsize}"
            )
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._own, dtype=dtype, count=numel, offset=offset)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Bytes from the start of the own segment to the tensor's first element, None if the tensor
        lies elsewhere (and for one without elements).
        """
        if self._own is None or tensor.device.type != "cpu" or tensor.numel() == 0:
            return None
        offset = tensor.data_ptr() - self.bases[self.rank]
        return offset if 0 <= offset < self.nbytes else None

    def close(self) -> None:
        """Give the memory up; idempotent.

        What tensors and engines still use stays mapped until they are gone, so a late one reads
        old bytes and never crashes.
        """
        self._own = None
        self._mappings = ()
        self.bases = ()


def _own_facts(label: str, nbytes: int) -> _Facts:
    unavailable = ""
    try:
        library()
    except CollectiveError as error:
        unavailable = str(error)
    host = socket.gethostname()
    return _Facts(
        machine=f"{host} {_boot_id()} {_namespace()}",
        host=host,
        pid=os.getpid(),
        nonce=secrets.token_hex(8),
        label=label,
        nbytes=nbytes,
        unavailable=unavailable,
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    """Which /dev/shm and which process numbers: containers of one machine may have their own."""
    try:
        return f"{FOLDER.stat().st_dev} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _exchange(group: dist.ProcessGroup | None, own: T) -> list[T]:
    """Every rank's ``own``, by rank."""
    if group is None:
        return [own]
    everyone: list[T] = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def _check_facts(facts: list[_Facts]) -> None:
    """The same verdict on every rank, because every rank has the same facts."""
    first = facts[0]
    for rank, fact in enumerate(facts):
        where = f"symmetric memory {first.label!r}: rank {rank}"
        if (fact.label, fact.nbytes) != (first.label, first.nbytes):
            raise CollectiveError(
                f"{where} asks for {fact.nbytes} bytes as {fact.label!r}, and rank 0 for "
                f"{first.nbytes} bytes as {first.label!r}: all ranks must ask for the same"
            )
        if fact.unavailable:
            raise SymmetricMemoryUnavailable(f"{where}: {fact.unavailable}")
        if fact.machine != first.machine:
            what = "another machine" if fact.host != first.host else "another container"
            raise SymmetricMemoryUnavailable(
                f"{where} ({fact.host}) is on {what} than rank 0 ({first.host}), and memory is "
                "shared inside one machine only: choose transports of torch.distributed "
                "(--collectives grouped)"
            )
    if first.nbytes <= 0 or not re.fullmatch(r"[\w-]{1,100}", first.label, re.ASCII):
        raise ValueError(
            f"symmetric memory {first.label!r} of {first.nbytes} bytes: the size must be positive, "
            "the label 1 to 100 letters, digits, - or _"
        )


def _make(group: dist.ProcessGroup | None, rank: int, facts: list[_Facts]) -> tuple[_Mapping, ...]:
    """Create the own segment, map all, take the own name away; alike on all ranks."""
    nbytes, using = facts[0].nbytes, library()
    names = [f"/megamuon-{facts[0].nonce}-{facts[0].label}-{r}" for r in range(len(facts))]
    mappings: dict[int, _Mapping] = {}

    def attempt(wanted: list[int]) -> None:
        text = ""
        try:
            for r in wanted:
                enter = using.create_segment if r == rank else using.map_segment
                mappings[r] = _Mapping(using, enter(names[r], nbytes), nbytes)
        except CollectiveError as error:
            text = str(error)
        failed = [(r, said) for r, said in enumerate(_exchange(group, text)) if said]
        if failed:
            lines = "\n".join(f"rank {r}: {said}" for r, said in failed)
            raise CollectiveError(f"symmetric memory {facts[0].label!r} cannot be made\n{lines}")

    try:
        attempt([rank])
        attempt([r for r in range(len(facts)) if r != rank])
    except BaseException:
        mappings.clear()  # now, and not when the last reference to the error is gone
        raise
    finally:
        # After the second exchange everybody has mapped it, or nobody will.
        using.unlink_segment(names[rank])
    return tuple(mappings[r] for r in range(len(facts)))
