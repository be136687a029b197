"""Which data a run draws from, in lines for people.

Owns the lines. Invariant: a dataset that is not ours is described too, by its length. Tested by
``tests/data_room/test_summary.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from megamuon.data.blended_dataset import BlendedDataset
from megamuon.data.gpt_dataset import GPTDataset
from megamuon.data.identity import identity_digest

SHOWN_PARTS = 8  # of a blend


def describe_data(datasets: Sequence[Any], identity: Mapping[str, Any]) -> list[str]:
    """A line for each of train, valid and test that there is, and one for each part of a blend.

    ``identity``: of the training and the validation data, as checkpoints store it
    (``identity.data_identity``); its digest ends a line, where it is known.
    """
    lines: list[str] = []
    for name, dataset in zip(("train", "valid", "test"), datasets, strict=False):
        found = identity.get({"train": "training data", "valid": "validation data"}.get(name, ""))
        digest = f" | corpus {identity_digest(found)}" if found else ""
        if isinstance(dataset, GPTDataset):
            lines.append(f"{name} data: {_one(dataset)}{digest}")
        elif isinstance(dataset, BlendedDataset):
            lines += _blend(name, dataset, digest)
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


def _blend(name: str, dataset: BlendedDataset, digest: str) -> list[str]:
    repeating = sum(part.plan.epochs > 1 for part in dataset.parts)
    again = f"data repeats in {repeating} of them" if repeating else "no data repeats"
    count = len(dataset.parts)
    lines = [f"{name} data: {len(dataset):,} samples from a blend of {count}, {again}{digest}"]
    for weight, part in list(zip(dataset.weights, dataset.parts, strict=True))[:SHOWN_PARTS]:
        lines.append(f"  {weight:.4f} {_one(part)}")
    if count > SHOWN_PARTS:
        lines.append(f"  and {count - SHOWN_PARTS} more")
    return lines
