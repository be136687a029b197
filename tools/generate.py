"""Continue a text with a trained model: ``python tools/generate.py --load DIR --prompt TEXT``.

Owns the way from a checkpoint to a sample in one process, whatever the number of ranks that saved
it.  Invariant: the model and tokenizer are those of the checkpoint's own arguments; every weight
is filled or the load fails. Tested by ``tests/tools/test_generate.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megamuon.arguments import Config, ConfigError, config_from_nested  # noqa: E402
from megamuon.checkpoint import (  # noqa: E402
    CheckpointError,
    Iteration,
    Ranks,
    StoredTensor,
    latest,
    load,
    read_documents,
    read_index,
)
from megamuon.console import run_script  # noqa: E402
from megamuon.conversion.folder_files import with_kept_tokenizer  # noqa: E402
from megamuon.data.tokenizer import Tokenizer, build_tokenizer  # noqa: E402
from megamuon.models import GPT, gpt_config_from_flags  # noqa: E402
from megamuon.models.generation import generate  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

EMBEDDING = "model.embed_tokens.weight"


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(description="Continue a text with a checkpoint of pretrain_gpt.")
    made.add_argument("--load", required=True, type=Path, help="directory of checkpoints")
    made.add_argument("--iteration", type=int, help="checkpoint to use; the newest when not given")
    made.add_argument("--prompt", default="", help="text to continue")
    made.add_argument("--tokens", type=int, default=100, help="most tokens to add")
    made.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    made.add_argument("--top-k", type=int, default=40, help="draw among so many; 0 = all")
    made.add_argument("--seed", type=int, default=1234)
    add_json_flag(made, __file__)
    return made


def read_model(directory: Path, iteration: Iteration, device: torch.device) -> tuple[GPT, Config]:
    """The model of a checkpoint with its weights in FP32, and the arguments it was trained with."""
    alone = Ranks()
    documents = read_documents(directory, iteration, ranks=alone)
    arguments = documents["args"]
    tokenizer = with_kept_tokenizer(arguments.get("tokenizer", {}), directory)
    config = config_from_nested({**arguments, "tokenizer": tokenizer})
    index = read_index(directory, iteration)
    if EMBEDDING not in index:
        raise CheckpointError(f"{directory} iteration {iteration} holds no {EMBEDDING}: not a GPT")
    rows = index[EMBEDDING].shape[0]
    with torch.device("meta"):
        model = GPT(
            gpt_config_from_flags(config.model, padded_vocab_size=rows, recompute=config.recompute)
        )
    wide = torch.float64 if config.precision.fp64 else torch.float32
    model = model.to(wide).to_empty(device=device)
    pieces = [
        StoredTensor(name=name, shape=tuple(p.shape), offset=(0,) * p.ndim, data=p.detach())
        for name, p in model.named_parameters()
    ]
    load(directory, iteration, pieces, ranks=alone, ignore=("optimizer.",))
    return model, config


def run(arguments: argparse.Namespace) -> str:
    """The continuation.  Raises CheckpointError, ConfigError, ValueError and OSError."""
    if arguments.tokens < 0:
        raise ValueError(f"--tokens {arguments.tokens}: must be at least 0")
    iteration = latest(arguments.load, ranks=Ranks(), step=arguments.iteration)
    if iteration is None:
        raise CheckpointError(f"--load {arguments.load}: no checkpoint there")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, config = read_model(arguments.load, iteration, device)
    flags = config.tokenizer
    tokenizer: Tokenizer = build_tokenizer(
        flags.tokenizer_type,
        flags.tokenizer_model,
        flags.vocab_size,
        vocab_file=flags.vocab_file,
        merge_file=flags.merge_file,
        eod_token=flags.eod_token,
        trust_remote_code=flags.trust_remote_code,
    )
    ids = generate(
        model,
        tokenizer.encode(arguments.prompt) or [tokenizer.eod],
        arguments.tokens,
        limit=config.model.max_position_embeddings or 1,
        vocabulary=tokenizer.vocab_size,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=tokenizer.eod,
        device=device,
    )
    return tokenizer.decode(ids)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 with one line that says what is wrong."""
    arguments = parser().parse_args(argv)
    try:
        text = run(arguments)
    except (CheckpointError, ConfigError, ValueError, OSError, ImportError) as error:
        print(f"generate.py: error: {error}", file=sys.stderr)
        return 1
    print(arguments.prompt + text)
    if arguments.json:
        figures = {"prompt": arguments.prompt, "continuation": text}
        write_json(arguments.json, __file__, figures)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
