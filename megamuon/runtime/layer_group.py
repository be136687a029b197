"""Layer groups: what FSDP calls a unit, over segment tables.

Owns one group's flat compute buffer, its unsharded gradients, and of this rank's segments masters
and sharded gradients. Invariants: FP32 masters exist once per segment of the plan (a slice that
every replica keeps: once per replica); the unsharded gradients of a group lie as its trainable
parameters do; nothing here asks which layout a parameter has, the segment table says it all. Tested
by ``tests/runtime/test_layer_group.py`` and the equivalence tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from megamuon.collectives import StagedWork, Work
from megamuon.kernels.linear import UNSHARDED, UnshardedGradient
from megamuon.matrices import LogicalParameter
from megamuon.mesh import Mesh
from megamuon.ownership.groups import GroupKey
from megamuon.ownership.holdings import summed_over_tp
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.buffers import BufferLayout, FlatBuffer, place
from megamuon.runtime.frozen import FrozenUses
from megamuon.runtime.group_tables import shard_table, two_stage_table
from megamuon.runtime.released import Guard, assign_data


@dataclass(kw_only=True, eq=False)
class LocalSegment:
    """A piece of a parameter that this rank holds: elements ``start..stop`` of its tp piece.

    ``sharded_gradient`` changes once, when it moves into the symmetric pool; so does the ``master``
    of what does not train, where a leader's copy holds it.
    """

    parameter: LogicalParameter
    tp_rank: int
    start: int
    stop: int
    master: Tensor  # (stop - start,) in the master dtype; of a frozen one in what gathers send
    sharded_gradient: Tensor | None  # reduced gradient, same length; None for a frozen parameter
    _views: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[int, int]:
        """First row and number of rows of dim 0 of the piece; a 0-d parameter counts as one row."""
        piece = self.parameter.piece_shape(self.tp_rank)
        inner = max(1, self.parameter.piece_numel(self.tp_rank) // max(1, (piece or (1,))[0]))
        return self.start // inner, (self.stop - self.start) // inner

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the segment starts in the whole parameter."""
        start = self.parameter.piece(self.tp_rank).offset
        return (start[0] + self.rows[0], *start[1:]) if start else ()

    @property
    def whole(self) -> bool:
        """Whether it is the whole parameter."""
        return self.stop - self.start == self.parameter.numel

    def shaped(self, flat: Tensor) -> Tensor:
        """``flat (stop - start,)`` with the piece's dims; dim 0 holds this segment's rows."""
        piece = self.parameter.piece_shape(self.tp_rank)
        return flat.view(self.rows[1], *piece[1:]) if piece else flat.view(())

    @property
    def master_view(self) -> Tensor:
        """``master`` as ``shaped`` gives it, made once."""
        return self._view("master", self.master)

    @property
    def sharded_view(self) -> Tensor:
        """``sharded_gradient`` as ``shaped`` gives it, made anew only after it has moved."""
        assert self.sharded_gradient is not None
        return self._view("sharded_gradient", self.sharded_gradient)

    def _view(self, name: str, flat: Tensor) -> Tensor:
        made = self._views.get(name)
        if made is None or made[0] is not flat:
            made = self._views[name] = (flat, self.shaped(flat))
        return made[1]


class Use:
    """One call of a group's module in a forward pass with gradients. Only autograd's graph of that
    call holds it, so it is gone with the graph.
    """

    __slots__ = ("__weakref__", "_heard", "_inputs")

    def __init__(self, inputs: int) -> None:
        """``inputs``: how many tensors among its inputs require a gradient."""
        self._inputs = inputs
        self._heard: set[int] = set()

    def hears(self, place: int) -> bool:
        """The gradient of input ``place`` is there; whether all are, which is said once a pass."""
        self._heard.add(place)
        return len(self._heard) == self._inputs

    def forget(self) -> None:
        """The backward pass has ended; the graph may see another one."""
        self._heard.clear()


class LayerGroup:
    """One group: its buffers, its tables and the local state of its parameters."""

    def __init__(
        self,
        *,
        index: int,
        key: GroupKey,
        parameters: Sequence[LogicalParameter],
        plan: OwnershipPlan,
        mesh: Mesh,
        dtypes: tuple[torch.dtype, torch.dtype],
        master_dtype: torch.dtype,
        device: torch.device,
        resident: bool = False,
    ) -> None:
        """``dtypes``: what modules compute with, and what gathers carry and frozen parameters are
        kept in.
        """
        compute_dtype, self.sent_dtype = dtypes
        self.index = index
        self.key = key
        self.name = key.name  # "" for the root's
        self.parameters = tuple(parameters)
        self.trainable = tuple(p for p in self.parameters if p.trainable)
        self.partial = summed_over_tp(self.trainable)
        self.has_frozen = len(self.trainable) < len(self.parameters)
        self.resident = resident  # the gathered weights stay for life (ZeRO-1)
        self.tp_rank = mesh.tp_rank

        def layout(members: Sequence[LogicalParameter]) -> BufferLayout:
            return place(members, compute_dtype.itemsize, mesh.tp_rank)

        self.weights = _released(layout(self.parameters), compute_dtype, device)
        self.sent: FlatBuffer | None = None  # what gathers carry, where that is a narrower dtype
        if self.sent_dtype != compute_dtype:
            self.sent = _released(self.weights.layout, self.sent_dtype, device)
        self.gradients = _released(layout(self.trainable), compute_dtype, device)
        # Sum of the unsharded gradients of several micro-batches under --gradient-reduction step.
        self.sums = _released(self.gradients.layout, torch.float32, device)
        self.gather_table = shard_table(
            plan, self.parameters, self.weights.layout.offsets, mesh.tp_rank
        )
        self.reduce_table = two_stage_table(
            plan, self.trainable, self.gradients.layout.offsets, mesh.tp_rank
        )
        self._make_local(plan, mesh, master_dtype, device)
        # --- life of the buffers ---
        self.gathering: Work | None = None
        self.version = -1  # applied updates in the weights that the buffer holds; -1 when released
        self.entered = False  # somebody computes with these weights, or may still in a backward
        self.reducing: StagedWork | None = None
        self.guard: Guard | None = None  # closes the parameters while nobody computes with them
        self.sharded_empty = True
        self.sharded_pooled = False
        self.accumulated: Tensor | None = None  # ``sums``, while they wait to be reduced
        self.uses: WeakSet[Use] = WeakSet()  # whose graphs are alive
        self.unseen_use = False  # a use with no input that hears of its gradient: it has no end
        self.late = False  # there are gradients that came too late for their reduction
        self.frozen_uses = FrozenUses() if not self.trainable else None
        self.unread = False  # all ranks agreed: no backward pass reads the weights
        # --- this backward pass ---
        self.reduced = False  # the reduction has started
        self.uses_running: set[Use] = set()
        self.uses_over: WeakSet[Use] = WeakSet()
        self.fired: set[str] = set()
        self.accumulators: dict[str, Node] = {}  # what fires, by trainable member
        self.expected = frozenset(p.name for p in self.trainable)  # of them, those that will
        self.unsharded: dict[str, UnshardedGradient] = {}
        self.touched: set[str] = set()  # since the last step

    def _make_local(
        self, plan: OwnershipPlan, mesh: Mesh, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Masters of all local segments, and sharded gradients of the trainable ones in the reduce
        table's order; which parameters this rank leads.
        """
        offsets = self.weights.layout.offsets
        pieces: list[tuple[LogicalParameter, int, int]] = []
        led: list[LogicalParameter] = []
        for parameter in self.parameters:
            for segment in plan.segments(parameter.name, mesh.tp_rank):
                if segment.held_at(mesh.replica, mesh.shard):
                    pieces.append((parameter, segment.start, segment.stop))
                if segment.led_at(mesh.shard, mesh.replicas):
                    led.append(parameter)
        pieces.sort(key=lambda piece: offsets[piece[0].name])
        names = {parameter.name for parameter in led}
        # What does not train is kept once, as it is sent: in the leader's copy where there is one.
        sizes = [
            0 if not p.trainable and p.name in names else stop - start for p, start, stop in pieces
        ]
        both = list(zip(pieces, sizes, strict=True))
        learned = sum(size for (p, _, _), size in both if p.trainable)
        self.master = torch.zeros(learned, dtype=dtype, device=device)
        self.frozen = torch.zeros(sum(sizes) - learned, dtype=self.sent_dtype, device=device)
        sharded = self._make_sharded(pieces, dtype, device)
        local: list[LocalSegment] = []
        at = {True: 0, False: 0}
        for (parameter, start, stop), size in both:
            trains = parameter.trainable
            values = self.master if trains else self.frozen
            local.append(
                LocalSegment(
                    parameter=parameter,
                    tp_rank=mesh.tp_rank,
                    start=start,
                    stop=stop,
                    master=values[at[trains] : at[trains] + size],
                    sharded_gradient=sharded.get(parameter.name),
                )
            )
            at[trains] += size
        self.local = tuple(local)
        # With several replicas a leader's copy is what its replica gathers from, the owner's own
        # included.
        self.led = tuple(led)
        self._sources: list[Tensor] = []
        self._places: list[Tensor] = []  # views of the compute buffer
        self._spans: list[tuple[int, int]] = []  # the same places as offsets and sizes
        for segment in local:
            if segment.parameter.name not in names:
                self._add_source(segment.parameter.name, segment.start, segment.master)

    def _make_sharded(
        self,
        pieces: Sequence[tuple[LogicalParameter, int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """This rank's sharded gradients one after another in the order of the reduce table."""
        offsets = self.gradients.layout.offsets
        learned = sorted(
            ((p.name, stop - start) for p, start, stop in pieces if p.trainable),
            key=lambda piece: offsets[piece[0]],
        )
        self.sharded_gradient = torch.zeros(
            sum(size for _, size in learned), dtype=dtype, device=device
        )
        parts = self.sharded_gradient.split([size for _, size in learned]) if learned else ()
        return {name: part for (name, _), part in zip(learned, parts, strict=True)}

    def gather_from(self, copies: Mapping[str, Tensor]) -> None:
        """From now on take the parameters that this rank leads from their resident copies
        ``(numel,)``.
        """
        for parameter in self.led:
            self._add_source(parameter.name, 0, copies[parameter.name])
        for segment in self.local:
            if not segment.parameter.trainable and segment.parameter.name in copies:
                segment.master = copies[segment.parameter.name]

    def _add_source(self, name: str, start: int, values: Tensor) -> None:
        """``values`` are what this rank contributes of a parameter, from element ``start`` on."""
        numel = values.numel()
        self._sources.append(values)
        self._places.append(self.weights.raw_piece(name, start, start + numel))
        self._spans.append((self.weights.layout.offsets[name] + start, numel))

    @property
    def leased(self) -> dict[str, FlatBuffer]:
        """By kind, the buffers that transfers read or write on this and on other ranks."""
        travels = {"weights": self.weights} if self.sent is None else {"sent": self.sent}
        return {**travels, "gradients": self.gradients, "accumulated": self.sums}

    def install(
        self,
        parameters: dict[str, nn.Parameter],
        ensure_weights: Callable[[LayerGroup], None],
        before_write: Callable[[LayerGroup], None],
    ) -> None:
        """Hang an UnshardedGradient on each parameter's tensor.

        ``ensure_weights`` is called before a backward reads the weights, ``before_write`` before it
        writes into one.
        """
        for parameter in self.parameters:
            # A frozen weight is read by the backward too: that alone is what it is for.
            gradient = self.gradients.raw.new_empty(0)
            if parameter.trainable:
                gradient = self.gradients.raw_view(
                    parameter.name, parameter.piece_shape(self.tp_rank)
                )
            unsharded = UnshardedGradient(
                gradient,
                ensure_weights=lambda: ensure_weights(self),
                ensure_storage=lambda: before_write(self),
            )
            if parameter.trainable:
                self.unsharded[parameter.name] = unsharded
            setattr(parameters[parameter.name], UNSHARDED, unsharded)

    def write_sources(self, packed: Tensor | None = None) -> None:
        """Cast this rank's masters and leader copies into its segments of the (live) compute
        buffer, or of a flat tensor of the same layout.
        """
        if not self._places:
            return
        places = self._places
        if packed is not None:
            places = [packed[start : start + numel] for start, numel in self._spans]
        torch._foreach_copy_(places, self._sources)

    def wait_gathered(self) -> None:
        """Block until the weights are in place."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def enter(self) -> None:
        """Somebody is about to read the weights: they are in place when this returns."""
        self.wait_gathered()
        self.weights.revive()  # they may have been set aside
        self.entered = True
        if self.guard is not None:
            self.guard.open()

    def release_weights(self) -> None:
        """Drop the gathered weights; a resident group keeps them until they are stale."""
        self.wait_gathered()
        if not self.resident:
            self.weights.release()
            self.version = -1
            self.entered = False
        elif self.guard is not None:
            self.guard.close()

    def forget_weights(self) -> None:
        """The weights are stale: gather them again before the next use."""
        self.release_weights()
        self.version = -1

    @property
    def complete(self) -> bool:
        """Whether every gradient of this backward pass is there."""
        return len(self.fired) == len(self.expected)

    def expect(self) -> None:
        """A backward pass has begun: ask autograd which members will get a gradient in it."""
        self.expected = frozenset(filter(self._will_fire, self.accumulators))

    def _will_fire(self, name: str) -> bool:
        try:
            return torch._C._will_engine_execute_node(self.accumulators[name])
        except RuntimeError:  # torch.autograd.grad asks for it: nothing is accumulated
            return False

    @property
    def all_uses_over(self) -> bool:
        """Whether the backward of every use is known to have read the weights for the last time."""
        seen = bool(self.uses) and not self.unseen_use
        return seen and all(use in self.uses_over for use in self.uses)

    def partial_gradients(self) -> list[Tensor]:
        """Gradients that are a summand of a sum over the tp ranks."""
        return [self.unsharded[p.name].gradient for p in self.partial]

    def zero_unwritten(self) -> None:
        """Zero the gradients that this micro-batch did not touch, so that a reduction has something
        to send.
        """
        self.gradients.revive()
        for unsharded in self.unsharded.values():
            if not unsharded.written:
                unsharded.gradient.zero_()

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight and give the unsharded gradients back."""
        if self.reducing is not None:
            self.reducing.wait()
            self.reducing = None
            self.sharded_empty = False
        self.release_gradients()

    def release_gradients(self) -> None:
        """No reduction reads the unsharded gradients any more, nor the sums but to add to them.
        Gradients that came too late for it stay.
        """
        if not self.late:
            self.gradients.release()
        if self.accumulated is None:
            self.sums.release()

    def clear_unsharded(self) -> None:
        """Forget what the unsharded gradients hold."""
        self.late = False
        for unsharded in self.unsharded.values():
            unsharded.written = False

    # --- the symmetric pool ----------------------------------------------------------------------

    def bind_weights(self, memory: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Move the flat compute buffer to ``memory (numel,)``, and the parameters with it."""
        self.weights.bind(memory)
        raw = self.weights.raw
        self._places = [raw[start : start + numel] for start, numel in self._spans]
        for parameter in self.parameters:
            # Assigning `.data` keeps the parameter and its version counter, which writes through
            # `raw` then never touch.
            shape = parameter.piece_shape(self.tp_rank)
            assign_data(parameters[parameter.name], self.weights.raw_view(parameter.name, shape))

    def bind_gradients(self, memory: Tensor) -> None:
        """Move the unsharded gradients to ``memory (numel,)``."""
        self.gradients.bind(memory)
        for parameter in self.trainable:
            self.unsharded[parameter.name].gradient = self.gradients.raw_view(
                parameter.name, parameter.piece_shape(self.tp_rank)
            )

    def bind_sharded(self, memory: Tensor) -> None:
        """Move the sharded gradients, with what they hold, to ``memory (numel,)``."""
        memory.copy_(self.sharded_gradient)
        self.sharded_gradient = memory
        offsets = self.gradients.layout.offsets
        held = [segment for segment in self.local if segment.sharded_gradient is not None]
        held.sort(key=lambda segment: offsets[segment.parameter.name])
        sizes = [segment.stop - segment.start for segment in held]
        for segment, part in zip(held, memory.split(sizes) if held else (), strict=True):
            segment.sharded_gradient = part
        self.sharded_pooled = True


def _released(layout: BufferLayout, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
    """A new buffer without memory: else the whole model would be resident until the first
    backward.
    """
    made = FlatBuffer(layout, dtype, device)
    made.release()
    return made
