"""The opening of a transport's symmetric pool between two steps.

Owns ``PoolOpener``, the hook that opens the pool, hands the groups' buffers to the transport and
the publish to its operator. Invariant: what the ranks tell their operators has been compared before
anything is opened. Tested by ``tests/distributed/test_ready_training.py`` and
``tests/distributed/test_ready_failures.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megamuon.agreement import exchange_pool
from megamuon.collectives import CollectiveError, Transport
from megamuon.collectives.host_library import CODE_VERSION
from megamuon.collectives.operators import Fabric, PooledGroup
from megamuon.mesh import MeshError
from megamuon.runtime.layer_group import LayerGroup
from megamuon.runtime.pool import PoolPlan
from megamuon.runtime.pool_opening import PoolRecording
from megamuon.runtime.runtime import Runtime

MIB = 1 << 20
LOOSE = "loose parameters"  # the name of the group that has none


class PoolOpener:
    """Opens the pool between two steps, once a micro-batch has been recorded."""

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        fabric: Fabric,
        *,
        required: bool,
    ) -> None:
        """``fabric``: that of ``transport``. ``required``: a pool that cannot be had is an error,
        not a reason to stay with other calls.
        """
        self.runtime, self.transport, self.fabric = runtime, transport, fabric
        self.required = required
        self.recording = PoolRecording(runtime.engine, fabric.group, replicas=runtime.mesh.replicas)

    def micro_batch_done(self) -> None:
        """See PoolHook."""
        self.recording.micro_batch_done()

    def step_done(self) -> bool:
        """See PoolHook. A collective at the step that opens the pool."""
        if not self.recording.step_done():
            return False
        plan = self.recording.plan()
        self._compare(plan)
        try:
            memory = self.fabric.open(max(plan.total, 1))
        except CollectiveError as error:
            if self.required:
                raise MeshError(f"--fabric {self.fabric.label}: {error}") from error
            self.transport.notes.append(
                f"collectives: grouped calls, the symmetric pool cannot be had: {error}"
            )
            return True
        self.runtime.open_pool(plan, memory)
        for group in self.runtime.groups:
            self._hand_over(group, plan)
        self.fabric.upload_tables()
        if self.runtime.engine.publication is not None:
            self.runtime.engine.publication.use_operator(self.runtime.engine.version)
        self.transport.notes.extend(self._report(plan))
        return True

    def _hand_over(self, group: LayerGroup, plan: PoolPlan) -> None:
        """Tell the transport where the group lies; say so where its gathers stay outside."""
        sent = group.weights if group.sent is None else group.sent
        reason = self.transport.pooled(
            PooledGroup(
                name=_name(group),
                gather_table=group.gather_table,
                gather_itemsize=sent.raw.element_size(),
                reduce_table=group.reduce_table,
                window=plan.sharded.get(group.index),
                window_dtype=group.sharded_gradient.dtype,
                slot_dtypes={
                    group.leased[kind].raw.dtype
                    for kind in ("gradients", "accumulated")
                    if (kind, group.index) in plan.offsets
                },
            )
        )
        if reason:
            self.transport.notes.append(
                f"symmetric pool: gathers of group {_name(group)!r} stay grouped calls: {reason}"
            )

    def _compare(self, plan: PoolPlan) -> None:
        """What the operators are told must be the same everywhere: they trust it from here on.
        Raises PlanMismatchError on all ranks where it is not.
        """
        settings = {name: str(value) for name, value in vars(self.fabric.settings).items()}
        wire = self.transport.wire_dtype
        tables = {
            f"tables of {_name(group)!r}": _digest(group, plan, wire)
            for group in self.runtime.groups
        }
        exchange_pool({"code": str(CODE_VERSION), **settings, **tables}, self.fabric.group)

    def _report(self, plan: PoolPlan) -> Sequence[str]:
        kinds = ", ".join(
            f"{kind} {nbytes / MIB:.1f}" for kind, nbytes in plan.nbytes.items() if nbytes
        )
        lines = [
            f"symmetric pool open: {plan.total / MIB:.1f} MiB on every rank ({kinds});"
            f" {len(self.runtime.groups) - len(plan.excluded)} of {len(self.runtime.groups)} groups"
        ]
        lines += [
            f"symmetric pool: group {name or LOOSE!r} stays with grouped calls: {reason}"
            for name, reason in self.runtime.left_out_of_pool().items()
        ]
        return lines


def _name(group: LayerGroup) -> str:
    return group.name or LOOSE


def _digest(group: LayerGroup, plan: PoolPlan, wire: torch.dtype) -> str:
    """Of a group's tables, what its buffers hold and where its reduced gradient lies: equal on all
    ranks.
    """
    facts = (
        group.gather_table.segments,
        group.reduce_table,
        sorted((kind, str(buffer.raw.dtype)) for kind, buffer in group.leased.items()),
        (str(wire), str(group.sharded_gradient.dtype), plan.sharded.get(group.index)),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
