"""MegaMuon: pretraining with matrix optimizers under FSDP, one owner per matrix.

Owns the version and the names that a training script needs. Invariant: importing the package
imports neither torch nor any room of the package; a name brings its room with it when it is first
used, so command-line help, set-up scripts and planning tools stay quick. Tested by
``tests/test_examples.py``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; the real imports are in __getattr__
    from megamuon.matrices import Kind, Route
    from megamuon.runtime import OptimizerSettings, Runtime, RuntimeConfig, shard

__version__ = "0.1.0"

__all__ = [
    "Kind",
    "OptimizerSettings",
    "Route",
    "Runtime",
    "RuntimeConfig",
    "__version__",
    "shard",
]

_ROOM_OF = {
    "Kind": "megamuon.matrices",
    "OptimizerSettings": "megamuon.runtime",
    "Route": "megamuon.matrices",
    "Runtime": "megamuon.runtime",
    "RuntimeConfig": "megamuon.runtime",
    "shard": "megamuon.runtime",
}


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use and kept (PEP 562)."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ROOM_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The names above beside those that are here already."""
    return sorted({*globals(), *__all__})
