"""A bad command line: every problem, exit code 2."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megamuon.training import parse_command_line
from tests.support.training import flags


def test_all_problems_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    words = flags(lr=None, save="somewhere", zero_stage=2) + [
        "--zero-stagg",
        "3",
        "--bf16",
        "--fp64",
    ]
    with pytest.raises(SystemExit) as stopped:
        parse_command_line(words)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    text = "\n".join(lines)
    for part in ("--lr", "--save somewhere: needs --save-interval", "--zero-stage", "--bf16 and"):
        assert part in text
    assert len(lines) == 4


def test_a_script_can_add_flags_of_its_own() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--mixture", type=int, default=3)

    assert parse_command_line(flags(), extra_args_provider=add).extra.mixture == 3
    parsed = parse_command_line([*flags(), "--mixture", "5"], extra_args_provider=add)
    assert parsed.extra.mixture == 5


def test_other_local_ranks_speak_late_and_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamuon.training.command_line.SILENT_SECONDS", 0.0)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        parse_command_line(flags(lr=None, zero_stage=5))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 1: error: --")


@pytest.mark.parametrize(
    ("flag", "words", "part"),
    [
        ("--data-path", "0.3 a x b", "mixes weights and prefixes"),
        ("--train-data-path", "0 a 0 b", "not all zero"),
        ("--valid-data-path", "1 2", "only numbers"),
        ("--test-data-path", "0.3:a b", "stands among weight:prefix words"),
        ("--data-path", "-1 a 2 b", "not negative"),
        ("--data-path", "nan a 2 b", "finite"),
    ],
)
def test_a_bad_blend_is_a_bad_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, words: str, part: str
) -> None:
    plain = [word for word in flags() if word != "--mock-data"]
    more = [] if flag in ("--data-path", "--train-data-path") else ["--train-data-path", "a"]
    listed = tmp_path / "words"
    listed.write_text(words)
    forms = [[flag, *words.split()]]
    if flag == "--data-path":
        forms.append(["--data-args-path", str(listed)])
    for form in forms:
        with pytest.raises(SystemExit) as stopped:
            parse_command_line([*plain, *more, *form])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {flag}: ")
        assert part in line
