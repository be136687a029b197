"""Command lines and small configurations for the tests of flags."""

from __future__ import annotations

from megamuon.arguments import ConfigError, ParsedConfig, parse_config

PRESETS = {
    "small": {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "position_embedding_type": "rope",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "owner_unit_threshold": 100,
    }
}

BASE = (
    "--model small --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--tokenizer-type byte --mock-data"
)


def parse(
    words: str = "", *, base: str = BASE, world_size: int = 2, **more: object
) -> ParsedConfig:
    """Parse ``base`` and ``words``."""
    argv = f"{base} {words}".split()
    return parse_config(argv, presets=PRESETS, world_size=world_size, **more)  # type: ignore[arg-type]


def problems(words: str = "", **more: object) -> tuple[str, ...]:
    """The problems of a command line; none if it is good."""
    try:
        parse(words, **more)  # type: ignore[arg-type]
    except ConfigError as error:
        return error.problems
    return ()
