"""Checkpoints over several gloo ranks: resharding, agreement on failure, deaths, background
saves.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamuon.checkpoint import (
    CheckpointError,
    Checkpoints,
    Ranks,
    capture_rng,
    latest,
    load,
    read_documents,
    restore_rng,
    save,
    saving,
    storage,
)
from megamuon.checkpoint.tracker import TRACKER
from tests.support.pieces import blank, cut, same, stored, wholes
from tests.support.ranks import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.slow


def _save(rank: int, world: int, directory: Path, seed: int) -> dict[str, Any]:
    """Save twice (foreground, background) and return what this rank's generators give next."""
    ranks = Ranks.create()
    torch.manual_seed(rank)
    run = Checkpoints(directory, ranks)
    pieces = cut(wholes(), rank, world, seed)
    state = {"documents": {"args": {"by": rank}}, "rank_documents": {"rng": capture_rng()}}
    run.save(5, pieces, **state)
    copies = [stored(p.name, p.data.clone(), p.offset, p.shape) for p in pieces]
    run.save(10, copies, asynchronous=True, **state)
    for piece in copies:
        piece.data.zero_()
    sums = []
    for _ in range(20):  # collectives of training while the thread saves
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(float(total))
    report = run.wait()
    assert report is not None and sums == [world] * 20
    ranks.close()
    return {"next": torch.rand(3), "size": report.size, "pieces": len(pieces)}


def _load(rank: int, world: int, directory: Path, seed: int) -> dict[str, Any]:
    ranks = Ranks.create()
    expected = cut(wholes(), rank, world, seed)
    result: dict[str, Any] = {"latest": latest(directory, ranks=ranks), "same": []}
    for iteration in (5, 10):
        wanted = blank(expected)
        loaded = load(directory, iteration, wanted, ranks=ranks)
        result["same"].append(same(wanted, expected))
        result["elements"] = loaded.elements
    restore_rng(loaded.documents["rng"][rank])
    return {**result, "next": torch.rand(3), "args": loaded.documents["args"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("saved")
    return directory, run_ranks(_save, 4, directory, 3)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_four_ranks_save_and_any_number_loads_with_other_owners(
    saved: tuple[Path, list[dict[str, Any]]], world: int
) -> None:
    directory, savers = saved
    values = run_ranks(_load, world, directory, 40 + world)
    assert all(value["latest"] == 10 and value["same"] == [True, True] for value in values)
    assert sum(v["elements"] for v in values) == sum(t.numel() for t in wholes().values())
    for saver, value in zip(savers, values, strict=False):
        assert torch.equal(saver["next"], value["next"])
        assert value["args"] == {"by": 0}


def test_background_and_foreground_write_the_same_files(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    first, second = saved[0] / "iter_0000005", saved[0] / "iter_0000010"
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        if name != "manifest.json":  # it names the iteration
            assert (first / name).read_bytes() == (second / name).read_bytes()


def test_one_rank_saves_and_more_ranks_than_tensors_load(tmp_path: Path) -> None:
    save(
        tmp_path,
        5,
        cut(wholes(), 0, 1, 8),
        documents={"args": {"by": 0}},
        rank_documents={"rng": 0},
    ).wait()
    assert all(run_ranks(_load_wide, 4, tmp_path))


def _load_wide(rank: int, world: int, directory: Path) -> bool:
    """All tensors on the last rank: the others want nothing and still take part."""
    mine = [stored(n, t) for n, t in wholes().items()] if rank == world - 1 else []
    wanted = blank(mine)
    load(directory, 5, wanted, ranks=Ranks.create())
    return same(wanted, mine)


def _failures(rank: int, world: int, directory: Path) -> dict[str, str]:
    """One message per kind of failure, from this rank."""
    ranks = Ranks.create()
    whole = torch.arange(8.0).reshape(4, 2)
    half = stored("w", whole[2 * rank : 2 * rank + 2], (2 * rank, 0), (4, 2))
    messages: dict[str, str] = {}

    def note(name: str, work: Any) -> None:
        try:
            work()
        except CheckpointError as error:
            messages[name] = str(error)

    def saving_of(pieces: list, **options: Any) -> Any:
        return lambda: save(
            directory, 7, pieces, ranks=ranks, **{"documents": {}, **options}
        ).wait()

    saving_of([half])()
    note("both hold all", saving_of([stored("w", whole)]))
    note("one holds half", saving_of([half] if rank == 0 else []))
    note("shapes differ", saving_of([half] if rank else [stored("w", whole[:2], (0, 0), (5, 2))]))
    note("not json", saving_of([half], documents={"args": {1j} if rank == 1 else 1}))
    real = storage.write_durably
    if rank == 1:
        storage.write_durably = _full
    note("disk full", saving_of([half]))
    note("disk full behind", saving_of([half], asynchronous=True))
    storage.write_durably = real
    note("no ranks", lambda: save(directory, 7, [half], documents={}))
    wanted = [stored("w", torch.zeros(2, 2), (2 * rank, 0), (4, 2))]
    note("extra on one", lambda: load(directory, 7, wanted + _extra(rank), ranks=ranks))
    note("unwanted", lambda: load(directory, 7, wanted if rank else [], ranks=ranks))
    if rank == 0:
        file = directory / "iter_0000007" / "rank_00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    dist.barrier()
    note("flipped", lambda: load(directory, 7, wanted, ranks=ranks))
    assert not wanted[0].data.any()
    return messages


def _extra(rank: int) -> list:
    return [stored("x", torch.zeros(1))] if rank == 1 else []


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


EXPECTED = {
    "both hold all": "tensor w of shape (4, 2): the piece [0:4, 0:2] holds elements that another",
    "one holds half": "tensor w of shape (4, 2): no rank saved the elements [2:4, 0:2]",
    "shapes differ": "rank 1 saves shape (4, 2) torch.float32, rank 0 saves shape (5, 2) torch.fl",
    "not json": "document 'args' is not JSON",
    "disk full": "rank 1: OSError: [Errno 28] No space left on device",
    "disk full behind": "rank 1: OSError: [Errno 28] No space left on device",
    "no ranks": "pass ranks=Ranks.create()",
    "extra on one": "iter_0000007 does not hold x, which the model needs",
    "unwanted": "tensor w of shape (4, 2): no rank wants the elements [0:2, 0:2]",
    "flipped": "iter_0000007/rank_00001.safetensors: expected SHA-256",
}


def test_a_failure_on_one_rank_is_the_same_message_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_failures, 2, tmp_path)
    assert first == second
    assert first.keys() == EXPECTED.keys()
    for name, part in EXPECTED.items():
        assert part in first[name], name
        assert "\n" not in first[name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000007", TRACKER]


def _die(rank: int, world: int, directory: Path, step: str, victim: int) -> str:
    """Die at a step of the second save; the survivors say what they saw."""
    ranks = Ranks.create()
    pieces = cut(wholes(), rank, world, 2)
    save(directory, 5, pieces, documents={}, ranks=ranks).wait()
    if rank == victim:
        setattr(saving, step, lambda *_, **__: os._exit(9))
    try:
        save(directory, 10, pieces, documents={}, ranks=ranks, asynchronous=True).wait()
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("step", "victim"),
    [("_write_pieces", 1), ("write_manifest", 0), ("publish", 0), ("write_tracker", 0)],
)
def test_a_rank_that_dies_is_noticed_and_the_last_checkpoint_loads(
    tmp_path: Path, step: str, victim: int
) -> None:
    outcomes = run_ranks_outcomes(_die, 2, tmp_path, step, victim, timeout=60)
    assert outcomes[victim].exit_code == 9
    survivor = outcomes[1 - victim]
    assert survivor.finished, survivor.error
    assert "lost contact with the other ranks" in survivor.value and "\n" not in survivor.value
    assert ".cc:" not in survivor.value and "This is typically" not in survivor.value
    assert latest(tmp_path) == 5
    expected = cut(wholes(), 0, 1, 9)
    wanted = blank(expected)
    load(tmp_path, 5, wanted)
    assert same(wanted, expected)
    assert read_documents(tmp_path, 5) == {}


def _save_until_killed(rank: int, world: int, directory: Path) -> None:
    """Save two iterations in turn, every tensor holding the number of the save, until somebody
    kills us.
    """
    ranks = Ranks.create()
    for number in range(1, 1_000_000):
        data = torch.full((64, 64), float(number))
        half = stored("w", data[32 * rank : 32 * rank + 32], (32 * rank, 0), (64, 64))
        save(directory, 5 * (number % 2), [half], documents={"number": number}, ranks=ranks).wait()


@pytest.mark.parametrize("seconds", [0.9, 1.07, 1.24])
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path, seconds: float) -> None:
    whole = stored("w", torch.zeros(64, 64))
    save(tmp_path, 5, [whole], documents={"number": 0}).wait()
    outcomes = run_ranks_outcomes(_save_until_killed, 2, tmp_path, timeout=seconds)
    assert not any(outcome.finished or outcome.error for outcome in outcomes), outcomes
    found = latest(tmp_path)
    assert found is not None
    number = load(tmp_path, found, [whole]).documents["number"]
    assert torch.equal(whole.data, torch.full((64, 64), float(number)))
    save(tmp_path, 10, [whole], documents={}).wait()
    assert all("." not in path.name or path.name == TRACKER for path in tmp_path.iterdir())
