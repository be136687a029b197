"""The seal: what it notices, and how the work of noticing is shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megamuon.checkpoint.files import write_durably
from megamuon.checkpoint.manifest import (
    MANIFEST,
    check_content,
    check_present,
    read_manifest,
    share,
    write_manifest,
)
from megamuon.checkpoint.ranks import CheckpointError


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    sizes = {"a": 10, "b": 7, "c": 6, "d": 5, "args.json": 1}
    records = [write_durably(tmp_path / name, [b"x" * size]) for name, size in sizes.items()]
    write_manifest(tmp_path, 100, 4, ["args"], records)
    return tmp_path


def test_a_seal_is_read_back(sealed: Path) -> None:
    manifest = read_manifest(sealed)
    assert (manifest.iteration, manifest.world_size, manifest.documents) == (100, 4, ("args",))
    assert manifest.size == 29
    check_present(sealed, manifest)
    check_content(sealed, manifest, list(manifest.files))


def test_every_file_has_one_rank_to_hash_it(sealed: Path) -> None:
    manifest = read_manifest(sealed)
    for size in (1, 2, 3, 8):
        shares = [share(manifest, rank, size) for rank in range(size)]
        assert sorted(name for of_rank in shares for name in of_rank) == sorted(manifest.files)
    loads = [sum(manifest.files[n].size for n in share(manifest, r, 2)) for r in range(2)]
    assert loads == [15, 14]


def test_a_cut_a_change_and_a_loss_name_their_file(sealed: Path) -> None:
    manifest = read_manifest(sealed)
    (sealed / "b").write_bytes(b"x" * 6 + b"y")
    check_present(sealed, manifest)
    check_content(sealed, manifest, ["a", "c"])
    with pytest.raises(CheckpointError, match=r"/b: expected SHA-256 \w{64}, found \w{64}"):
        check_content(sealed, manifest, ["a", "b"])
    (sealed / "c").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="/c: expected 6 bytes, found 1"):
        check_present(sealed, manifest)
    (sealed / "c").unlink()
    with pytest.raises(CheckpointError, match="/c is missing"):
        check_present(sealed, manifest)


def test_the_seal_notices_its_own_change(sealed: Path) -> None:
    path = sealed / MANIFEST
    good = path.read_text()
    path.write_text(good.replace('"size": 10', '"size": 11'))
    with pytest.raises(CheckpointError, match=r"manifest.json: expected digest .* found"):
        read_manifest(sealed)
    path.write_text(good[:50])
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        read_manifest(sealed)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="'format' must be"):
        read_manifest(sealed)
    body = json.loads(good) | {"version": 9}
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="format version 9 is not 1"):
        read_manifest(sealed)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        read_manifest(sealed)


def test_a_file_outside_the_directory_is_refused(tmp_path: Path) -> None:
    record = write_durably(tmp_path / "a", [b"x"])
    evil = type(record)(name="../a", size=1, sha256=record.sha256)
    with pytest.raises(ValueError, match="not a plain name"):
        write_manifest(tmp_path, 1, 1, [], [evil])
    with pytest.raises(CheckpointError, match="not a plain name"):
        read_manifest(tmp_path)
