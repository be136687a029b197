"""``manifest.json``: the list of a checkpoint's files with sizes and SHA-256 sums.

Owns the list of a checkpoint's files with size and SHA-256.  It is written last, so a directory
without it was never complete, and it carries a digest of itself, so a change of the manifest is
told from a change of a file.  Invariant: a checkpoint whose manifest verifies is the one that was
written, byte for byte.  Tested by ``tests/checkpoint/test_manifest.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamuon.checkpoint.files import FileRecord, encode_json, hash_file, write_durably
from megamuon.checkpoint.ranks import CheckpointError
from megamuon.checkpoint.tracker import Iteration

MANIFEST = "manifest.json"
FORMAT = "megamuon-checkpoint"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``manifest.json`` says."""

    iteration: Iteration
    world_size: int  # ranks that saved
    documents: tuple[str, ...]  # names without ".json"
    files: Mapping[str, FileRecord]
    run: str | None = None  # which run saved; None: it did not say

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())


def write_manifest(
    directory: Path,
    iteration: Iteration,
    world_size: int,
    documents: Sequence[str],
    records: Sequence[FileRecord],
    *,
    run: str | None = None,
) -> Manifest:
    """Seal ``directory``; all its files are on the device already.  Raises OSError."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "iteration": iteration,
        "world_size": world_size,
        **({} if run is None else {"run": run}),
        "documents": list(documents),
        "files": {
            record.name: {"size": record.size, "sha256": record.sha256}
            for record in sorted(records, key=lambda record: record.name)
        },
    }
    body["digest"] = _digest(body)
    write_durably(directory / MANIFEST, [encode_json(body)])
    return _parse(body)


def read_manifest(directory: Path) -> Manifest:
    """Read the seal.  Raises CheckpointError naming the file where it is missing, changed, or of
    another version.
    """
    path = directory / MANIFEST
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: {directory.name} was not completely written or is no "
            "checkpoint of this project; "
            "choose another one with --ckpt-step"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path}: 'format' must be {FORMAT!r}")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: format version {body.get('version')!r} is not {VERSION}, the version "
            "that this release reads"
        )
    found, expected = _digest(body), body.get("digest")
    if found != expected:
        raise CheckpointError(
            f"{path}: expected digest {expected}, found {found}: the file has changed since it "
            "was written"
        )
    try:
        return _parse(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: malformed entry ({error!r})") from error


def check_present(directory: Path, manifest: Manifest) -> None:
    """Raise CheckpointError naming a file that is missing or has another size.  Reads no
    content.
    """
    for name, record in manifest.files.items():
        path = directory / name
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is missing: {MANIFEST} lists it with {record.size} bytes; restore the "
                "file or choose "
                "another checkpoint with --ckpt-step"
            ) from error
        if size != record.size:
            raise CheckpointError(
                f"{path}: expected {record.size} bytes, found {size}: the file was cut or "
                "changed; restore it or "
                "choose another checkpoint with --ckpt-step"
            )


def run_of(directory: Path) -> str | None:
    """Which run saved the checkpoint in ``directory``; None where that cannot be told."""
    try:
        return read_manifest(directory).run
    except CheckpointError:
        return None


def share(manifest: Manifest, rank: int, size: int) -> list[str]:
    """The files that one of ``size`` ranks hashes: every file once over all ranks, loads within
    one file of even.
    """
    loads = [0] * size
    mine = []
    for record in sorted(manifest.files.values(), key=lambda record: (-record.size, record.name)):
        lightest = loads.index(min(loads))
        loads[lightest] += record.size
        if lightest == rank:
            mine.append(record.name)
    return mine


def check_content(directory: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Raise CheckpointError naming a file of ``names`` whose SHA-256 is not the one written."""
    for name in names:
        try:
            found = hash_file(directory / name)
        except OSError as error:
            raise CheckpointError(f"{directory / name} cannot be read: {error}") from error
        expected = manifest.files[name].sha256
        if found != expected:
            raise CheckpointError(
                f"{directory / name}: expected SHA-256 {expected}, found {found}: the file has "
                "changed since it was "
                "written; restore it or choose another checkpoint with --ckpt-step"
            )


def _parse(body: Mapping[str, Any]) -> Manifest:
    files = {}
    for name, entry in body["files"].items():
        if (
            Path(name).name != name
        ):  # a checkpoint from elsewhere must not reach outside its directory
            raise ValueError(f"file name {name!r} is not a plain name")
        files[name] = FileRecord(name=name, size=int(entry["size"]), sha256=str(entry["sha256"]))
    documents = tuple(str(name) for name in body["documents"])
    for name in documents:
        if f"{name}.json" not in files:
            raise ValueError(f"document {name!r} is not among the files")
    return Manifest(
        iteration=body["iteration"],
        world_size=int(body["world_size"]),
        documents=documents,
        files=files,
        run=None if body.get("run") is None else str(body["run"]),
    )


def _digest(body: Mapping[str, Any]) -> str:
    """SHA-256 of everything but the digest itself, in canonical JSON."""
    rest = {key: value for key, value in body.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
