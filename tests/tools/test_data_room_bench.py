"""tools/bench/data_room.py: ours and the reference agree, and the figures are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megamuon.data import native
from tools.bench import data_room


def test_figures_and_equality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--draws 5000 --documents 300 --mean-length 40 --length 32 --items 60 --repeats 1"
    path = tmp_path / "figures.json"
    assert data_room.main([*words.split(), "--json", str(path)]) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    for name in ("blend", "build", "open", "cached_load", "items"):
        assert document[name]["ratio"] >= 0
        assert f"{name} " in printed
    assert document["samples"] == int(2.5 * document["tokens"] / 32)


def test_without_a_library_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    assert data_room.main([]) == 1
    assert "the host library is absent" in capsys.readouterr().err
