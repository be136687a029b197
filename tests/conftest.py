"""One thread, fixed seeds: what every test starts from.

The variable is set before torch is imported, so the ranks that tests start inherit it too.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import random  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

SEED = 1234


@pytest.fixture(autouse=True)
def one_thread_and_seeds() -> Iterator[None]:
    """Seeds for Python and torch, one thread; numpy code takes its own generators."""
    torch.set_num_threads(1)
    random.seed(SEED)
    torch.manual_seed(SEED)
    yield
