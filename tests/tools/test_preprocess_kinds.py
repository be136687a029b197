"""What the preprocessing tool takes for what: compression, JSON Lines, text, and all else."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megamuon.data import corpus_streams
from megamuon.data.corpus_streams import open_input
from tests.tools.test_preprocess_data import TOOL, documents, run, tool, write_lines

TEXTS = [f"document {number}" for number in range(40)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
NAMES = {
    "part.json.gz": ("JSON Lines (gzip)", gzip.compress(LINES)),
    "part.jsonl.bz2": ("JSON Lines (bzip2)", bz2.compress(LINES)),
    "part.ndjson.xz": ("JSON Lines (xz)", lzma.compress(LINES)),
    "part.jsonl.lzma": ("JSON Lines (xz)", lzma.compress(LINES, format=lzma.FORMAT_ALONE)),
    "PART.JSONL": ("JSON Lines", LINES),
    "part.ndjson": ("JSON Lines", LINES),
    "part.json": ("JSON Lines", LINES),
    "part.txt": ("JSON Lines", LINES),
    "part": ("JSON Lines", LINES),
    "part.jsonl.gz": ("JSON Lines", LINES),  # not compressed, whatever it is called
    "PART.JSONL.GZ": ("JSON Lines (gzip)", gzip.compress(LINES[:500]) + gzip.compress(LINES[500:])),
    "part.dat": ("JSON Lines (gzip)", gzip.compress(b"\xef\xbb\xbf" + LINES)),
}


@pytest.mark.parametrize("name", NAMES)
def test_named_or_in_a_folder(tmp_path: Path, name: str) -> None:
    kind, content = NAMES[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_bytes(content)
    for inputs in (folder, folder / name, folder / "[pP]*"):
        done = tool(inputs, tmp_path / "out", "--overwrite", "--json", tmp_path / "figures.json")
        assert documents(tmp_path / "out_text_document") == TEXTS
        figures = json.loads((tmp_path / "figures.json").read_text())
        assert figures["documents_by_kind"] == {kind: len(TEXTS)}
        assert f"documents_by_kind: {kind} {len(TEXTS)}\nleft_out: nothing\n" in done.stdout


def test_zstd_is_read_where_a_module_is_and_named_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "part.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"123456")
    if not any(_importable(name) for name in corpus_streams._ZSTD_MODULES):
        assert "pip install zstandard" in tool(path, tmp_path / "out", ok=False).stderr

    class Frame:
        """Six bytes to LINES, as a decompressor would."""

        eof, unused_data = False, b""

        def decompress(self, data: bytes) -> bytes:
            if len(data) < 10:
                return b""
            self.eof, self.unused_data = True, data[10:]
            return LINES

    monkeypatch.setattr(corpus_streams, "_zstd_decompressor", lambda path: Frame)
    path.write_bytes((b"\x28\xb5\x2f\xfd" + b"123456") * 2)
    tool(path, tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == TEXTS * 2
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"123")
    assert "in the middle of a frame" in tool(path, tmp_path / "cut", ok=False).stderr


def _importable(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def test_links_hidden_files_and_counts(tmp_path: Path) -> None:
    elsewhere, tree = tmp_path / "elsewhere", tmp_path / "tree"
    for folder in (elsewhere, tree / "sub", tree / ".git", tree / "skip"):
        folder.mkdir(parents=True)
    write_lines(elsewhere / "far.jsonl", ["far"])
    (tree / "near.txt").write_text("near")
    (tree / "skip" / "no.txt").write_text("no")
    (tree / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tree / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (tree / "link").symlink_to(elsewhere)
    (tree / "sub" / "loop").symlink_to(tree)
    (tree / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tree / "pipe")
    flags = ("--exclude", "skip", "--exclude", "*.png", "--json", tmp_path / "figures.json")
    done = tool(tree, tmp_path / "out", *flags)
    assert documents(tmp_path / "out_text_document") == ["far", "near"]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["left_out"] == {
        "broken links": 1,
        "excluded": 2,
        "folders already read": 1,
        "hidden": 2,
        "no files": 1,
    }
    assert "hidden 2 (.DS_Store, .git)" in done.stdout
    assert figures["documents_by_kind"] == {"JSON Lines": 1, "text": 1}
    named = tool(tree, tmp_path / "none", "--suffix", ".PY", ok=False).stderr
    assert "no files ending in .PY" in named
    assert "other suffix" in named


FOREIGN = {
    "array.npy": (b"\x93NUMPY\x01\0v\0{'descr'", "a NumPy array"),
    "data.bin": (bytes(range(256)) * 8, "binary data"),
    "utf16.txt": ("text\n".encode("utf-16"), "UTF-16 text"),
    "bare16.txt": ("text\n".encode("utf-16-le"), "binary data"),
    "notes.zip": (b"PK\x03\x04\x14\0", "a zip archive"),
    "notes.txt.br": (b"text", "compressed or packed (.br)"),
    "notes.lz4": (b"\x04\x22\x4d\x18abc", "compressed by lz4"),
    "twice.jsonl.gz": (gzip.compress(gzip.compress(LINES)), "compressed twice"),
    "inside.jsonl.gz": (gzip.compress(b"\0\1\2"), "binary data"),
    "table.jsonl": (b"PAR1abc", "a Parquet file"),
    "noise.txt": (np.random.default_rng(0).integers(1, 256, 900, np.uint8).tobytes(), "binary"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "fine.txt").write_text("fine")
    content, kind = FOREIGN[name]
    (folder / name).write_bytes(content)
    for inputs in (folder, folder / name):
        error = tool(inputs, tmp_path / "out", ok=False).stderr
        assert f"error: {folder / name}: {kind}" in error
        assert len(error.strip().splitlines()) == 1
    tool(folder, tmp_path / "out", "--exclude", name)
    assert documents(tmp_path / "out_text_document") == ["fine"]


def test_json_that_is_not_in_lines(tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    for value in ([{"text": "a"}, {"text": "b"}], {"id": 1, "text": "a"}):
        path.write_text(json.dumps(value, indent=1))
        assert "not JSON Lines" in tool(path, tmp_path / "out", ok=False).stderr
    path.write_text('{"title": "x"}\n')  # a key was forgotten
    assert f"{path}:1: key 'text' is missing" in tool(path, tmp_path / "out", ok=False).stderr
    path.write_text('{\n "compilerOptions": {}\n}\n')  # a file of a source tree
    tool(path, tmp_path / "out")
    assert len(documents(tmp_path / "out_text_document")) == 1


def test_bytes_that_are_not_utf8_are_counted(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "mark.txt").write_text("\ufeffan honest \ufffd", encoding="utf-8")
    done = tool(tmp_path / "*.txt", tmp_path / "out")
    assert documents(tmp_path / "out_text_document") == ["caf\ufffd", "an honest \ufffd"]
    assert "not_utf8_documents: 1\n" in done.stdout


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 0x10
    return bytes(changed)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_damage_is_one_line_with_its_place(
    tmp_path: Path, packer: str, suffix: str, workers: str
) -> None:
    text = b"".join(os.urandom(30).hex().encode() + b"\n" for _ in range(2000))
    content = b"".join(b'{"text": "%s"}\n' % line for line in text.split())
    whole = PACKERS[packer](content if suffix == ".jsonl" else text)
    path = tmp_path / f"part{suffix}.{packer}"
    for damaged in (whole[:-20], whole[: len(whole) // 2], flipped(whole, len(whole) // 2)):
        path.write_bytes(damaged)
        error = tool(path, tmp_path / "out", "--workers", workers, ok=False).stderr
        assert error.startswith(f"preprocess_data.py: error: {path}:"), error
        assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.glob("out*"))


def tokenizer_files(tmp_path: Path) -> list[tuple[str, ...]]:
    """Flags of a Hugging Face and of a SentencePiece tokenizer."""
    import sentencepiece

    from tests.data_room.test_tokenizer import TEXTS as SENTENCES
    from tests.data_room.test_tokenizer import train_bpe

    folder = train_bpe(tmp_path / "model", {"eos_token": "</s>"})
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(tmp_path / "small"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return [
        ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)),
        (
            "--tokenizer-type",
            "SentencePieceTokenizer",
            "--tokenizer-model",
            str(tmp_path / "small.model"),
        ),
    ]


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "ab\\ud83d"}\n')
    for flags in tokenizer_files(tmp_path):
        for workers in ("1", "2"):
            words = ("--input", path, "--output-prefix", tmp_path / "out", "--workers", workers)
            error = run(*words, *flags, ok=False).stderr
            assert f"{path}:2: character 2 is half of a surrogate pair (\\ud83d)" in error
            assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_else_a_line_can_do(tmp_path: Path, workers: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "fine"}\n' + "[" * 100_000 + "\n")
    error = tool(path, tmp_path / "out", "--workers", workers, ok=False).stderr
    assert f"{path}:2: not JSON" in error
    words = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "none")
    error = run(
        "--input", path, "--output-prefix", tmp_path / "out", "--workers", workers, *words, ok=False
    ).stderr
    assert "--tokenizer-model" in error
    assert len(error.strip().splitlines()) == 1


def test_a_bad_count_is_a_bad_command_line(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", ["x"])
    command = [sys.executable, str(TOOL), "--input", str(tmp_path / "in.jsonl")]
    command += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "byte"]
    done = subprocess.run([*command, "--workers", "0"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--workers 0: must be at least 1" in done.stderr


def test_looking_ahead_reads_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "text"
    content = b"".join(b"line %d\n" % number for number in range(1000)) + b"end"
    path.write_bytes(content)
    with open_input(str(path)) as (stream, name):
        assert (stream.peek_bytes(100), name) == (content[:100], "")
        assert list(stream) == list(io.BytesIO(content))
    with open_input(str(path)) as (stream, _):
        stream.peek_bytes(77)
        assert stream.read() == content
