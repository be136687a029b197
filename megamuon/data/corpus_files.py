"""Which files are a corpus, and what is in each: JSON Lines or text, and how it is compressed.

Owns the rule by which ``tools/preprocess_data.py`` reads its inputs. Invariants: the rule is the
same for a file that is named and for one in a folder; compression is told by content, never by
name; what is neither JSON Lines nor text is an error that names the file, and never becomes tokens;
nothing of a folder is left out without a count. Tested by ``tests/tools/test_preprocess_kinds.py``.

A file is JSON Lines if its name says so (``.jsonl``, ``.ndjson``, ``.jsonlines``, in any case and
before a suffix of compression), or if its first line is a JSON object with the keys that are
wanted, or its first two lines are JSON objects. All else is text, one document for each file.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megamuon.data.corpus_streams import COMPRESSED, CorpusError, foreign_kind, open_input

LINE_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
HEAD_BYTES = 1 << 16
_LINE_BYTES = 1 << 24  # of a first line that is looked at; a longer one is no line of JSON
_SHOWN = 3  # names that stand beside a count


@dataclass(kw_only=True)
class Found:
    """The files of a corpus, sorted inside each input, and what was left out by reason."""

    lines: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def leave_out(self, reason: str, path: str) -> None:
        """Count ``path`` under ``reason``."""
        self.left_out.setdefault(reason, []).append(path)

    def describe_left_out(self) -> str:
        """``hidden 1 (.DS_Store), ...``, or ``nothing``."""
        parts = []
        for reason, paths in sorted(self.left_out.items()):
            names = ", ".join(os.path.basename(path) for path in sorted(paths)[:_SHOWN])
            more = ", ..." if len(paths) > _SHOWN else ""
            parts.append(f"{reason} {len(paths)} ({names}{more})")
        return "; ".join(parts) or "nothing"


def find_files(
    inputs: Sequence[str], keys: Sequence[str], suffixes: Sequence[str], excluded: Sequence[str]
) -> Found:
    """The files that the inputs name: files, folders (with links to folders), patterns.

    ``suffixes`` (empty: all) and ``excluded`` (names or patterns of files and folders) choose among
    what folders hold. Raises CorpusError for an input that names nothing, for a file that is
    neither text nor JSON Lines, and for a corpus without files.
    """
    found = Found()
    for name in inputs:
        for path in _named(name):
            files = _Walk(found, suffixes, excluded)(path) if os.path.isdir(path) else [path]
            for file in files:
                (found.lines if is_json_lines(file, keys) else found.texts).append(file)
    if not found.lines and not found.texts:
        wanted = f" ending in {', '.join(suffixes)}" if suffixes else ""
        raise CorpusError(
            f"--input {' '.join(inputs)}: empty corpus, no files{wanted}; left out: "
            f"{found.describe_left_out()}"
        )
    return found


def _named(name: str) -> list[str]:
    if os.path.isfile(name) or os.path.isdir(name):
        return [name]
    if os.path.exists(name):
        raise CorpusError(f"--input {name}: neither a file nor a folder; write it to a file first")
    matches = sorted(glob.glob(name, recursive=True))
    # ** gives the files of every folder beside the folders.
    found = [m for m in matches if os.path.isfile(m) or ("**" not in name and os.path.isdir(m))]
    if not found:
        raise CorpusError(f"--input {name}: no such file, directory or pattern")
    return found


class _Walk:
    """The files of one folder; every folder below is entered once, by whatever link."""

    def __init__(self, found: Found, suffixes: Sequence[str], excluded: Sequence[str]) -> None:
        self._found = found
        self._suffixes = tuple(suffix.lower() for suffix in suffixes)
        self._excluded = excluded
        self._entered: set[tuple[int, int]] = set()

    def __call__(self, folder: str) -> list[str]:
        waiting, files = [folder], []
        while waiting:
            here = waiting.pop()
            try:
                at = os.stat(here)
                entries = sorted(os.scandir(here), key=lambda entry: entry.name, reverse=True)
            except OSError as error:
                raise CorpusError(f"{here}: cannot be read ({error.strerror})") from error
            if (at.st_dev, at.st_ino) in self._entered:
                self._found.leave_out("folders already read", here)
                continue
            self._entered.add((at.st_dev, at.st_ino))
            for entry in entries:
                reason = self._reason(entry)
                if reason is not None:
                    self._found.leave_out(reason, entry.path)
                elif entry.is_dir():
                    waiting.append(entry.path)
                else:
                    files.append(entry.path)
        return sorted(files)

    def _reason(self, entry: os.DirEntry[str]) -> str | None:
        """Why an entry is left out; None for a folder to enter and a file to read."""
        if any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in self._excluded):
            return "excluded"
        if entry.name.startswith("."):
            return "hidden"
        if entry.is_dir():
            return None
        if not entry.is_file():
            return "broken links" if entry.is_symlink() else "no files"
        endings = (entry.name.lower(), plain_name(entry.name))
        if self._suffixes and not any(name.endswith(self._suffixes) for name in endings):
            return "other suffix"
        return None


def plain_name(path: str) -> str:
    """The name in lower case and without the suffix of a compression."""
    name = os.path.basename(path).lower()
    stem, dot = os.path.splitext(name)
    return stem if dot in COMPRESSED else name


def is_json_lines(path: str, keys: Sequence[str]) -> bool:
    """Whether the documents of ``path`` are its lines.

    Raises CorpusError, naming the file, for what is neither text nor JSON Lines, and for a JSON
    file that holds the keys but not in lines.
    """
    with open_input(path) as (stream, _):
        head = stream.peek_bytes(HEAD_BYTES)
        problem = foreign_kind(path, head)
        if problem is not None:
            raise CorpusError(
                f"{path}: {problem}, not text or JSON Lines; convert it, or leave it out "
                f"(--exclude {Path(path).name})"
            )
        name = plain_name(path)
        if name.endswith(LINE_SUFFIXES):
            return True
        start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        if start[:1] == b"{":
            lines = stream.first_lines(2, _LINE_BYTES)
            objects = [_object(line) for line in lines]
            if objects and objects[0] is not None:
                wanted = all(isinstance(objects[0].get(key), str) for key in keys)
                if wanted or name.endswith(".json") or (len(lines) == 2 and objects[1] is not None):
                    return True
    if name.endswith(".json") and start[:1] in (b"{", b"["):
        _refuse_documents(path, start, keys)
    return False


def _object(line: bytes) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse_documents(path: str, start: bytes, keys: Sequence[str]) -> None:
    """A JSON array of documents would otherwise be one document of brackets."""
    for key in keys:
        if re.search(rb"[\[{,]\s*" + re.escape(json.dumps(key).encode()) + rb"\s*:", start):
            raise CorpusError(
                f"{path}: one JSON value with the key {key!r}, not JSON Lines; write one object "
                "on each line, without brackets and commas around them"
            )
