"""Convert checkpoints: ``python tools/convert_checkpoint.py --from hf --to megamuon --input D
--output D``, and back.

Owns the flags and the way from a folder to our flags and back; the work is
``megamuon.conversion``'s.  Invariant: the output is complete or absent, and a problem is one line.
Tested by ``tests/tools/test_convert_checkpoint.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megamuon.arguments import (  # noqa: E402
    ConfigError,
    config_from_nested,
    config_from_values,
    config_to_nested,
    values_from_config,
)
from megamuon.checkpoint import CheckpointError, Ranks, latest, read_documents  # noqa: E402
from megamuon.console import run_script  # noqa: E402
from megamuon.conversion import FAMILIES, flags_from_config, read_config  # noqa: E402
from megamuon.conversion.export import export_checkpoint  # noqa: E402
from megamuon.conversion.folder_files import DOCUMENT, TOKENIZER, tokenizer_files  # noqa: E402
from megamuon.conversion.importing import import_folder  # noqa: E402
from megamuon.models import GPT, gpt_config_from_flags  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAIRS = (("hf", "megamuon"), ("megamuon", "hf"))


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        description="Convert a Hugging Face folder to a checkpoint of pretrain_gpt, or back."
    )
    made.add_argument("--from", dest="source", choices=("hf", "megamuon"), help="form of --input")
    made.add_argument("--to", dest="target", choices=("megamuon", "hf"), help="form of --output")
    made.add_argument("--input", type=Path, help="folder to read")
    made.add_argument("--output", type=Path, help="new or empty folder to write")
    made.add_argument("--iteration", type=int, help="checkpoint of ours; the newest when not given")
    made.add_argument(
        "--dtype", choices=sorted(DTYPES), help="of an exported folder; as stored when not given"
    )
    made.add_argument(
        "--self-test",
        choices=sorted(FAMILIES),
        metavar="FAMILY",
        help="convert a random model there and back and compare (needs transformers)",
    )
    made.add_argument(
        "--bench",
        choices=("7b", "0.5b"),
        help="convert a folder of this shape both ways; time and memory (7b: 31 GB of disk)",
    )
    add_json_flag(made, __file__)
    return made


class Progress:
    """A bar on a terminal, a line for each tenth elsewhere."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.shown = -1
        self.started = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        terminal = sys.stderr.isatty()
        step = done * 10 // max(total, 1) if not terminal else done * 100 // max(total, 1)
        if step == self.shown:
            return
        self.shown = step
        share = done / max(total, 1)
        bar = "#" * int(30 * share)
        seconds = time.monotonic() - self.started
        text = f"{self.verb} [{bar:30}] {done / 1e9:.2f} of {total / 1e9:.2f} GB, {seconds:.0f} s"
        end = "\r" if terminal and done < total else "\n"
        print(text, end=end, file=sys.stderr, flush=True)


def to_ours(folder: Path, output: Path) -> str:
    """Import; what was done, in a line."""
    values = flags_from_config(read_config(folder), folder)
    if tokenizer_files(folder):
        tokenizer = str((output / TOKENIZER).absolute())
        values.update(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tokenizer)
    config = config_from_values(values)
    rows = values["padded_vocab_size"]
    with torch.device("meta"):
        model = GPT(
            gpt_config_from_flags(config.model, padded_vocab_size=rows, recompute=config.recompute)
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    named = import_folder(
        folder,
        output,
        shapes=shapes,
        arguments=config_to_nested(config),
        advance=Progress("converting"),
    )
    for line in named:
        print(f"not used: {line}")
    return f"{len(shapes)} weights in {output}: start with --load {output} --use-checkpoint-args"


def to_theirs(folder: Path, output: Path, step: int | None, dtype: torch.dtype | None) -> str:
    """Export; what was done, in a line."""
    alone = Ranks()
    iteration = latest(folder, ranks=alone, step=step)
    if iteration is None:
        raise CheckpointError(f"--input {folder}: no checkpoint there")
    documents = read_documents(folder, iteration, ranks=alone)
    config = config_from_nested(documents["args"])
    family = export_checkpoint(
        folder,
        iteration,
        output,
        flags=values_from_config(config),
        documents=documents.get(DOCUMENT) or {},
        dtype=dtype,
        advance=Progress("converting"),
    )
    if not tokenizer_files(output):
        print(f"no tokenizer files: {folder / TOKENIZER} has none")
    return f"{family} in {output}"


def convert(arguments: argparse.Namespace) -> str:
    """The conversion that the flags ask for."""
    folder, output = arguments.input, arguments.output
    if (arguments.source, arguments.target) not in PAIRS or folder is None or output is None:
        raise ValueError("give --from hf --to megamuon or the reverse, --input and --output")
    if not folder.is_dir():
        raise ValueError(f"--input {folder}: no such folder")
    if arguments.source == "megamuon":
        dtype = DTYPES.get(arguments.dtype)
        return to_theirs(folder, output, arguments.iteration, dtype)
    if arguments.dtype or arguments.iteration is not None:
        raise ValueError("--dtype and --iteration are of --from megamuon")
    return to_ours(folder, output)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 with one line that says what is wrong."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.self_test or arguments.bench:
            from tools import convert_trials

            figures = (
                convert_trials.self_test(arguments.self_test)
                if arguments.self_test
                else convert_trials.bench(arguments.bench)
            )
            for name, value in figures.items():
                print(f"{name}: {value}")
            write_json(arguments.json, __file__, figures)
            return 0 if figures["passed"] else 1
        print(convert(arguments))
    except (CheckpointError, ConfigError, ValueError, OSError, ImportError) as error:
        print(f"convert_checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
