"""Shared memory of several ranks: seen by all, left by none, and failures are alike everywhere."""

from __future__ import annotations

import gc
import os
import resource
import secrets
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megamuon.collectives import CollectiveError, symmetric
from megamuon.collectives.host_library import library
from megamuon.collectives.symmetric import SymmetricMemory, SymmetricMemoryUnavailable
from tests.support.ranks import run_ranks, run_ranks_outcomes

WORLD = 4
NBYTES = 1 << 16


def mapped(label: str) -> int:
    """How many segments of memory ``label`` this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/megamuon-" in line and f"-{label}-" in line for line in lines)


def left(label: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"megamuon-*-{label}-*")]


def view(base: int, offset: int, numel: int) -> torch.Tensor:
    import ctypes

    array = (ctypes.c_float * numel).from_address(base + offset)
    return torch.frombuffer(array, dtype=torch.float32)


def error_of(function: object, *arguments: object, **named: object) -> tuple[str, str]:
    try:
        function(*arguments, **named)  # type: ignore[operator]
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def shared_writes(rank: int, world: int, label: str) -> dict[str, object]:
    memory = SymmetricMemory(dist.group.WORLD, NBYTES, label=label)
    seen: dict[str, object] = {"zero": not memory.tensor(0, NBYTES, torch.uint8).any()}
    seen["pids"], seen["mapped"] = memory.pids, mapped(label)
    dist.barrier()
    seen["left"] = left(label)
    memory.tensor(256, 8, torch.float32).fill_(rank + 1.0)
    view(memory.bases[(rank + 1) % world], 1024, 8).fill_(rank + 10.0)  # into the neighbour
    dist.barrier()
    seen["read"] = [view(base, 256, 8).tolist() for base in memory.bases]
    seen["written"] = memory.tensor(1024, 8, torch.float32).tolist()
    dist.barrier()
    memory.close()
    memory.close()
    seen["after"] = mapped(label)
    return seen


def subgroups(rank: int, world: int, label: str) -> dict[str, object]:
    """Two pairs at once: rank r of a pair is not rank r of the world."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    memory = SymmetricMemory(groups[rank % 2], NBYTES, label=label)
    memory.tensor(0, 1, torch.int64).fill_(rank)
    dist.barrier()
    first = [view(base, 0, 2).view(torch.int64).item() for base in memory.bases]
    dist.barrier()
    return {"rank": memory.rank, "first": first}


def failures(rank: int, world: int, label: str) -> dict[str, tuple[str, str]]:
    """Each failure comes from a real cause on one rank."""
    patch = pytest.MonkeyPatch()
    found = {}

    def attempt(name: str, nbytes: int = NBYTES, called: str = label) -> None:
        found[name] = error_of(SymmetricMemory, dist.group.WORLD, nbytes, label=called)
        patch.undo()

    create = library().create_segment
    if rank == 2:
        patch.setattr(library(), "create_segment", lambda name, _: create(name, 2**50))
    attempt("room")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    large = 64 << 20
    if rank == 1:  # address space for the own segment, and not for those of the others
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + large * 3 // 2, limits[1]))
    attempt("mapping", large)
    resource.setrlimit(resource.RLIMIT_AS, limits)

    attempt("size", NBYTES * (2 if rank == 3 else 1))
    attempt("label", NBYTES, f"{label}x" if rank == 3 else label)
    attempt("empty", 0)
    attempt("spelling", NBYTES, f"{label} 1")
    if rank == 1:
        patch.setattr(symmetric, "_boot_id", lambda: "another")
        patch.setattr(symmetric.socket, "gethostname", lambda: "elsewhere")
    attempt("machine")
    if rank == 1:
        patch.setattr(symmetric, "_namespace", lambda: "another")
    attempt("container")
    if rank == 1:
        patch.setattr(symmetric, "library", lambda: raise_missing())
    attempt("library")
    gc.collect()
    found["left"] = (str(left(label)), str(mapped(label)))
    memory = SymmetricMemory(dist.group.WORLD, NBYTES, label=label)  # the group still works
    found["afterwards"] = (str(len(memory.bases)), "")
    return found


def raise_missing() -> None:
    raise CollectiveError("the host library is not there")


def work(rank: int, world: int, label: str) -> dict[str, object]:
    return {
        "shared": shared_writes(rank, world, f"{label}a"),
        "pairs": subgroups(rank, world, f"{label}b"),
        "failures": failures(rank, world, f"{label}c"),
    }


@pytest.fixture(scope="module")
def results() -> list[dict]:
    label = f"t{uuid.uuid4().hex[:8]}"
    values = run_ranks(work, WORLD, label, timeout=120.0)
    assert left(f"{label}?") == []
    return values


# --- several ranks -------------------------------------------------------------------------------


def test_what_one_rank_writes_all_others_read(results: list[dict]) -> None:
    for rank, result in enumerate(results):
        shared = result["shared"]
        assert shared["zero"]
        assert shared["read"] == [[r + 1.0] * 8 for r in range(WORLD)]
        assert shared["written"] == [(rank - 1) % WORLD + 10.0] * 8


def test_no_name_is_left_and_close_unmaps(results: list[dict]) -> None:
    for result in results:
        shared = result["shared"]
        assert (shared["left"], shared["mapped"], shared["after"]) == ([], WORLD, 0)


def test_the_processes_of_all_ranks_are_known(results: list[dict]) -> None:
    assert len({result["shared"]["pids"] for result in results}) == 1
    assert len(set(results[0]["shared"]["pids"])) == WORLD


def test_a_subgroup_shares_among_its_own(results: list[dict]) -> None:
    assert [r["pairs"]["rank"] for r in results] == [0, 0, 1, 1]
    assert [r["pairs"]["first"] for r in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("name", "kind", "texts"),
    [
        ("room", "CollectiveError", ["rank 2: ", "/dev/shm cannot give 1125899906842624 bytes"]),
        ("mapping", "CollectiveError", ["rank 1: ", "mapping 67108864 bytes failed"]),
        ("size", "CollectiveError", ["rank 3 asks for 131072 bytes", "rank 0 for 65536 bytes"]),
        ("label", "CollectiveError", ["rank 3 asks for 65536 bytes as", "all ranks must ask"]),
        ("empty", "ValueError", ["of 0 bytes: the size must be positive"]),
        ("spelling", "ValueError", ["letters, digits, - or _"]),
        (
            "machine",
            "SymmetricMemoryUnavailable",
            ["rank 1 (elsewhere) is on another machine than rank 0 (", "--collectives grouped"],
        ),
        ("container", "SymmetricMemoryUnavailable", ["is on another container than rank 0"]),
        ("library", "SymmetricMemoryUnavailable", ["rank 1: the host library is not there"]),
    ],
)
def test_a_failure_of_one_rank_is_the_same_error_on_all(
    results: list[dict], name: str, kind: str, texts: list[str]
) -> None:
    found = {result["failures"][name] for result in results}
    assert len(found) == 1, found
    ((raised, message),) = found
    assert raised == kind, message
    assert all(text in message for text in texts), message
    assert name != "room" or message.count("rank ") == 1  # the others had theirs


def test_failures_leave_nothing_and_the_next_attempt_succeeds(results: list[dict]) -> None:
    for result in results:
        assert result["failures"]["left"] == ("[]", "0")
        assert result["failures"]["afterwards"] == (str(WORLD), "")


def death(rank: int, world: int, label: str) -> str:
    if rank == 1:
        library().create_segment = lambda name, nbytes: os._exit(3)  # type: ignore[method-assign]
    SymmetricMemory(dist.group.WORLD, NBYTES, label=label)
    return "made"


def test_a_rank_that_dies_in_the_middle_leaves_no_name_of_the_others() -> None:
    label = f"t{uuid.uuid4().hex[:8]}"
    outcomes = run_ranks_outcomes(death, 3, label, timeout=60.0)
    assert [outcome.finished for outcome in outcomes] == [False] * 3
    assert all(outcome.error for outcome in outcomes)  # none of them hung
    assert left(label) == []


# --- names of the dead ---------------------------------------------------------------------------


def killed(rank: int, world: int, label: str) -> str:
    """Rank 1 is killed when all have made their segments and it is about to map the others'."""

    def kill(name: str, nbytes: int) -> int:
        assert any(name.endswith("-1") for name in left(label))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    if rank == 1:
        library().map_segment = kill  # type: ignore[method-assign]
    SymmetricMemory(dist.group.WORLD, NBYTES, label=label)
    return "made"


def test_a_name_of_a_killed_rank_goes_when_memory_is_made_again() -> None:
    label = f"t{uuid.uuid4().hex[:8]}"
    outcomes = run_ranks_outcomes(killed, 3, label, timeout=60.0)
    assert outcomes[1].exit_code == -signal.SIGKILL  # by itself, when it had seen its name
    SymmetricMemory(None, NBYTES, label=f"u{label}").close()
    assert left(label) == []


def crowd(rank: int, world: int, dead: str) -> tuple[int, list[str]]:
    memory = SymmetricMemory(dist.group.WORLD, NBYTES, label="crowd")
    dist.barrier()
    return len(memory.bases), left(dead)


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


class Names:
    """Files that are named as segments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.label = f"names{uuid.uuid4().hex[:8]}"
        self.paths: list[Path] = []

    def add(self, pid: int, namespace: int | None = None) -> Path:
        name = symmetric.NAME.format(
            nonce=secrets.token_hex(8),
            namespace=symmetric._pid_namespace() if namespace is None else namespace,
            pid=pid,
            label=self.label,
            rank=len(self.paths),
        )
        self.paths.append(self.folder / name[1:])
        self.paths[-1].touch()
        return self.paths[-1]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Names:
    """In a folder of its own: in /dev/shm another run may clean up at any time."""
    monkeypatch.setattr(symmetric, "FOLDER", tmp_path)
    return Names(tmp_path)


def test_ranks_that_clean_up_at_once_do_no_harm(dead: int) -> None:
    names = Names(Path("/dev/shm"))
    try:
        for _ in range(200):
            names.add(dead)
        values = run_ranks(crowd, WORLD, names.label, timeout=60.0)
    finally:
        for path in names.paths:
            path.unlink(missing_ok=True)
    assert values == [(WORLD, [])] * WORLD


def test_only_names_of_the_dead_are_removed(names: Names, dead: int) -> None:
    own, parent, gone = names.add(os.getpid()), names.add(os.getppid()), names.add(dead)
    other = names.add(dead, namespace=symmetric._pid_namespace() + 1)
    hidden = names.add(dead, namespace=0)
    unsaid = names.folder / f"megamuon-{secrets.token_hex(8)}-1-{dead}-0"  # a label, not a maker
    unsaid.touch()
    symmetric.remove_names_of_the_dead()
    assert not gone.exists()
    assert all(path.exists() for path in (own, parent, other, hidden, unsaid))


def test_names_of_other_users_are_left_to_them(
    names: Names, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = names.add(dead)
    with monkeypatch.context() as patch:
        patch.setattr(symmetric.os, "geteuid", lambda: theirs.stat().st_uid + 1)
        symmetric.remove_names_of_the_dead()
    assert theirs.exists()
    symmetric.remove_names_of_the_dead()
    assert not theirs.exists()


def refuse(*_: object, **__: object) -> None:
    raise PermissionError("not for you")


@pytest.mark.parametrize("what", ["listdir", "kill", "stat"])
def test_what_cannot_be_seen_is_kept_and_memory_is_made_all_the_same(
    names: Names, dead: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = names.add(dead)
    with monkeypatch.context() as patch:
        patch.setattr(symmetric.os, what, refuse)
        SymmetricMemory(None, NBYTES, label=names.label).close()
    assert path.exists() and left(names.label) == []


# --- one rank ------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> SymmetricMemory:
    return SymmetricMemory(None, 4096, label=f"one{uuid.uuid4().hex[:8]}")


def test_tensors_are_views_with_their_places(memory: SymmetricMemory) -> None:
    first = memory.tensor(512, 6, torch.float32)
    again = memory.tensor(512, 12, torch.bfloat16)
    first.copy_(torch.arange(6.0))
    assert torch.equal(again.view(torch.float32), torch.arange(6.0))
    assert memory.offset_of(first) == 512
    assert memory.offset_of(first[2:]) == 520
    assert memory.offset_of(first.view(2, 3)[1]) == 524
    assert memory.offset_of(memory.tensor(4092, 1, torch.float32)) == 4092
    assert memory.offset_of(torch.zeros(4)) is None
    assert memory.offset_of(memory.tensor(0, 0, torch.float32)) is None
    assert memory.offset_of(torch.zeros(4, device="meta")) is None


def test_tensors_of_two_places_count_their_changes_apart(memory: SymmetricMemory) -> None:
    one, other = memory.tensor(0, 4, torch.float32), memory.tensor(256, 4, torch.float32)
    before = other._version
    one.fill_(1.0)
    assert other._version == before


@pytest.mark.parametrize(
    ("offset", "numel"), [(-4, 1), (0, 1025), (4096, 1), (4093, 0), (2, 1), (0, -1)]
)
def test_what_does_not_fit_is_refused(memory: SymmetricMemory, offset: int, numel: int) -> None:
    with pytest.raises(ValueError, match=r"does not fit in 4096 bytes, or is not aligned to 4"):
        memory.tensor(offset, numel, torch.float32)


def test_a_tensor_keeps_the_memory_after_close(memory: SymmetricMemory) -> None:
    tensor = memory.tensor(0, 1024, torch.float32)
    part = tensor[10:20]
    memory.close()
    del tensor
    gc.collect()
    assert mapped(memory.label) == 1
    assert part.fill_(3.0).sum() == 30.0
    del part
    assert mapped(memory.label) == 0


def test_what_is_held_stays_mapped(memory: SymmetricMemory) -> None:
    held = memory.mapped
    memory.close()
    assert mapped(memory.label) == 1
    del held
    assert mapped(memory.label) == 0


def test_closed_memory_refuses(memory: SymmetricMemory) -> None:
    tensor = memory.tensor(0, 4, torch.float32)
    memory.close()
    assert memory.bases == () and memory.offset_of(tensor) is None
    with pytest.raises(CollectiveError, match="is closed"):
        memory.tensor(0, 4, torch.float32)


def test_memory_that_nobody_refers_to_is_unmapped() -> None:
    label = f"one{uuid.uuid4().hex[:8]}"
    memory = SymmetricMemory(None, 4096, label=label)
    assert mapped(label) == 1 and left(label) == []
    del memory
    assert mapped(label) == 0


def test_it_is_a_collective_error() -> None:
    assert issubclass(SymmetricMemoryUnavailable, CollectiveError)
