"""The tool's command line: figures of a round trip, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import convert_checkpoint


def test_self_test_writes_its_figures(tmp_path: Path) -> None:
    words = ["--self-test", "mixtral", "--json", str(tmp_path / "figures.json")]
    assert convert_checkpoint.main(words) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["bitwise_round_trip"] is True
    assert figures["max_logit_difference"] < 1e-5 and figures["max_gradient_difference"] < 1e-5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--from hf --to hf --input . --output x", "give --from hf --to megamuon"),
        ("--from hf --to megamuon --input nowhere --output x", "nowhere: no such folder"),
        ("--from hf --to megamuon --input . --output x --dtype bf16", "are of --from megamuon"),
        ("--from hf --to megamuon --input . --output x", "no model_type"),
        ("--from megamuon --to hf --input . --output x", "no checkpoint there"),
    ],
)
def test_one_line(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert convert_checkpoint.main(words.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("convert_checkpoint.py: error: ") and message in line
    assert not (tmp_path / "x").exists()
