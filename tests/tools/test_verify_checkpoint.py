"""Checkpoints that are whole, changed, cut or not named by the tracker, each told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamuon.checkpoint.files import write_durably
from megamuon.checkpoint.manifest import write_manifest
from megamuon.checkpoint.tracker import TRACKER, directory_name, write_tracker
from tools.verify_checkpoint import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for iteration in (2, 4):
        folder = tmp_path / directory_name(iteration)
        folder.mkdir()
        records = [write_durably(folder / name, [b"x" * 9]) for name in ("a", "b", "args.json")]
        write_manifest(folder, iteration, 1, ["args"], records)
    write_tracker(tmp_path, 4)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[str]]:
    status = main(argv)
    lines = capsys.readouterr().out.splitlines()
    return status, [line for line in lines if not line.endswith(": whole")]


def test_whole_checkpoints_are_said_to_be(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(saved)]) == 0
    assert capsys.readouterr().out.count(": whole\n") == 2


def test_every_bad_file_has_a_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = saved / directory_name(4)
    (newest / "a").write_bytes(b"x" * 8 + b"y")
    (newest / "b").write_bytes(b"x" * 8)
    (newest / "args.json").unlink()
    status, lines = run(capsys, str(saved))
    assert status == 1 and len(lines) == 4
    said = "\n".join(lines)
    for text in ("a: expected SHA-256", "b: expected 9 bytes, found 8", "args.json is missing"):
        assert text in said
    assert lines[-1].endswith("names 4: the newest whole checkpoint is 2")
    assert run(capsys, str(saved), "--ckpt-step", "2") == (0, [])


@pytest.mark.parametrize(
    "content, said", [(None, "is missing"), ("2", "names 2"), ("", "must hold an iteration")]
)
def test_a_tracker_that_is_behind(
    saved: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    (saved / TRACKER).unlink()
    if content is not None:
        (saved / TRACKER).write_text(content)
    status, lines = run(capsys, str(saved))
    assert status == 1 and len(lines) == 1 and said in lines[0]


def test_nothing_to_check(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(saved / "elsewhere")]) == 2
    assert main([str(saved), "--ckpt-step", "3"]) == 2
    assert "no iter_0000003 is there" in capsys.readouterr().err
