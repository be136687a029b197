"""Layer groups: what FSDP calls a unit, over segment tables.

Owns one group's flat compute buffer, gradient slots, local masters and owner windows. Invariants:
FP32 masters exist once per segment of the plan; the slots of a group have the layout of its
trainable parameters; nothing here asks which layout a parameter has, the segment table says it all.
Tested by ``tests/runtime/test_layer_group.py`` and the equivalence tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamuon.collectives import SegmentTable, TableSegment, Work
from megamuon.kernels.linear import SLOT, GradientSlot
from megamuon.matrices import LogicalParameter
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.buffers import FlatBuffer, place

ROOT_GROUP = ""  # name of the group of loose parameters: outside every layer, and no sliced table


@dataclass(frozen=True, kw_only=True)
class LocalSegment:
    """A piece of a parameter that this rank holds: elements ``start..stop`` of the whole."""

    parameter: LogicalParameter
    start: int
    stop: int
    master: Tensor  # (stop - start,) in the master dtype
    window: Tensor | None  # reduced gradient, same length; None for a frozen parameter

    @property
    def rows(self) -> tuple[int, int]:
        """First row and number of rows of dim 0; a 0-d parameter counts as one row."""
        inner = max(1, self.parameter.numel // max(1, (self.parameter.shape or (1,))[0]))
        return self.start // inner, (self.stop - self.start) // inner

    def shaped(self, flat: Tensor) -> Tensor:
        """``flat (stop - start,)`` with the parameter's dims; dim 0 holds this segment's rows."""
        if not self.parameter.shape:
            return flat.view(())
        return flat.view(self.rows[1], *self.parameter.shape[1:])


class LayerGroup:
    """One group: its buffers, its tables and the local state of its parameters."""

    def __init__(
        self,
        *,
        index: int,
        name: str,
        parameters: Sequence[LogicalParameter],
        plan: OwnershipPlan,
        rank: int,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.index = index
        self.name = name
        self.parameters = tuple(parameters)
        self.trainable = tuple(p for p in self.parameters if p.trainable)
        self.has_frozen = len(self.trainable) < len(self.parameters)
        self.weights = FlatBuffer(
            place(self.parameters, compute_dtype.itemsize), compute_dtype, device
        )
        self.gradients = FlatBuffer(
            place(self.trainable, compute_dtype.itemsize), compute_dtype, device
        )
        # Else the whole model and its gradients would be resident until the first backward.
        self.weights.release()
        self.gradients.release()
        self.gather_table = _table(plan, self.parameters, self.weights.layout.offsets)
        self.reduce_table = _table(plan, self.trainable, self.gradients.layout.offsets)
        self._make_local(plan, rank, master_dtype, device)
        # --- life of the buffers ---
        self.gathering: Work | None = None
        self.version = -1  # applied updates in the weights that the buffer holds; -1 when released
        self.reducing: Work | None = None
        self.window_empty = True
        self.accumulated: Tensor | None = None  # FP32 sum of slots under --gradient-reduction step
        # --- this backward pass ---
        self.fired: set[str] = set()
        self.slots: dict[str, GradientSlot] = {}
        self.touched: set[str] = set()  # since the last step

    def _make_local(
        self, plan: OwnershipPlan, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Masters of all local segments, and windows of the trainable ones in the reduce table's
        order.
        """
        offsets = self.weights.layout.offsets
        pieces = [
            (parameter, segment.start, segment.stop)
            for parameter in self.parameters
            for segment in plan.segments(parameter.name)
            if segment.rank == rank and segment.stop > segment.start
        ]
        pieces.sort(key=lambda piece: offsets[piece[0].name])
        self.master = torch.zeros(
            sum(stop - start for _, start, stop in pieces), dtype=dtype, device=device
        )
        windows = self._make_windows(pieces, dtype, device)
        local: list[LocalSegment] = []
        at = 0
        for parameter, start, stop in pieces:
            local.append(
                LocalSegment(
                    parameter=parameter,
                    start=start,
                    stop=stop,
                    master=self.master[at : at + stop - start],
                    window=windows.get(parameter.name),
                )
            )
            at += stop - start
        self.local = tuple(local)
        self._local_weights = [
            self.weights.raw_piece(s.parameter.name, s.start, s.stop) for s in local
        ]

    def _make_windows(
        self,
        pieces: Sequence[tuple[LogicalParameter, int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Owner windows one after another in the order of the reduce table (offsets of the
        slots).
        """
        offsets = self.gradients.layout.offsets
        learned = sorted(
            ((p.name, stop - start) for p, start, stop in pieces if p.trainable),
            key=lambda piece: offsets[piece[0]],
        )
        self.window = torch.zeros(sum(size for _, size in learned), dtype=dtype, device=device)
        parts = self.window.split([size for _, size in learned]) if learned else ()
        return {name: part for (name, _), part in zip(learned, parts, strict=True)}

    def install(
        self,
        parameters: dict[str, nn.Parameter],
        ensure_weights: Callable[[LayerGroup], None],
    ) -> None:
        """Hang a gradient slot on each parameter's tensor."""
        for parameter in self.parameters:
            # A frozen weight is read by the backward too: its slot can bring it back, no more.
            gradient = self.gradients.raw.new_empty(0)
            if parameter.trainable:
                gradient = self.gradients.raw_view(parameter.name, parameter.shape)
            slot = GradientSlot(
                gradient,
                ensure_weights=lambda: ensure_weights(self),
                ensure_slot=self.gradients.revive,
            )
            if parameter.trainable:
                self.slots[parameter.name] = slot
            setattr(parameters[parameter.name], SLOT, slot)

    def write_masters(self) -> None:
        """Cast this rank's masters into its segments of the (live) compute buffer."""
        if self.local:
            torch._foreach_copy_(self._local_weights, [s.master for s in self.local])

    def wait_gathered(self) -> None:
        """Block until the weights are in place."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def release_weights(self) -> None:
        """Drop the gathered weights."""
        self.wait_gathered()
        self.weights.release()
        self.version = -1

    def zero_unwritten(self) -> None:
        """Zero the slots that this micro-batch did not touch, so that a reduction has something to
        send.
        """
        self.gradients.revive()
        for slot in self.slots.values():
            if not slot.written:
                slot.gradient.zero_()

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight and give the slots back."""
        if self.reducing is not None:
            self.reducing.wait()
            self.reducing = None
            self.window_empty = False
        self.gradients.release()

    def clear_slots(self) -> None:
        """Forget what the slots hold."""
        for slot in self.slots.values():
            slot.written = False


def _table(
    plan: OwnershipPlan, parameters: Sequence[LogicalParameter], offsets: dict[str, int]
) -> SegmentTable:
    return SegmentTable.build(
        plan.topology.columns,
        [
            TableSegment(
                rank=segment.rank,
                offset=offsets[parameter.name] + segment.start,
                numel=segment.stop - segment.start,
            )
            for parameter in parameters
            for segment in plan.segments(parameter.name)
        ],
    )
