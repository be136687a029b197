"""Memory that all ranks of a machine share: one segment per rank, all of one size.

Owns making, mapping and giving up the segments.  Invariants: making is collective and ends alike
everywhere: every rank has the memory, or every rank raises the same error; no name stays behind in
/dev/shm, but for that of a rank that is killed outright between making and mapping, which goes when
memory is made again (``[Note: names of the dead]``); the memory is unmapped when it is closed *and*
nothing uses it: tensors over it, and engines that were given ``mapped``, keep what they use. Tested
by ``tests/distributed/test_symmetric.py``.

[Note: names of the dead]

A segment has a name from its making until all ranks have mapped it; a process that dies in between
cannot take it away, and the memory would stay until the machine starts anew. So a name says who
made it: the process number, and the namespace in which that number counts. Whoever makes memory
first removes the names whose makers are dead: those of its own user and its own namespace whose
number no process has. In any other case, and whenever something cannot be seen, the name stays. A
maker that lives is never mistaken for a dead one; if its number was given to another process, the
name stays until that one has ended too. Ranks that look at the same time do no harm: a name is
random and never made twice, so removing it once more finds nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import socket
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megamuon.agreement import gather_objects
from megamuon.collectives.base import CollectiveError
from megamuon.collectives.host_library import HostLibrary, library

FOLDER = Path("/dev/shm")
NAME = "/megamuon-{nonce}-{namespace}.{pid}-{label}-{rank}"
MADE_BY = re.compile(r"megamuon-[0-9a-f]+-(?P<namespace>\d+)\.(?P<pid>[1-9]\d{0,8})-.*")


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
        facts = gather_objects(_own_facts(label, nbytes), group)
        _check_facts(facts)
        remove_names_of_the_dead()
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
        return f"{FOLDER.stat().st_dev} {_pid_namespace()}"
    except OSError:
        return ""


def _pid_namespace() -> int:
    """Inode of the namespace in which the own process number counts; 0 if the system hides it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def remove_names_of_the_dead() -> None:
    """Free what killed processes of this user have left. Never fails. See the module's note."""
    namespace, names = _pid_namespace(), []
    if namespace:
        with contextlib.suppress(OSError):  # a folder that cannot be read
            names = os.listdir(FOLDER)
    for name in names:
        made = MADE_BY.fullmatch(name)
        if made is None or int(made["namespace"]) != namespace or not _dead(int(made["pid"])):
            continue
        with contextlib.suppress(OSError):  # another rank was faster
            if (FOLDER / name).lstat().st_uid == os.geteuid():
                (FOLDER / name).unlink()


def _dead(pid: int) -> bool:
    """Whether no process has this number; False where the system does not say."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


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
    common = {"nonce": facts[0].nonce, "namespace": _pid_namespace(), "label": facts[0].label}
    names = [NAME.format(**common, pid=fact.pid, rank=r) for r, fact in enumerate(facts)]
    mappings: dict[int, _Mapping] = {}

    def attempt(wanted: list[int]) -> None:
        text = ""
        try:
            for r in wanted:
                enter = using.create_segment if r == rank else using.map_segment
                mappings[r] = _Mapping(using, enter(names[r], nbytes), nbytes)
        except CollectiveError as error:
            text = str(error)
        failed = [(r, said) for r, said in enumerate(gather_objects(text, group)) if said]
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
