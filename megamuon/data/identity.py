"""Which data a dataset draws from: an identity for comparisons, and a line for people.

Owns both. Invariants: an identity depends on what is drawn from, never on where it lies, in which
order it is drawn or how much of it, so a longer run over the same corpus has the same; neither
function raises for a dataset that is not ours. Tested by ``tests/data_room/test_identity.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

from megamuon.data.blended_dataset import BlendedDataset
from megamuon.data.gpt_dataset import GPTDataset

SHOWN_PARTS = 8  # of a blend


def data_identity(dataset: Any) -> str | None:
    """32 hexadecimal digits over the contents and ranges of all parts, and their weights; None for
    a dataset that is not ours.
    """
    if isinstance(dataset, GPTDataset):
        content: Any = [dataset.sequences.identity(), list(dataset.spec.bounds)]
    elif isinstance(dataset, BlendedDataset):
        content = [[data_identity(part) for part in dataset.parts], list(dataset.weights)]
    else:
        return None
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def describe_data(datasets: Sequence[Any]) -> list[str]:
    """A line for each of train, valid and test that there is, and one for each part of a blend."""
    lines: list[str] = []
    for name, dataset in zip(("train", "valid", "test"), datasets, strict=False):
        if isinstance(dataset, GPTDataset):
            lines.append(f"{name} data: {_one(dataset)} | corpus {data_identity(dataset)}")
        elif isinstance(dataset, BlendedDataset):
            lines += _blend(name, dataset)
        elif isinstance(dataset, Sized):
            lines.append(f"{name} data: {len(dataset):,} samples of the script's own dataset")
    return lines


def _one(dataset: GPTDataset) -> str:
    plan, spec = dataset.plan, dataset.spec
    low, high = spec.bounds
    samples = plan.samples if spec.samples is None else spec.samples
    epochs = samples * plan.sequence_length / plan.tokens_per_epoch
    again = "data repeats" if plan.epochs > 1 else "no data repeats"
    return (
        f"{samples:,} samples of {plan.sequence_length:,} tokens from "
        f"{Path(dataset.sequences.path).stem}, documents {low:,} to {high:,} of "
        f"{dataset.sequences.lengths.size:,} ({plan.tokens_per_epoch:,} tokens): "
        f"{epochs:.2f} epochs, {again}"
    )


def _blend(name: str, dataset: BlendedDataset) -> list[str]:
    repeating = sum(part.plan.epochs > 1 for part in dataset.parts)
    again = f"data repeats in {repeating} of them" if repeating else "no data repeats"
    count = len(dataset.parts)
    lines = [
        f"{name} data: {len(dataset):,} samples from a blend of {count}, {again} | corpus "
        f"{data_identity(dataset)}"
    ]
    for weight, part in list(zip(dataset.weights, dataset.parts, strict=True))[:SHOWN_PARTS]:
        lines.append(f"  {weight:.4f} {_one(part)}")
    if count > SHOWN_PARTS:
        lines.append(f"  and {count - SHOWN_PARTS} more")
    return lines
