"""The preprocessing tool: round trips, worker counts, inputs of every kind, and errors."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megamuon.data.corpus import CHUNK_BYTES, CorpusError, CorpusOptions, find_files
from megamuon.data.corpus_workers import encode_all
from megamuon.data.indexed import IndexedDataset
from megamuon.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "preprocess_data.py"
TEXTS = ["hello wörld", "", "a\nb", "东京 " * 50, "x"]


@dataclass(frozen=True)
class Done:
    """What a run printed."""

    stdout: str
    stderr: str


def load_tool() -> ModuleType:
    specification = importlib.util.spec_from_file_location("preprocess_data", TOOL)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


MAIN = load_tool().main


def run(*words: str | Path, ok: bool = True) -> Done:
    """The tool's main function in this process; starting Python for every case is slow."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = MAIN([str(word) for word in words])
    assert (code == 0) == ok, err.getvalue()
    return Done(out.getvalue(), err.getvalue())


def tool(inputs: str | Path, prefix: Path, *more: str | Path, ok: bool = True) -> Any:
    words = ("--tokenizer-type", "byte", "--append-eod", *more)
    return run("--input", inputs, "--output-prefix", prefix, *words, ok=ok)


def write_lines(path: Path, texts: list[str], **more: str) -> Path:
    lines = [json.dumps({"text": text} | more) + "\n" for text in texts]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def documents(prefix: Path | str) -> list[str | None]:
    """Decoded documents; None stands for an empty one."""
    read = IndexedDataset(prefix)
    ends = read.document_indices
    found: list[str | None] = []
    for start, stop in zip(ends[:-1], ends[1:], strict=True):
        parts = [read[i].tolist() for i in range(start, stop)]
        assert all(part[-1] == 256 for part in parts)
        found.append(ByteTokenizer().decode(parts[0]) if parts else None)
    return found


def pair(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_as_a_command_from_anywhere(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    base = [sys.executable, str(TOOL), "--input", str(source), "--tokenizer-type", "byte"]
    command = [*base, "--append-eod", "--output-prefix", str(tmp_path / "out"), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(documents(tmp_path / "out_text_document")) == 5
    source.write_text("nonsense\n")
    command.append("--overwrite")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("preprocess_data.py: error: ")
    assert len(documents(tmp_path / "out_text_document")) == 5  # the old pair is kept


def test_a_dataset_is_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    tool(source, tmp_path / "out")
    before = pair(tmp_path / "out_text_document")
    other = write_lines(tmp_path / "other.jsonl", TEXTS[:2])
    error = tool(other, tmp_path / "out", ok=False)
    assert "out_text_document.bin exists; give another prefix, or --overwrite" in str(error)
    assert pair(tmp_path / "out_text_document") == before
    tool(other, tmp_path / "out", "--overwrite")
    assert pair(tmp_path / "out_text_document") != before


def test_round_trip_and_figures(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    done = tool(source, tmp_path / "out", "--json", tmp_path / "figures.json")
    expected = [text or None for text in TEXTS]
    assert documents(tmp_path / "out_text_document") == expected
    figures = json.loads((tmp_path / "figures.json").read_text())
    tokens = sum(len(text.encode()) + 1 for text in TEXTS if text)
    assert (figures["documents"], figures["empty_documents"]) == (5, 1)
    assert (figures["tokens"], figures["bytes"]) == (tokens, source.stat().st_size)
    assert figures["tokens_per_second"] > 0
    assert f"tokens: {tokens}" in done.stdout
    assert IndexedDataset(tmp_path / "out_text_document").dtype.name == "uint16"


def test_bytes_do_not_depend_on_workers(tmp_path: Path) -> None:
    texts = [f"document {i} " * (i % 700) for i in range(1200)]
    source = write_lines(tmp_path / "in.jsonl", texts)
    assert source.stat().st_size > 3 * CHUNK_BYTES
    for workers in ("1", "3"):
        tool(source, tmp_path / workers, "--workers", workers)
    assert pair(tmp_path / "1_text_document") == pair(tmp_path / "3_text_document")
    assert documents(tmp_path / "3_text_document") == [text or None for text in texts]


def test_partitions_are_dealt_and_merged_in_order(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    tool(source, tmp_path / "out", "--partitions", "2", "--workers", "2")
    order = [TEXTS[i] or None for i in (0, 2, 4, 1, 3)]
    assert documents(tmp_path / "out_text_document") == order
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["in.jsonl", "out_text_document.bin", "out_text_document.idx"]


def test_keys_compression_and_patterns(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ["one", "two"], title="T")
    lines = write_lines(tmp_path / "b", ["three"], title="").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    tool(tmp_path / "*.jsonl*", tmp_path / "out", "--json-keys", "text", "title")
    assert documents(tmp_path / "out_text_document") == ["one", "two", "three"]
    assert documents(tmp_path / "out_title_document") == ["T", "T", None]


def test_directories_and_plain_text(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "skip").mkdir()
    (tree / "b.py").write_text("b = 1\n")
    (tree / "sub" / "a.py").write_bytes(b"caf\xe9\n")  # Latin-1
    (tree / "skip" / "c.py").write_text("c = 1\n")
    (tree / "note.md").write_text("# no\n")
    (tree / "settings.json").write_text("[1, 2]\n")
    flags = ("--suffix", ".py", "--exclude", "skip")
    tool(tree, tmp_path / "out", *flags)
    assert documents(tmp_path / "out_text_document") == ["b = 1\n", "caf\ufffd\n"]
    tool(tree, tmp_path / "all")
    assert len(documents(tmp_path / "all_text_document")) == 5
    (tmp_path / "one.txt").write_text("line\nline\n")
    tool(tmp_path / "one.txt", tmp_path / "text")
    assert documents(tmp_path / "text_text_document") == ["line\nline\n"]


def test_without_eod(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["ab"])
    run("--input", source, "--output-prefix", tmp_path / "out", "--tokenizer-type", "byte")
    assert IndexedDataset(tmp_path / "out_text_document")[0].tolist() == [97, 98]


def test_null_tokenizer_with_a_large_vocabulary(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["1 70000"])
    words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "70001", "--append-eod")
    run("--input", source, "--output-prefix", tmp_path / "out", *words)
    read = IndexedDataset(tmp_path / "out_text_document")
    assert (read.dtype.name, read[0].tolist()) == ("int32", [1, 70000, 70001])
    bad = run(
        "--input", source, "--output-prefix", tmp_path / "no", *words[:3], "50", ok=False
    ).stderr
    assert f"{source}:1: NullTokenizer: id 70000" in bad


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "not JSON"),
        ('{"text": 3}', "key 'text' is int"),
        ('{"title": "x"}', "key 'text' is missing"),
        ("[1]", "expected a JSON object, got list"),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_lines_are_named(tmp_path: Path, line: str, words: str, workers: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "fine"}\n\n' + line + "\n")
    done = tool(source, tmp_path / "out", "--workers", workers, ok=False)
    assert f"{source}:3: " in done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_empty_corpora_are_errors(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    assert "empty corpus" in tool(tmp_path / "in.jsonl", tmp_path / "out", ok=False).stderr
    write_lines(tmp_path / "in.jsonl", ["", ""])
    assert "empty corpus" in tool(tmp_path / "in.jsonl", tmp_path / "out", ok=False).stderr
    (tmp_path / "empty").mkdir()
    none = tool(tmp_path / "empty", tmp_path / "out", "--suffix", ".py", ok=False).stderr
    assert "no files ending in .py" in none
    assert "no such file" in tool(tmp_path / "absent", tmp_path / "out", ok=False).stderr
    damaged = tmp_path / "cut.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-20])
    assert "damaged" in tool(damaged, tmp_path / "out", ok=False).stderr
    assert not list(tmp_path.glob("out*"))


def test_kinds_of_files(tmp_path: Path) -> None:
    names = ("a.jsonl", "b.json", "c.txt", "d.jsonl.gz", "e.py", "F.NDJSON")
    for name in names:
        (tmp_path / name).write_text("x")
    paths = [str(tmp_path / name) for name in names]
    for inputs in (paths, [str(tmp_path)]):  # one rule for files and folders
        found = find_files(inputs, CorpusOptions())
        lines = {Path(p).name for p in found.lines}
        assert lines == {"a.jsonl", "d.jsonl.gz", "F.NDJSON"}
        assert {Path(p).name for p in found.texts} == set(names) - lines


class DyingTokenizer(ByteTokenizer):
    """A tokenizer that the kernel kills, as it does when memory ends."""

    def encode_array(self, text: str) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_is_an_error_not_a_wait(tmp_path: Path) -> None:
    from megamuon.data.corpus import chunks

    (tmp_path / "a.txt").write_text("text")
    pieces = chunks([], [str(tmp_path / "a.txt")])
    with pytest.raises(CorpusError, match=r"worker 0 .*exit code -9.*--workers"):
        list(encode_all(pieces, DyingTokenizer, CorpusOptions(workers=2)))
