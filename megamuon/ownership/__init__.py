"""Ownership: units, cost sources, planner policies and the ownership plan.

Owns the decision of where every parameter lives.  Invariant: everything here is pure and
deterministic, so each rank computes the same plan from the same inputs; comparing digests across
ranks is the runtime's business. Tested by ``tests/ownership``.
"""

from megamuon.ownership.cost import (
    ClosedForm,
    CostError,
    CostFunction,
    CostKey,
    CostTable,
    closed_form_cost,
    file_cost,
    measured_costs,
)
from megamuon.ownership.estimate import (
    BlockFanout,
    ResourceEstimate,
    StateBytes,
    block_fanouts,
    estimate,
)
from megamuon.ownership.plan import OwnershipPlan, PlanError, Segment
from megamuon.ownership.planner import (
    POLICIES,
    assign,
    build_plan,
    muon_shapes,
    planned_units,
    register_policy,
    unit_costs,
)
from megamuon.ownership.report import PlanReport, Rail, summarize, tp_rank_times
from megamuon.ownership.settings import POLICY_UNITS, ROLE_POLICIES, PlannerSettings, Topology
from megamuon.ownership.units import UNIT_THRESHOLD, Unit, build_units

__all__ = [
    "POLICIES",
    "POLICY_UNITS",
    "ROLE_POLICIES",
    "UNIT_THRESHOLD",
    "BlockFanout",
    "ClosedForm",
    "CostError",
    "CostFunction",
    "CostKey",
    "CostTable",
    "OwnershipPlan",
    "PlanError",
    "PlanReport",
    "PlannerSettings",
    "Rail",
    "ResourceEstimate",
    "Segment",
    "StateBytes",
    "Topology",
    "Unit",
    "assign",
    "block_fanouts",
    "build_plan",
    "build_units",
    "closed_form_cost",
    "estimate",
    "file_cost",
    "measured_costs",
    "muon_shapes",
    "planned_units",
    "register_policy",
    "summarize",
    "tp_rank_times",
    "unit_costs",
]
