"""Fingerprints of a run's data by content, so that a resume can compare them.

Owns the identity that a checkpoint stores of each split (which sequences of which corpora, in which
shares), and how a difference between two identities is put into words.  Invariants: a moved or
copied corpus keeps its identity; another tokenization, split, weight or corpus has another one;
reading it costs a pass over the ``.idx`` and ``BLOCKS`` reads of each ``.bin``. Tested by
``tests/data_room/test_identity.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megamuon.data.build import DataSpec, Source, split_sources
from megamuon.data.gpt_dataset import MockSequences
from megamuon.data.indexed import IndexedDataset
from megamuon.data.splits import normalize, split_bounds

Identity = dict[str, Any]  # JSON values
SPLITS = ("training data", "validation data")
BLOCKS, BLOCK_BYTES = 256, 4096  # of a .bin file: evenly spaced, the first and last bytes included


def data_identity(spec: DataSpec) -> Identity:
    """Identity of the training and the validation data of ``spec``; None for a split without
    samples.

    Raises what opening the datasets raises.
    """
    if spec.mock_data:
        mock = MockSequences(spec.vocab_size, spec.eod).fingerprint()
        mock["vocab_size"] = spec.vocab_size
        return {name: None if spec.samples[i] == 0 else mock for i, name in enumerate(SPLITS)}
    corpora: dict[str, tuple[int, Identity]] = {}
    sources = split_sources(spec)
    return {
        name: _split_identity(sources[i], corpora) if spec.samples[i] != 0 else None
        for i, name in enumerate(SPLITS)
    }


def _split_identity(
    source: Source | None, corpora: dict[str, tuple[int, Identity]]
) -> Identity | None:
    if source is None:
        return None
    blend, parts = source.blend, []
    shares = None if blend.weights is None else normalize(blend.weights, "blend")
    for place, prefix in enumerate(blend.prefixes):
        if shares is not None and shares[place] == 0:
            continue  # never drawn
        if prefix not in corpora:
            corpora[prefix] = _corpus(prefix)
        count, corpus = corpora[prefix]
        bounds = split_bounds(source.split, count)[source.position]
        weight = None if shares is None else float(f"{shares[place]:.12g}")
        parts.append({"sequences": bounds and list(bounds), "weight": weight, **corpus})
    return {"corpora": parts}


def _corpus(prefix: str) -> tuple[int, Identity]:
    """Number of sequences, and the contents, of one dataset."""
    dataset = IndexedDataset(prefix)
    try:
        path = Path(dataset.path)
        contents = {"tokens_bytes": path.stat().st_size, "tokens_sha256": _sampled(path)}
        return len(dataset), {**dataset.fingerprint(), **contents}
    finally:
        dataset.close()


def _sampled(path: Path) -> str:
    """SHA-256 of evenly spaced blocks of a file: what a corpus of terabytes can be told by."""
    digest, size = hashlib.sha256(), path.stat().st_size
    last = max(0, size - BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        for start in sorted({last * block // (BLOCKS - 1) for block in range(BLOCKS)}):
            digest.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    return digest.hexdigest()


def identity_digest(identity: Mapping[str, Any]) -> str:
    """Sixteen hex digits that stand for an identity, for a line."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity_difference(stored: Any, present: Any, shown: int = 3) -> str | None:
    """The first values that differ, in words; None where there is none, or one of them is None."""
    if stored is None or present is None or stored == present:
        return None
    found = list(_different(stored, present, ""))
    more = f" and {len(found) - shown} more" if len(found) > shown else ""
    return ", ".join(found[:shown]) + more


def _different(stored: Any, present: Any, where: str) -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(present, dict):
        for key in sorted({*stored, *present}):
            inner = f"{where}.{key}" if where else key
            yield from _different(stored.get(key), present.get(key), inner)
    elif isinstance(stored, list) and isinstance(present, list) and len(stored) == len(present):
        if any(isinstance(value, dict) for value in stored):
            for place, pair in enumerate(zip(stored, present, strict=True)):
                yield from _different(*pair, f"{where}[{place}]")
        elif stored != present:
            yield f"{where} {stored} in the checkpoint, {present} here"
    elif isinstance(stored, list) and isinstance(present, list):
        yield f"{len(stored)} {where} in the checkpoint, {len(present)} here"
    elif stored != present:
        yield f"{where} {_short(stored)} in the checkpoint, {_short(present)} here"


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) > 40 else text
