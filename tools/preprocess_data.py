"""Turn text into an indexed dataset that the trainer (and Megatron-LM) reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type byte --append-eod --workers 4

Writes ``{prefix}_{key}_document.bin`` and ``.idx``. Owns the command line and the progress display;
the work is in ``megamuon/data/corpus*.py``. Invariants: an error is one line, nothing is written
and the exit code is not 0; what cannot be printed stops nothing. Tested by
``tests/tools/test_preprocess_data.py`` and ``test_preprocess_kinds.py``.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout, not installed

from tqdm import tqdm  # noqa: E402

from megamuon.console import run_script  # noqa: E402
from megamuon.data.corpus import CorpusOptions, find_files  # noqa: E402
from megamuon.data.corpus_streams import COMPRESSED, first_line  # noqa: E402
from megamuon.data.corpus_writer import Progress, write_corpus  # noqa: E402
from megamuon.data.indexed import bin_path, idx_path  # noqa: E402
from megamuon.data.tokenizer import TOKENIZER_TYPES, build_tokenizer  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """The command line; names follow Megatron-LM's tool."""
    made = argparse.ArgumentParser(description="Tokenize text into a .bin/.idx dataset.")
    data = made.add_argument_group("input")
    data.add_argument(
        "--input",
        required=True,
        nargs="+",
        help="JSON Lines or text file, directory, or pattern; gzip, bzip2, xz and zstd are read",
    )
    data.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys to encode, one dataset for each"
    )
    data.add_argument(
        "--suffix",
        action="append",
        default=[],
        help="keep only these files of directories, e.g. .py (repeatable)",
    )
    data.add_argument(
        "--exclude",
        action="append",
        default=[],
        help="leave out files and directories of this name or pattern, e.g. site-packages or "
        "'*.png' (repeatable)",
    )
    tokens = made.add_argument_group("tokenizer")
    tokens.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    tokens.add_argument("--tokenizer-model", help="local file or directory")
    tokens.add_argument("--vocab-size", type=int, help="for NullTokenizer")
    tokens.add_argument("--vocab-file", help="vocab.json, for GPT2BPETokenizer")
    tokens.add_argument("--merge-file", help="merges.txt, for GPT2BPETokenizer")
    tokens.add_argument(
        "--eod-token", help="end-of-document token, where the tokenizer's files name none"
    )
    tokens.add_argument(
        "--trust-remote-code", action="store_true", help="run code of the tokenizer's directory"
    )
    tokens.add_argument(
        "--append-eod", action="store_true", help="end every document with the EOD token"
    )
    output = made.add_argument_group("output")
    output.add_argument(
        "--output-prefix", required=True, help="files are PREFIX_{key}_document.bin and .idx"
    )
    output.add_argument(
        "--overwrite", action="store_true", help="replace a dataset that has these names"
    )
    output.add_argument("--workers", type=int, default=1, help="processes that encode")
    output.add_argument(
        "--partitions", type=int, default=1, help="deal documents to this many parts, then merge"
    )
    output.add_argument(
        "--log-interval", type=int, default=10_000, help="documents between two log lines"
    )
    add_json_flag(made, __file__, output)
    return made


EXPLAINED = (ValueError, OSError, ImportError)  # they say themselves what is wrong


class Display:
    """A progress bar on a terminal, a log line every so many documents elsewhere; both on standard
    error.
    """

    def __init__(self, total_bytes: int | None, log_interval: int) -> None:
        self._interval = max(1, log_interval)
        self._start = time.monotonic()
        self._logged = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="encoding")

    def __call__(self, progress: Progress) -> None:
        if self._bar is not None:
            self._bar.update(progress.bytes - self._bar.n)
            self._bar.set_postfix(documents=progress.documents, tokens=progress.tokens)
            return
        if progress.documents // self._interval > self._logged:
            self._logged = progress.documents // self._interval
            seconds = max(time.monotonic() - self._start, 1e-9)
            print(
                f"Processed {progress.documents} documents ({progress.documents / seconds:.1f} "
                "docs/s, "
                f"{progress.bytes / seconds / 1e6:.2f} MB/s)",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._bar is not None:
            self._bar.close()


def total_size(inputs: Sequence[str], options: CorpusOptions) -> int | None:
    """Bytes of the input files, or None where compression hides them."""
    found = find_files(inputs, options)
    files = [*found.lines, *found.texts]
    if any(file.lower().endswith(COMPRESSED) for file in files):
        return None
    return sum(Path(file).stat().st_size for file in files)


def check_new(prefix: str, keys: Sequence[str], *, overwrite: bool) -> None:
    """Raise ValueError where a dataset would be replaced that runs may be trained on."""
    paths = [of(f"{prefix}_{key}_document") for key in keys for of in (bin_path, idx_path)]
    there = [path for path in paths if path.exists()]
    if there and not overwrite:
        raise ValueError(
            f"--output-prefix {prefix}: {there[0]} exists; give another prefix, or --overwrite to"
            " replace it"
        )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Do the work and return the figures that are printed."""
    # Workers are the parallelism; a tokenizer's own threads would fight them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    make = functools.partial(
        build_tokenizer,
        args.tokenizer_type,
        args.tokenizer_model,
        args.vocab_size,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        eod_token=args.eod_token,
        trust_remote_code=args.trust_remote_code,
    )
    options = CorpusOptions(
        json_keys=tuple(dict.fromkeys(args.json_keys)),
        suffixes=tuple(args.suffix),
        excluded=tuple(args.exclude),
        append_eod=args.append_eod,
        workers=args.workers,
        partitions=args.partitions,
    )
    check_new(args.output_prefix, options.json_keys, overwrite=args.overwrite)
    start = time.monotonic()
    size = total_size(args.input, options) if sys.stderr.isatty() else None
    display = Display(size, args.log_interval)
    try:
        progress, prefixes = write_corpus(args.input, args.output_prefix, make, options, display)
    finally:
        display.close()
    seconds = time.monotonic() - start
    return {
        "documents": progress.documents,
        "documents_by_kind": dict(sorted(progress.kinds.items())),
        "left_out": progress.left_out_counts,
        "left_out_names": progress.left_out,
        "not_utf8_documents": progress.replaced,
        "empty_documents": progress.empty_documents,
        "tokens": progress.tokens,
        "bytes": progress.bytes,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(progress.tokens / max(seconds, 1e-9), 1),
        "output_prefixes": prefixes,
    }


def show(figures: dict[str, Any]) -> None:
    """The figures, a line each."""
    for key, value in figures.items():
        if key == "left_out":
            continue  # its names and counts are in the next line
        text = str(value)
        if isinstance(value, list):
            text = ", ".join(value)
        elif isinstance(value, dict):
            text = ", ".join(f"{name} {count}" for name, count in value.items())
        print(f"{key.removesuffix('_names')}: {text}")


def usage_problems(args: argparse.Namespace) -> list[str]:
    """What no corpus can make right."""
    counts = {"--workers": args.workers, "--partitions": args.partitions}
    return [f"{flag} {value}: must be at least 1" for flag, value in counts.items() if value < 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 with one line that says what is wrong, 2 where that is the command line."""
    args = parser().parse_args(argv)
    problems = usage_problems(args)
    for problem in problems:
        print(f"preprocess_data.py: error: {problem}", file=sys.stderr)
    if problems:
        return 2
    try:
        figures = run(args)
        write_json(args.json, __file__, figures)
    except Exception as error:
        if os.environ.get("MEGAMUON_TRACEBACK", "0") not in ("", "0"):
            raise
        name = "" if isinstance(error, EXPLAINED) else f"{type(error).__name__}: "
        if isinstance(error, OSError) and error.filename is None:  # a write: the disk is full
            name = f"--output-prefix {args.output_prefix}: "
        print(f"preprocess_data.py: error: {name}{first_line(error)}", file=sys.stderr)
        return 1
    show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
