"""Loading: verified, from any layout, filled exactly once or not at all.

Owns the order of the steps of a load: rank 0 reads the manifest, the ranks share the hashing of
the files, the index is checked, and only then torch.distributed.checkpoint fills the wanted
pieces.  Invariant: a load either fills every wanted element exactly once or raises the same error
on all ranks, and nothing is ever unpickled from a file. Tested by
``tests/checkpoint/test_store.py`` and ``tests/distributed/test_checkpoint_ranks.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megamuon.checkpoint.manifest import (
    Manifest,
    check_content,
    check_present,
    read_manifest,
    share,
)
from megamuon.checkpoint.ranks import CheckpointError, Ranks, members_of
from megamuon.checkpoint.retention import restore_replaced
from megamuon.checkpoint.tensors import INDEX, StoredTensor, TensorIndex, index_from_json
from megamuon.checkpoint.tracker import RELEASE, Iteration, directory_name, find_checkpoint

if TYPE_CHECKING:
    from megamuon.checkpoint.dcp_planner import PieceLoadPlanner

Documents = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a load brought."""

    iteration: Iteration
    documents: Documents
    tensors: int  # wanted tensors that this rank filled, wholly or in part
    elements: int  # elements filled on this rank
    missing: tuple[
        str, ...
    ]  # wanted, not in the checkpoint, left as they were (only without strict)
    filled: tuple[str, ...]  # names that were filled, over all ranks
    unused: tuple[str, ...]  # saved names that no rank wanted
    widened: tuple[str, ...]  # names of this rank that were saved in a narrower dtype


def latest(
    directory: Path, *, ranks: Ranks | None = None, step: int | None = None
) -> Iteration | None:
    """The checkpoint to load, the same on all ranks: ``step`` (--ckpt-step), else the tracker's,
    else None.

    Raises CheckpointError where the tracker is unreadable or names a directory that does not
    exist.
    """

    def find() -> Iteration | None:
        restore_replaced(Path(directory))
        return find_checkpoint(Path(directory), step)

    return members_of(ranks).first("find checkpoint", find)


def load(
    directory: Path,
    iteration: Iteration,
    wanted: Sequence[StoredTensor],
    *,
    ranks: Ranks | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    verify: bool = True,
) -> Loaded:
    """Fill ``wanted`` in place from a checkpoint of any layout and world size.  Collective.

    ``strict``: every wanted tensor must exist and every saved element must be wanted by some
    rank; saved names that start with one of ``ignore`` may go unwanted.  A tensor saved in a float
    dtype fills one of a wider dtype, bit for bit the same numbers; narrower ones are refused.
    ``verify`` False skips the hashing; sizes are always compared. Raises CheckpointError on all
    ranks alike, before any tensor is touched for a bad manifest, file, index, name, shape or dtype.
    """
    from megamuon.checkpoint.torch_store import read_pieces  # slow to import, see there

    members = members_of(ranks)
    path = Path(directory) / directory_name(iteration)
    manifest = _verified(path, members, None if verify else ())
    index = members.first("read index", lambda: _read_index(path, manifest))
    planner = read_pieces(wanted, path, index, members, strict=strict, ignore=ignore)
    return _loaded(planner, iteration, members, lambda: _read_documents(path, manifest))


def load_indexed(
    directory: Path, index: TensorIndex, wanted: Sequence[StoredTensor], *, ranks: Ranks | None
) -> Loaded:
    """Fill all of ``wanted`` from the files of a folder that is no checkpoint of ours, by an
    ``index`` that was made and checked for it, the same on all ranks.  Collective; raises as
    ``load`` does.
    """
    from megamuon.checkpoint.torch_store import read_pieces

    members = members_of(ranks)
    planner = read_pieces(wanted, Path(directory), index, members, strict=True, ignore=())
    return _loaded(planner, RELEASE, members, dict)


def _loaded(
    planner: PieceLoadPlanner, iteration: Iteration, members: Ranks, read: Callable[[], Documents]
) -> Loaded:
    elements = members.each("check filled", planner.check_filled)[members.rank]
    documents, filled, unused = members.first(
        "read documents", lambda: (read(), tuple(planner.found), tuple(planner.unwanted))
    )
    return Loaded(
        iteration=iteration,
        documents=documents,
        tensors=len({piece.name for piece in planner.wanted} - set(planner.missing)),
        elements=elements,
        missing=tuple(planner.missing),
        filled=filled,
        unused=unused,
        widened=tuple(sorted(planner.widened)),
    )


def read_documents(
    directory: Path, iteration: Iteration, *, ranks: Ranks | None = None
) -> Documents:
    """The documents of a checkpoint, verified, without its tensors (--use-checkpoint-args).
    Collective.
    """
    members = members_of(ranks)
    path = Path(directory) / directory_name(iteration)

    def read() -> Documents:
        manifest = read_manifest(path)
        names = [f"{name}.json" for name in manifest.documents]
        check_present(path, replace(manifest, files={name: manifest.files[name] for name in names}))
        check_content(path, manifest, names)
        return _read_documents(path, manifest)

    return members.first("read documents", read)


def read_index(directory: Path, iteration: Iteration) -> TensorIndex:
    """Shapes, dtypes and places of a checkpoint's tensors, verified; for tools, in one process."""
    path = Path(directory) / directory_name(iteration)
    manifest = read_manifest(path)
    check_content(path, manifest, [INDEX])
    return _read_index(path, manifest)


def read_tensor(directory: Path, iteration: Iteration, name: str) -> torch.Tensor:
    """One whole tensor of a checkpoint, on the CPU; for tools, in one process.  Hashes nothing."""
    index = read_index(directory, iteration)
    if name not in index:
        raise CheckpointError(f"{directory} iteration {iteration} holds no tensor {name}")
    entry = index[name]
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    piece = StoredTensor(name=name, shape=entry.shape, offset=(0,) * len(entry.shape), data=whole)
    load(directory, iteration, [piece], ranks=Ranks(), strict=False, verify=False)
    return whole


def _verified(path: Path, ranks: Ranks, names: Sequence[str] | None) -> Manifest:
    """The manifest, after the sizes and the content of ``names`` (all files where None) were
    compared.
    """

    def first_look() -> Manifest:
        restore_replaced(path.parent)
        manifest = read_manifest(path)
        check_present(path, manifest)
        return manifest

    manifest = ranks.first("verify", first_look)
    mine = share(manifest, ranks.rank, ranks.size) if names is None else names
    ranks.each("verify", lambda: check_content(path, manifest, mine))
    return manifest


def _read_index(path: Path, manifest: Manifest) -> TensorIndex:
    return index_from_json(_read_json(path / INDEX), path / INDEX, manifest.files)


def _read_documents(path: Path, manifest: Manifest) -> Documents:
    return {name: _read_json(path / f"{name}.json") for name in manifest.documents}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
