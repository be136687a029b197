"""Saving and loading in one process: exactness, refusals, kills between the steps, damage,
background.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megamuon.checkpoint import (
    CheckpointError,
    Checkpoints,
    StoredTensor,
    latest,
    load,
    read_documents,
    read_index,
    read_tensor,
    save,
    saving,
)
from megamuon.checkpoint.tracker import TRACKER
from tests.support.pieces import blank, cut, same, stored, wholes

DOCUMENTS = {"args": {"lr": 1e-3, "name": "é"}, "counters": {"iteration": 5}}


def _pieces() -> list[StoredTensor]:
    return cut(wholes(), 0, 1, seed=1)


def _save(directory: Path, iteration: int = 5, **options: Any) -> Path:
    pieces = options.pop("pieces", None) or _pieces()
    options.setdefault("documents", DOCUMENTS)
    return save(directory, iteration, pieces, **options).wait().directory


@pytest.mark.parametrize("seed", range(4))
def test_any_layout_comes_back_as_any_other_bit_for_bit(tmp_path: Path, seed: int) -> None:
    pieces = cut(wholes(), 0, 1, seed)
    save(tmp_path, 5, pieces, documents=DOCUMENTS, rank_documents={"rng": [1, 2]}).wait()
    expected = cut(wholes(), 0, 1, seed + 100)
    wanted = blank(expected)
    loaded = load(tmp_path, 5, wanted)
    assert same(wanted, expected)
    assert loaded.documents == {**DOCUMENTS, "rng": [[1, 2]]}
    assert loaded.elements == sum(whole.numel() for whole in wholes().values())
    assert loaded.tensors == len(wholes()) and loaded.missing == ()


def test_a_load_fills_views_in_place(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    _save(tmp_path, pieces=[stored("w", whole)])
    buffer = torch.zeros(6, 5)
    wanted = [stored("w", buffer.t()[:2], (1, 0), (4, 6))]
    load(tmp_path, 5, wanted, strict=False)
    assert torch.equal(buffer[:, :2], whole[1:3].t()) and not buffer[:, 2:].any()


def test_tools_read_documents_index_and_a_tensor(tmp_path: Path) -> None:
    directory = _save(tmp_path)
    assert read_documents(tmp_path, 5) == DOCUMENTS
    index = read_index(tmp_path, 5)
    assert {name: (entry.shape, entry.dtype) for name, entry in index.items()} == {
        name: (tuple(data.shape), data.dtype) for name, data in wholes().items()
    }
    name = "experts.weight"
    assert torch.equal(read_tensor(tmp_path, 5, name), wholes()[name])
    with pytest.raises(CheckpointError, match="holds no tensor nothing"):
        read_tensor(tmp_path, 5, "nothing")
    (directory / "args.json").write_text(json.dumps({"lr": 2e-3, "name": "é"}, indent=1) + "\n")
    with pytest.raises(CheckpointError, match=r"args.json: expected"):
        read_documents(tmp_path, 5)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a load unpickled something")

    for module, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ):
        monkeypatch.setattr(module, name, refuse)
    wanted = blank(_pieces())
    load(tmp_path, 5, wanted)
    assert same(wanted, _pieces())
    with pytest.raises(AssertionError, match="unpickled"):
        torch.load(io.BytesIO())  # the guard itself works
    for path in (tmp_path / "iter_0000005").iterdir():
        assert path.suffix in (".json", ".safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:-1] if w[-1].data.numel() else w[:-2], "which no rank wants"),
        (lambda w: [*w, stored("new.weight", torch.zeros(2))], "does not hold new.weight"),
        (
            lambda w: [stored("embed.weight", torch.zeros(11, 4)), *w[1:]],
            r"embed.weight was saved with shape \(11, 3\) torch.float32, but the model has shape "
            r"\(11, 4\) torch.float32",
        ),
        (
            lambda w: [stored("embed.weight", torch.zeros(11, 3).bfloat16()), *w[1:]],
            r"embed.weight was saved .* torch.float32, but .* torch.bfloat16",
        ),
        (
            lambda w: [stored("embed.weight", torch.zeros(11, 3).long()), *w[1:]],
            r"embed.weight was saved .* torch.float32, but .* torch.int64",
        ),
        (
            lambda w: [stored("embed.weight", torch.zeros(10, 3), None, (11, 3)), *w[1:]],
            r"embed.weight of shape \(11, 3\): no rank wants the elements \[10:11, 0:3\]",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_touched(
    tmp_path: Path, change: Callable[[list[StoredTensor]], list[StoredTensor]], message: str
) -> None:
    tensors = wholes()
    order = ["embed.weight", *sorted(set(tensors) - {"embed.weight"})]
    _save(tmp_path, pieces=[stored(name, tensors[name]) for name in order])
    wanted = change([stored(n, torch.full_like(tensors[n], 7)) for n in order])
    before = [piece.data.clone() for piece in wanted]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, 5, wanted)
    assert all(torch.equal(a, b.data) for a, b in zip(before, wanted, strict=True))


def test_prefixes_may_be_ignored_and_without_strict_the_rest_is_reported(tmp_path: Path) -> None:
    _save(tmp_path)
    model = {n: t for n, t in wholes().items() if not n.startswith("optimizer.")}
    wanted = blank([stored(n, t) for n, t in model.items()])
    with pytest.raises(CheckpointError, match=r"optimizer.embed.step, .* which no rank wants"):
        load(tmp_path, 5, wanted)
    load(tmp_path, 5, wanted, ignore=("optimizer.",))
    assert same(wanted, [stored(n, t) for n, t in model.items()])
    extra = stored("new.weight", torch.ones(2))
    loaded = load(tmp_path, 5, [*wanted, extra], strict=False)
    assert loaded.missing == ("new.weight",) and torch.equal(extra.data, torch.ones(2))
    assert loaded.tensors == len(wanted)
    assert loaded.filled == tuple(sorted(model))
    assert loaded.unused == tuple(sorted(set(wholes()) - set(model)))


def test_a_wider_float_is_filled_with_the_same_numbers(tmp_path: Path) -> None:
    narrow = torch.tensor([[1 / 3, -2e-30], [65504.0, 3e38]])
    saved = {"half": narrow.bfloat16(), "single": narrow, "count": torch.tensor(3)}
    _save(tmp_path, pieces=[stored(name, tensor) for name, tensor in saved.items()])
    wanted = [
        stored("half", torch.zeros(1, 2), (0, 0), (2, 2)),
        stored("half", torch.zeros(1, 2).double(), (1, 0), (2, 2)),
        stored("single", torch.zeros(2, 2).double()),
        stored("count", torch.tensor(0)),
    ]
    loaded = load(tmp_path, 5, wanted)
    assert torch.equal(wanted[0].data, saved["half"][:1].float())
    assert torch.equal(wanted[1].data, saved["half"][1:].double())
    assert torch.equal(wanted[2].data, narrow.double()) and int(wanted[3].data) == 3
    assert loaded.widened == ("half", "single") and loaded.unused == ()


def test_a_wider_float_is_rounded_once_where_that_is_meant(tmp_path: Path) -> None:
    single = torch.tensor([1 / 3, -2e-30, 65504.0])
    _save(tmp_path, pieces=[stored("w", single)])
    wanted = stored("w", torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match="was saved with shape"):
        load(tmp_path, 5, [wanted])
    loaded = load(tmp_path, 5, [replace(wanted, rounds=True)])
    assert torch.equal(wanted.data, single.bfloat16()) and loaded.widened == ()


def test_pieces_must_cover_a_tensor_once(tmp_path: Path) -> None:
    whole = torch.zeros(4, 3)
    lost = [stored("w", whole[:3], (0, 0), (4, 3))]
    with pytest.raises(CheckpointError, match=r"tensor w .* no rank saved the elements \[3:4, 0:3"):
        _save(tmp_path, pieces=lost)
    twice = [*lost, stored("w", whole[2:], (2, 0), (4, 3))]
    with pytest.raises(CheckpointError, match=r"tensor w .* \[2:4, 0:3\] holds elements that anot"):
        _save(tmp_path, pieces=twice)
    mixed = [*lost, stored("w", whole[3:].double(), (3, 0), (4, 3))]
    with pytest.raises(CheckpointError, match=r"tensor w: rank 0 saves shape .* torch.float64"):
        _save(tmp_path, pieces=mixed)
    assert list(tmp_path.iterdir()) == []  # no tracker, no partial directory


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ({"args": {"path": Path("x")}}, "document 'args' is not JSON"),
        ({"../args": 1}, "document name '../args' must match"),
        ({"manifest": 1}, "document name 'manifest' must"),
    ],
)
def test_documents_that_cannot_be_saved(
    tmp_path: Path, documents: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        _save(tmp_path, documents=documents)
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for a kill: no handler of ours may catch it, nothing runs after it."""


@pytest.mark.parametrize("step", ["_write_pieces", "write_manifest", "publish", "write_tracker"])
@pytest.mark.parametrize("iteration", [5, 10])
def test_a_kill_before_any_step_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, iteration: int
) -> None:
    _save(tmp_path)

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    changed = [stored(p.name, p.data.clone(), p.offset, p.shape) for p in _pieces()]
    for piece in changed:
        piece.data.copy_(torch.ones_like(piece.data))
    with monkeypatch.context() as patch:
        patch.setattr(saving, step, kill)
        with pytest.raises(Killed):
            _save(tmp_path, iteration, pieces=changed)
    assert (tmp_path / TRACKER).read_text() == "5"
    wanted = blank(_pieces())
    assert load(tmp_path, latest(tmp_path) or -1, wanted).iteration == 5
    # The tracker is written last: the replaced iteration 5 is already the new one then.
    new = step == "write_tracker" and iteration == 5
    assert same(wanted, changed if new else _pieces())
    _save(tmp_path, 15)  # cleans up
    assert not [path for path in tmp_path.iterdir() if ".partial-" in path.name]


def test_a_failed_save_keeps_the_tracker_and_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step 'write' failed: rank 0: OSError: .Errno 28."):
        _save(tmp_path, 10)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", TRACKER]
    assert latest(tmp_path) == 5


def test_a_flipped_byte_anywhere_is_noticed_and_its_file_named(tmp_path: Path) -> None:
    directory = _save(tmp_path)
    for path in sorted(directory.iterdir()):
        good = path.read_bytes()
        middle = len(good) // 2
        path.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        with pytest.raises(CheckpointError, match=f"{directory.name}/{path.name}"):
            load(tmp_path, 5, blank(_pieces()))
        path.write_bytes(good[:-2])
        with pytest.raises(CheckpointError, match=f"{directory.name}/{path.name}"):
            load(tmp_path, 5, blank(_pieces()))
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{directory.name}/{path.name} is missing"):
            load(tmp_path, 5, blank(_pieces()))
        path.write_bytes(good)
    load(tmp_path, 5, blank(_pieces()))


def test_a_data_file_that_contradicts_the_index_is_refused(tmp_path: Path) -> None:
    directory = _save(tmp_path, pieces=[stored("w", torch.zeros(2, 3))])
    other = _save(tmp_path, 6, pieces=[stored("w", torch.zeros(3, 2))])
    name = "rank_00000.safetensors"
    os.replace(other / name, directory / name)
    with pytest.raises(CheckpointError, match=r"w holds \(3, 2\) .* promises \(2, 3\)"):
        load(tmp_path, 5, [stored("w", torch.zeros(2, 3))], verify=False)


def test_background_equals_foreground_and_copies_first(tmp_path: Path) -> None:
    pieces = [stored(p.name, p.data.clone(), p.offset, p.shape) for p in _pieces()]
    handle = save(tmp_path / "b", 5, pieces, documents=DOCUMENTS, asynchronous=True)
    for piece in pieces:
        piece.data.zero_()  # training goes on
    report = handle.wait()
    assert handle.done() and report.iteration == 5
    foreground = _save(tmp_path / "f")
    names = sorted(path.name for path in foreground.iterdir())
    assert names == sorted(path.name for path in report.directory.iterdir())
    for name in names:
        assert (foreground / name).read_bytes() == (report.directory / name).read_bytes()


def test_a_background_error_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Checkpoints(tmp_path)
    run.save(5, _pieces(), documents=DOCUMENTS)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "publish", full)
        handle = run.save(10, _pieces(), documents=DOCUMENTS, asynchronous=True)
        with pytest.raises(CheckpointError, match="step 'publish' failed"):
            run.save(15, _pieces(), documents=DOCUMENTS)
    assert handle.done() and latest(tmp_path) == 5
    assert run.wait() is None
    run.save(20, _pieces(), documents=DOCUMENTS, asynchronous=True)
    run.wait()
    assert latest(tmp_path) == 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save-")]


def test_one_save_at_a_time_and_retention(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path)
    for iteration in (50, 100, 150, 200):
        run.save(
            iteration,
            _pieces(),
            documents=DOCUMENTS,
            asynchronous=True,
            retain_interval=100,
            retired=[iteration - 50],
        )
    run.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000100", "iter_0000200", TRACKER]


def test_a_broken_tracker_is_replaced_by_a_save_and_refused_by_a_load(tmp_path: Path) -> None:
    _save(tmp_path)
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(CheckpointError, match=f"{TRACKER} must hold .* found ''"):
        latest(tmp_path)
    assert latest(tmp_path, step=5) == 5
    _save(tmp_path, 10, retain_interval=100)
    assert latest(tmp_path) == 10 and (tmp_path / "iter_0000005").is_dir()


def test_release_checkpoints_load(tmp_path: Path) -> None:
    save(tmp_path, "release", _pieces(), documents={}).wait()
    assert (tmp_path / TRACKER).read_text() == "release" and latest(tmp_path) == "release"
    wanted = blank(_pieces())
    assert load(tmp_path, "release", wanted).iteration == "release"
    assert same(wanted, _pieces())


def test_a_run_without_checkpoint_has_no_latest(tmp_path: Path) -> None:
    assert latest(tmp_path / "new") is None
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        load(tmp_path, 5, [])
