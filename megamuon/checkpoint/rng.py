"""The random state of one process, as JSON and back, bit for bit.

Owns what "random state" means for a resume: torch on the CPU, torch on the current CUDA device
where there is one, NumPy's global generator, Python's ``random``, and any torch.Generator given
by name.  Invariant: after ``restore_rng(capture_rng())`` every one of them continues with the
same numbers, cached normal deviates included.  Tested by ``tests/checkpoint/test_rng.py``.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megamuon.checkpoint.ranks import CheckpointError


def capture_rng(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """The state of every generator of this process and of ``generators``, as a JSON value."""
    version, numbers, cached = random.getstate()
    algorithm, keys, position, has_cached, normal = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "state": _words(numbers), "cached": cached},
        "numpy": {
            "algorithm": str(algorithm),
            "keys": _words(keys),
            "position": int(position),
            "has_cached": int(has_cached),
            "cached": float(normal),
        },
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "generators": {
            name: _encode(generator.get_state()) for name, generator in (generators or {}).items()
        },
    }


def restore_rng(
    state: Mapping[str, Any], generators: Mapping[str, torch.Generator] | None = None
) -> None:
    """Set every generator to a captured state.  Raises CheckpointError naming the part that does
    not fit.

    A CUDA state is skipped on a machine without CUDA, and a device's generator keeps its state
    where none was captured: a run may move between kinds of machine, it then continues with other
    numbers there.
    """
    part = "python"
    try:
        python = state["python"]
        numbers = tuple(_unwords(python["state"]).tolist())
        random.setstate((python["version"], numbers, python["cached"]))
        part = "numpy"
        numpy = state["numpy"]
        keys = _unwords(numpy["keys"])
        np.random.set_state(
            (numpy["algorithm"], keys, numpy["position"], numpy["has_cached"], numpy["cached"])
        )
        part = "torch"
        torch.set_rng_state(_decode(state["torch"]))
        part = "cuda"
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_decode(state["cuda"]))
        for name, generator in (generators or {}).items():
            part = f"generators.{name}"
            generator.set_state(_decode(state["generators"][name]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"random state '{part}' cannot be restored: {error!r}") from error


def _words(numbers: Sequence[int] | np.ndarray) -> str:
    """32-bit numbers as text: both generators are a Mersenne twister of 624 words."""
    return base64.b64encode(np.asarray(numbers, dtype="<u4").tobytes()).decode()


def _unwords(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<u4").astype(np.uint32)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
