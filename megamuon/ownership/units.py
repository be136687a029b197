"""Assignment units: what the planner gives to one owner as one piece.

Owns the rule that groups logical parameters into units: a parameter of at least ``threshold``
elements is a unit of its own, all smaller ones of a layer group (biases and norm gains included)
form one unit, and expert matrices never merge; and the other rule, by roles, of MatrixFSDP.
Invariant: every owned parameter is a member of exactly one unit; those in slices are in
none.  Tested by
``tests/ownership/test_units.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megamuon.matrices import Kind, LogicalParameter, Route

UNIT_THRESHOLD = 5_000_000  # elements; DMuon-2 section 3.3 merges what is smaller
UNIT_RULES = ("threshold", "roles")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that share one owner."""

    name: str  # the smallest member name
    layer: str  # layer group, "" for what lies outside every layer
    members: tuple[str, ...]  # parameter names in registration order
    numel: int  # elements of all members


def _unit(layer: str, members: Sequence[LogicalParameter]) -> Unit:
    return Unit(
        name=min(p.name for p in members),
        layer=layer,
        members=tuple(p.name for p in members),
        numel=sum(p.numel for p in members),
    )


def _is_matrix(parameter: LogicalParameter) -> bool:
    """A role of its own: what Muon trains, and other matrices (frozen ones, or all of them in a run
    without Muon), whose bytes weigh as much. A router is element-wise work and goes to the tail.
    """
    matrix = parameter.kind is Kind.MATRIX and len(parameter.shape) == 2
    return matrix or parameter.route is Route.MATRIX


def _check_names(parameters: Iterable[LogicalParameter]) -> None:
    seen: set[str] = set()
    for parameter in parameters:
        if parameter.name in seen:
            raise ValueError(
                f"parameter {parameter.name} is listed twice; a unit needs one owner for it"
            )
        seen.add(parameter.name)


def build_units(
    parameters: Sequence[LogicalParameter],
    *,
    threshold: int = UNIT_THRESHOLD,
    merge_experts: bool = False,
    rule: str = "threshold",
) -> tuple[Unit, ...]:
    """Units of ``parameters``, in the registration order of their first members.

    ``threshold``: elements from which a parameter stands alone.  ``merge_experts``: treat expert
    matrices like any other parameter, which is the baseline of DMuon-2, appendix C.5.  Rule:
    DMuon-2, section 3.3.

    ``rule="roles"`` (MatrixFSDP, section 4.1) ignores both: every 2-D matrix, experts included, is
    a unit of its own, and everything else of a layer is one packed tail.

    Raises ValueError on a negative threshold, an unknown rule and a name that occurs twice.
    """
    if rule not in UNIT_RULES:
        raise ValueError(f"unit rule {rule!r} is none of {', '.join(UNIT_RULES)}")
    if threshold < 0:
        raise ValueError(
            f"unit threshold must not be negative, got {threshold} (--owner-unit-threshold)"
        )
    _check_names(parameters)
    groups: dict[tuple[str, str], list[LogicalParameter]] = {}
    for parameter in parameters:
        if not parameter.owned:
            continue
        if rule == "roles":
            alone = _is_matrix(parameter)
        else:
            alone = parameter.numel >= threshold or (parameter.expert and not merge_experts)
        groups.setdefault((parameter.layer, parameter.name if alone else ""), []).append(parameter)
    return tuple(_unit(layer, members) for (layer, _), members in groups.items())
