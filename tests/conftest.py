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

from tests.support.quick import QUICK, quick_files  # noqa: E402

SEED = 1234


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--quick``, which ``make test QUICK=1`` gives."""
    parser.addoption(
        "--quick", action="store_true", help=f"run only the files that {QUICK.name} lists"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``--quick`` does not run: slow tests, and files that are not listed."""
    if not config.getoption("--quick"):
        return
    files = quick_files()
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        listed = item.path.relative_to(QUICK.parent).as_posix() in files
        kept[listed and item.get_closest_marker("slow") is None].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


@pytest.fixture(autouse=True)
def one_thread_and_seeds() -> Iterator[None]:
    """Seeds for Python and torch, one thread; numpy code takes its own generators."""
    torch.set_num_threads(1)
    random.seed(SEED)
    torch.manual_seed(SEED)
    yield
