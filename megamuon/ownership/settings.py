"""The rank grid that the planner plans for, and the planner's settings.

Owns ``Topology`` and ``PlannerSettings``: plain values that go into a plan, its JSON and its
digest.  Invariant: both are checked when they are made, so nothing downstream meets an empty grid
or a cap that no rank can keep. Tested by ``tests/ownership/test_planner.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megamuon.placements import Axis

# Policies whose units are roles: each matrix by itself, all else of a block in one packed tail.
ROLE_POLICIES = ("role_greedy", "scope_greedy", "cost_aware")
# The rule of ``build_units`` that each policy goes with; ``planner.register_policy`` adds to it.
POLICY_UNITS = {
    **dict.fromkeys(("lpt", "numel", "round_robin"), "threshold"),
    **dict.fromkeys(ROLE_POLICIES, "roles"),
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A grid of ranks: ``replicas`` replicas (nodes) times ``shards`` shard ranks (GPUs of a node).

    Rank = replica * shards + shard, which numbers the places of the mesh (``Mesh.place``).  FSDP is
    one replica of N shards; HSDP is R replicas of K shards.  ``tp`` ranks stand behind each of them
    and hold the pieces of the matrices that tensor parallelism cuts.
    """

    replicas: int
    shards: int
    tp: int = 1

    def __post_init__(self) -> None:
        for field in ("replicas", "shards", "tp"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"Topology.{field} must be an integer of at least 1, got {value!r}"
                )

    @property
    def world(self) -> int:
        """Number of places."""
        return self.replicas * self.shards

    @property
    def sizes(self) -> dict[Axis, int]:
        """Ranks on each axis."""
        return {Axis.REPLICATE: self.replicas, Axis.SHARD: self.shards, Axis.TP: self.tp}

    def shard_of(self, rank: int) -> int:
        """Shard (rail) of a global rank."""
        return rank % self.shards

    def replica_of(self, rank: int) -> int:
        """Replica (node) of a global rank."""
        return rank // self.shards

    def rank_of(self, *, replica: int, shard: int) -> int:
        """The rank of a shard in a replica."""
        return replica * self.shards + shard


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """How owners are chosen.  The defaults are the rule of DMuon-2, appendix B and section 4.3.

    With a byte cap, ``lpt`` then evens out the bytes of expert matrices where that costs no time
    (``rebalance.py``).

    ``byte_cap``, ``spread_layers`` and ``balance_rails`` belong to ``lpt`` and ``numel``; the
    three settings after them belong to ``cost_aware`` (MatrixFSDP, section 4.1, which names
    workspace caps without saying what they are: these are ours). A plan's workspace there is its
    largest owner window: the most bytes of one block on one owner, which that rank sends from and
    receives into when the block is gathered and reduced.
    """

    policy: str = "lpt"  # one of POLICY_UNITS
    byte_cap: float | None = 0.1  # share of bytes that a rank may hold above the mean; None: no cap
    spread_layers: bool = True  # the units of one layer go to different ranks while there are any
    balance_rails: bool = True  # HSDP: first the rail with the least time, then a rank inside it
    bytes_per_element: int = 2  # of the compute dtype, which is what gathers move
    balance_gain: float = 0.01  # scope plan: least fall of the heaviest load, as a share of it
    workspace_growth: float = 0.1  # scope plan: share by which the workspace may grow
    workspace_cap_mib: float | None = None  # scope plan: most MiB of workspace; None: no limit

    def __post_init__(self) -> None:
        if self.policy not in POLICY_UNITS:
            raise ValueError(
                f"PlannerSettings.policy {self.policy!r} is none of {', '.join(POLICY_UNITS)}"
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
        for field in ("balance_gain", "workspace_growth", "workspace_cap_mib"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"PlannerSettings.{field} must be finite and not negative, got {value}"
                )

    @property
    def unit_rule(self) -> str:
        """The rule of ``build_units`` that the policy goes with."""
        return POLICY_UNITS[self.policy]
