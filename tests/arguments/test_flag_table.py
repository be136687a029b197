"""docs/flags.md is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megamuon.arguments import specs_by_dest
from megamuon.arguments.megatron_table import table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("flag_table", ROOT / "tools" / "flag_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(tool):
    assert tool.main(["--check"]) == 0


def test_a_stale_or_missing_page_fails_the_check(tool, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "PAGE", tmp_path / "docs" / "flags.md")
    assert tool.main(["--check"]) == 1
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
    tool.PAGE.write_text(tool.PAGE.read_text() + "more\n")
    assert tool.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err


def test_the_page_has_every_flag(tool):
    page = tool.render()
    for spec in specs_by_dest().values():
        assert all(f"`{name}`" in page for name in spec.spellings)
    for entry in table():
        assert f"`{entry.flags[0]}`" in page
