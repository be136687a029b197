"""Tiny training runs for tests: flags, forward steps that misbehave on cue, and parsed output."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megamuon.data import gpt_dataset
from megamuon.data.gpt_indices import build_indices

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

BASE = {
    "model": "nano",
    "tokenizer-type": "byte",
    "seq-length": 16,
    "micro-batch-size": 2,
    "train-iters": 6,
    "lr": 1e-2,
    "lr-decay-style": "constant",
    "log-interval": 1,
    "eval-iters": 2,
    "ns-cost": "closed-form",
}

LOG_LINE = re.compile(
    r"^ \[[\d-]{10} [\d:]{8}\] iteration +(?P<iteration>\d+)/ +(?P<total>\d+)"
    r" \| consumed samples: +(?P<consumed>\d+)"
    r"(?: \| skipped samples: +(?P<skipped_samples>\d+))?"
    r" \| elapsed time per iteration \(ms\): [\d.]+"
    r"(?: \| throughput per GPU \(TFLOP/s/GPU\): [\d.]+)?"
    r" \| learning rate: (?P<lr>[\d.E+-]+)"
    r" \| global batch size: +(?P<batch>\d+)"
    r" \| lm loss: (?P<loss>[\d.E+-]+|nan|NAN|INF|inf)"
    r"(?: \| load_balancing_loss: (?P<balance>[\d.E+-]+))?"
    r" \| loss scale: 1\.0"
    r" \| grad norm: (?P<norm>[\d.]+|nan)"
    r".* \| number of skipped iterations: +(?P<skipped>\d+)"
    r" \| number of nan iterations: +(?P<nan>\d+) \|$",
    re.MULTILINE,
)


def flags(**changes: object) -> list[str]:
    """Words of a command line: BASE with ``changes``; True is a bare flag, None takes one out."""
    values = {**BASE, **{name.replace("_", "-"): value for name, value in changes.items()}}
    if not any(name.endswith("data-path") for name in values):
        values["mock-data"] = True
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(v) for v in (value if isinstance(value, (list, tuple)) else [value])]
    return words


def use_launcher_variables(rank: int, world: int) -> None:
    """What a launcher sets, for ranks that a test has started itself; they will train often."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    reuse_indices()


_indices: dict[tuple[object, ...], tuple[np.ndarray, ...]] = {}


def reuse_indices() -> None:
    """Build the indices of equal datasets once in this process.

    The mock corpus has some million samples, and a process that makes many short runs would spend
    most of its time on putting them in order.
    """
    gpt_dataset.build_indices = _build_once


def _build_once(lengths: np.ndarray, *arguments: object) -> tuple[np.ndarray, ...]:
    key = (lengths.size, zlib.crc32(lengths), *arguments)
    if key not in _indices:
        _indices[key] = build_indices(lengths, *arguments)  # type: ignore[arg-type]
        for built in _indices[key]:
            built.flags.writeable = False
    return _indices[key]


Change = Callable[[int, bool, Tensor], Tensor]


class Recorded:
    """A forward step that records its losses, and may change its output on cue.

    ``change(call, training, losses)`` gets the number of the call (from 1, counted apart in
    training and evaluation).
    """

    def __init__(self, change: Change | None = None, *, reset_positions: bool = False) -> None:
        self.change = change
        self.reset_positions = reset_positions
        self.losses: list[float] = []
        self.first_tokens: dict[bool, list[int]] = {True: [], False: []}
        self.calls = {True: 0, False: 0}

    def __call__(self, batches: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
        import pretrain_gpt

        training = model.training
        self.calls[training] += 1

        def tapped() -> Iterator[Any]:
            batch = next(batches)
            self.first_tokens[training].append(hash(tuple(batch["tokens"].flatten().tolist())))
            yield batch

        losses, loss_function = pretrain_gpt.forward_step(
            tapped(), model, reset_positions=self.reset_positions
        )
        if training:
            self.losses.append(float(losses.detach().double().mean()))
        if self.change is not None:
            losses = self.change(self.calls[training], training, losses)
        return losses, loss_function


def train(words: Sequence[str], forward_step: Any = None) -> int:
    """``pretrain_gpt.main`` with another forward step; returns the exit code."""
    import pretrain_gpt
    from megamuon.models import GPT
    from megamuon.training import (
        build_datasets,
        data_identities,
        model_config,
        parse_command_line,
        pretrain,
        tokenizer_of,
    )

    reuse_indices()
    parsed = parse_command_line(words)
    tokenizer = tokenizer_of(parsed.config)
    return pretrain(
        lambda samples: build_datasets(parsed.config, tokenizer, samples),
        lambda pre_process, post_process: GPT(model_config(parsed.config, tokenizer)),
        forward_step or pretrain_gpt.forward_step,
        parsed=parsed,
        identity_provider=lambda samples: data_identities(parsed.config, tokenizer, samples),
    )


def stored_tensors(directory: Path, iteration: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name."""
    from megamuon.checkpoint import Ranks, StoredTensor, load, read_index

    found = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in read_index(directory, iteration).items()
    }
    pieces = [
        StoredTensor(name=name, shape=tuple(t.shape), offset=(0,) * t.ndim, data=t)
        for name, t in found.items()
    ]
    load(directory, iteration, pieces, ranks=Ranks())
    return found


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names whose tensors are not bit for bit equal."""
    assert set(first) == set(second)
    return [name for name in first if not torch.equal(first[name], second[name])]


def documents(directory: Path, iteration: int) -> dict[str, Any]:
    """The JSON documents of a checkpoint."""
    from megamuon.checkpoint import Ranks, read_documents

    return read_documents(directory, iteration, ranks=Ranks())
