"""What checks of flags know beside the configuration: world size, and which flags were given.

Owns ``RunContext``. Invariant: plain values, so that checks stay pure functions. Tested by
``tests/arguments/test_validate.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a check may know besides the configuration."""

    world_size: int  # ranks
    local_world_size: int | None = None  # ranks of this node, where the launcher says so
    explicit: frozenset[str] = field(default_factory=frozenset)  # dests that the user gave
    unusable: frozenset[str] = field(
        default_factory=frozenset
    )  # dests whose given value was no value
