"""A sharded model in training: step, state, memory.

Owns the handle that a training loop holds. Invariant: reading or writing state goes through
masters, never through the compute buffers, which may be released. Tested by
``tests/distributed/test_step.py`` and ``tests/distributed/test_state.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.checkpoint.tensors import StoredTensor
from megamuon.matrices import LogicalParameter, routing_report
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.config import RuntimeConfig
from megamuon.runtime.engine import Engine
from megamuon.runtime.layer_group import LayerGroup, LocalSegment
from megamuon.runtime.step import OwnerStep, StepResult

OPTIMIZER_PREFIX = "optimizer."


class Runtime:
    """What ``shard`` returns."""

    def __init__(
        self,
        *,
        model: nn.Module,
        plan: OwnershipPlan,
        rank: int,
        config: RuntimeConfig,
        groups: tuple[LayerGroup, ...],
        engine: Engine,
        step: OwnerStep,
    ) -> None:
        self.model = model
        self.plan = plan
        self.rank = rank
        self.config = config
        self.groups = groups
        self.engine = engine
        self._step = step

    # --- training --------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside keep their gradients on the rank; the next one outside reduces the
        sum.
        """
        self.engine.accumulate_only = True
        try:
            yield
        finally:
            self.engine.accumulate_only = False

    def step(
        self,
        lr: float,
        wd: float = 0.0,
        *,
        lr_of: Callable[[LogicalParameter], float] | None = None,
    ) -> StepResult:
        """Update all owned parameters with the gradients since the last step.

        ``lr_of`` gives a parameter's own learning rate where it is not ``lr`` (Megatron's
        --decoupled-lr).  The only collective is the norm scalar with its riders.
        """
        if self.engine.accumulated:
            self.engine.reduce_accumulated()
        self.engine.finish_reductions()
        result = self._step(lr_of or (lambda _: lr), wd)
        if not result.skipped:
            self.engine.version += 1
        return result

    def clear_gradients(self) -> None:
        """Forget all gradients since the last step."""
        self.engine.finish_reductions()
        self.engine.accumulated = False
        for group in self.groups:
            group.clear_slots()
            group.gradients.release()
            group.accumulated = None
            group.window_empty = True
            group.touched.clear()

    # --- state -----------------------------------------------------------------------------------

    def state(self, *, optimizer: bool = True, everywhere: bool = False) -> list[StoredTensor]:
        """This rank's pieces of every weight (by canonical name) and optimizer tensor
        (``optimizer.<state>.<name>``); the tensors are the live ones.

        Scalars that all holders of a parameter keep alike (AdamW's step) are listed by the first
        holder only, or with ``everywhere`` (what a load wants) by all.
        """
        found: list[StoredTensor] = []
        for segment in self._step.segments():
            parameter = segment.parameter
            found.append(_stored(parameter.name, segment, segment.shaped(segment.master)))
            if not optimizer or segment.window is None:
                continue
            for key, tensor in self._step.state[parameter.name].items():
                name = f"{OPTIMIZER_PREFIX}{key}.{parameter.name}"
                if tensor.ndim or not parameter.shape:
                    found.append(_stored(name, segment, tensor))
                elif everywhere or segment.start == 0:
                    found.append(StoredTensor(name=name, shape=(), offset=(), data=tensor))
        return found

    def loaded(self) -> None:
        """Masters were written from outside: buffers that hold older weights are stale now."""
        self.engine.version += 1

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by canonical name in the compute dtype, one group gathered at a time.

        A collective: every rank iterates to the end.
        """
        for group in self.groups:
            group.weights.revive()
            group.write_masters()
            group.gathering = self.engine.transport.all_gather_v(
                group.weights.raw, group.gather_table
            )
            group.wait_gathered()
            for parameter in group.parameters:
                view = group.weights.raw_view(parameter.name, parameter.shape)
                yield parameter.name, view.clone()
            group.release_weights()

    def parameter_norm(self) -> float:
        """L2 norm of all parameters, each element once.  A collective of one scalar."""
        total = torch.zeros(1, dtype=torch.float64)
        for group in self.groups:
            total += group.master.to("cpu", torch.float64).square().sum()
        if self._step.group is not None:
            total = total.to(self.groups[0].master.device)
            dist.all_reduce(total, group=self._step.group)
        return float(total.sqrt())

    # --- reports ---------------------------------------------------------------------------------

    def report(self) -> str:
        """Routes, reasons and counts."""
        return routing_report(self.plan.parameters)

    def copied_share(self) -> float:
        """Share of the gradient bytes that were copied into their slots instead of born there."""
        copied, born = self.engine.copied_bytes, self.engine.born_bytes
        return copied / (copied + born) if copied + born else 0.0

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds right now, by kind."""
        state = (t for tensors in self._step.state.values() for t in tensors.values())
        return {
            "masters": sum(_bytes(g.master) for g in self.groups),
            "windows": sum(_bytes(g.window) for g in self.groups),
            "optimizer_state": sum(_bytes(t) for t in state),
            "gathered_weights": sum(g.weights.resident_bytes for g in self.groups),
            "gradient_slots": sum(g.gradients.resident_bytes for g in self.groups),
            "accumulators": sum(
                _bytes(g.accumulated) for g in self.groups if g.accumulated is not None
            ),
        }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _stored(name: str, segment: LocalSegment, data: Tensor) -> StoredTensor:
    shape = segment.parameter.shape
    first_row = segment.rows[0]
    offset = (first_row, *(0 for _ in shape[1:])) if shape else ()
    return StoredTensor(name=name, shape=shape, offset=offset, data=data)
