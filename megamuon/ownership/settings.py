"""What does the planner plan for, and by which rules?  The rank grid and the planner's settings.

Owns ``Topology`` and ``PlannerSettings``: plain values that go into a plan, its JSON and its
digest.  Invariant: both are checked when they are made, so nothing downstream meets an empty grid
or a cap that no rank can keep. Tested by ``tests/ownership/test_planner.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

POLICY_NAMES = ("lpt", "numel", "round_robin")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A grid of ranks: ``rows`` replicas (nodes) times ``columns`` shard ranks (GPUs of a node).

    Global rank = row * columns + column.  FSDP is one row of N columns; HSDP is R rows of K
    columns.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        for field in ("rows", "columns"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"Topology.{field} must be an integer of at least 1, got {value!r}"
                )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.rows * self.columns

    def column_of(self, rank: int) -> int:
        """Column (rail) of a global rank."""
        return rank % self.columns

    def row_of(self, rank: int) -> int:
        """Row (node, replica) of a global rank."""
        return rank // self.columns


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """How owners are chosen.  The defaults are the rule of DMuon-2, appendix B and section 4.3."""

    policy: str = "lpt"  # one of POLICY_NAMES
    byte_cap: float | None = 0.1  # share of bytes that a rank may hold above the mean; None: no cap
    spread_layers: bool = True  # the units of one layer go to different ranks while there are any
    balance_columns: bool = (
        True  # HSDP: first the column with the least time, then a rank inside it
    )
    bytes_per_element: int = 2  # of the compute dtype, which is what gathers move

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise ValueError(
                f"PlannerSettings.policy {self.policy!r} is none of {', '.join(POLICY_NAMES)}"
            )
        cap = self.byte_cap
        if cap is not None and not (math.isfinite(cap) and cap >= 0):
            raise ValueError(
                f"PlannerSettings.byte_cap is the share above the mean bytes per rank, got {cap}:"
                " 0.1 gives ten per cent of room, None no cap (--owner-byte-cap)"
            )
        if self.bytes_per_element < 1:
            raise ValueError(
                f"PlannerSettings.bytes_per_element must be positive, got {self.bytes_per_element}"
            )
