"""``Runtime``: a sharded model in training, with its step, state and memory.

Owns the handle that a training loop holds. Invariant: reading or writing state goes through
masters, never through the compute buffers, which may be released. Tested by
``tests/distributed/test_step.py`` and ``tests/distributed/test_state.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megamuon.checkpoint.tensors import StoredTensor
from megamuon.matrices import routing_report
from megamuon.mesh import Mesh
from megamuon.ownership.holdings import EVERYBODY, writers
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.config import RuntimeConfig
from megamuon.runtime.engine import Engine
from megamuon.runtime.exchange import Exchange
from megamuon.runtime.layer_group import LayerGroup, LocalSegment
from megamuon.runtime.module_buffers import ModuleBuffers
from megamuon.runtime.owner_step import OwnerStep
from megamuon.runtime.pool import PoolPlan
from megamuon.runtime.pool_opening import Memory, OpenPool, open_pool
from megamuon.runtime.step_parts import RateOf, StepResult, norm_over_ranks
from megamuon.runtime.trainable import OPTIMIZER_PREFIX, TrainableRuntime
from megamuon.runtime.weights import (
    LoadedParameters,
    Shown,
    hide,
    keep_changes,
    load_parameters,
    names_under,
    show,
    swapped,
)


class PoolHook(Protocol):
    """Who opens the symmetric pool of a runtime, when its time has come."""

    def micro_batch_done(self) -> None:
        """A backward pass has ended."""

    def step_done(self) -> bool:
        """An update has ended; True: the pool is open, or never will be, and nobody asks again."""


class Runtime(TrainableRuntime):
    """What ``shard`` returns."""

    def __init__(
        self,
        *,
        model: nn.Module,
        plan: OwnershipPlan,
        mesh: Mesh,
        config: RuntimeConfig,
        groups: tuple[LayerGroup, ...],
        engine: Engine,
        step: OwnerStep,
        exchange: Exchange,
        buffers: ModuleBuffers,
        notes: list[str] | None = None,
    ) -> None:
        """``notes``: lines for the user that are not printed yet; more may come with the steps."""
        self._notes = notes if notes is not None else []
        self.model = model
        self.plan = plan
        self.mesh = mesh
        self.rank = mesh.place
        self.config = config
        self.groups = groups
        self.engine = engine
        self.exchange = exchange
        self.buffers = buffers
        self.world = step.group  # all ranks; None: one
        self.traffic = step.traffic  # bytes that this rank has sent
        self._step = step
        self._accumulating = 0  # contexts of ``accumulate`` that are open
        self.pool: PoolHook | None = None  # until the pool is open
        self.opened: OpenPool | None = None

    # --- training --------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.engine.version

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._accumulating += 1
        self.engine.accumulate_only = True
        try:
            yield
        finally:
            self._accumulating -= 1
            self.engine.accumulate_only = self._accumulating > 0

    def finish_reductions(self) -> None:
        self.engine.finish_reductions()

    def step(
        self,
        lr: float,
        wd: float = 0.0,
        *,
        lr_of: RateOf | None = None,
    ) -> StepResult:
        """Update all owned parameters with the gradients since the last step.

        ``lr_of`` gives a parameter's own learning rate where it is not ``lr`` (Megatron's
        --decoupled-lr).  Communicates the norm scalar with its riders; the pieces of matrices that
        tensor parallelism cuts; with several replicas the new weights, asynchronously.  Raises
        CollectiveError where a transfer has failed by now, so that no checkpoint follows it.
        """
        self.engine.settle_passes()
        if self.engine.accumulated:
            self.engine.reduce_accumulated()
        self.engine.finish_reductions()
        result = self._step(
            lr_of or (lambda _: lr),
            wd,
            order=self.engine.forward_order.order,
            version=self.engine.version + 1,
        )
        if not result.skipped:
            self.engine.version += 1
        self.engine.step_over()
        if self.pool is not None and self.pool.step_done():
            self.pool = self.engine.micro_batch_done = None
            self.engine.reductions.hold_unsharded = False
        self.engine.transport.check()
        return result

    def clear_gradients(self) -> None:
        self.engine.settle_passes()
        self.engine.finish_reductions()
        self.engine.accumulated = False
        for group in self.groups:
            group.clear_unsharded()
            group.accumulated = None
            group.release_gradients()
            group.sharded_empty = True
            group.touched.clear()

    # --- the symmetric pool ----------------------------------------------------------------------

    def use_pool(self, hook: PoolHook) -> None:
        """Let ``hook`` see micro-batches and steps until it has opened the pool."""
        self.pool = hook
        self.engine.micro_batch_done = hook.micro_batch_done

    def open_pool(self, plan: PoolPlan, memory: Memory) -> OpenPool:
        """Move into ``memory`` what ``plan`` names; between two steps, when no graph of autograd is
        alive.
        """
        self.engine.finish_reductions()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        free_unsharded = self.engine.reductions.free_unsharded
        self.opened = open_pool(
            self.groups, plan, memory, parameters, free_unsharded=free_unsharded
        )
        self.engine.leases = self.opened
        return self.opened

    def left_out_of_pool(self) -> dict[str, str]:
        """Groups that stay on the heap though the pool is open, and why."""
        excluded = self.opened.plan.excluded if self.opened is not None else {}
        return {self.groups[index].name: reason for index, reason in excluded.items()}

    # --- state -----------------------------------------------------------------------------------

    def state(
        self, *, optimizer: bool = True, everywhere: bool = False, buffers: bool = True
    ) -> list[StoredTensor]:
        """This rank's pieces of every weight (by canonical name), persistent buffer and optimizer
        tensor (``optimizer.<state>.<name>``); the tensors are the live ones.

        Each element is listed once: replicas that hold a slice alike list a share of it each, and
        of what every tp rank keeps, or what belongs to no element (counts like AdamW's step), the
        first holder lists all. With ``everywhere`` (what a load wants) each rank lists all it
        holds.
        """
        found: list[StoredTensor] = []
        if buffers:
            speaks = self.mesh.rank == 0
            found.extend(self.buffers.stored(everywhere=everywhere, speaks=speaks))
        sizes, place = self.mesh.sizes, self.mesh.coordinates
        for segment in self._step.segments():
            parameter = segment.parameter
            share = EVERYBODY if everywhere else writers(parameter.storage, sizes, place)
            if share is None:
                continue
            weight = _stored(parameter.name, segment, segment.shaped(segment.master))
            pieces = [replace(weight, rounds=not parameter.trainable)]
            if optimizer and segment.sharded_gradient is not None:
                if everywhere or not (any(segment.offset) or share.index):
                    found.extend(self._counts(segment))
                pieces.extend(self._state_beside(segment))
            shares = (piece.share(*share) for piece in pieces)
            found.extend(part for part in shares if part is not None)
        if optimizer and self._step.matrices is not None:
            # Listed by the first of those who work on the whole.
            wholes = self._step.matrices.whole_state(everywhere=everywhere)
            found.extend(
                _stored_whole(name, key, t) for name, s in wholes.items() for key, t in s.items()
            )
        return found

    def _state_beside(self, segment: LocalSegment) -> Iterator[StoredTensor]:
        """Optimizer tensors that have the segment's elements."""
        parameter = segment.parameter
        for key, tensor in self._step.state_beside(parameter).items():
            if tensor.ndim or not parameter.shape:
                yield _stored(f"{OPTIMIZER_PREFIX}{key}.{parameter.name}", segment, tensor)

    def _counts(self, segment: LocalSegment) -> Iterator[StoredTensor]:
        """Optimizer tensors beside a segment that belong to no element."""
        parameter = segment.parameter
        for key, tensor in self._step.state_beside(parameter).items():
            if not tensor.ndim and parameter.shape:
                yield _stored_whole(parameter.name, key, tensor)

    def loaded(self) -> None:
        """Masters were written from outside: buffers that hold older weights are stale now, and
        leaders get the new ones.  Every rank calls this.
        """
        self.engine.version += 1
        if self.engine.publication is not None:
            self.engine.publication.republish(self.engine.version)

    # --- whole weights ---------------------------------------------------------------------------

    def masters(self) -> list[Tensor]:
        return [group.master for group in self.groups]

    def swapped(self, values: Sequence[Tensor]) -> AbstractContextManager[None]:
        return swapped(self, values)

    def load_parameters(
        self,
        values: Mapping[str, Tensor] | None,
        *,
        source_rank: int | None = None,
        strict: bool = True,
    ) -> LoadedParameters:
        return load_parameters(self, values, source_rank=source_rank, strict=strict)

    @contextmanager
    def gathered(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> Iterator[nn.Module]:
        """A context in which the parameters of the layer groups of ``module`` (default: of the
        model) are whole, in the compute dtype: FSDP's ``summon_full_params``.

        They are copies beside what passes use, so the memory of as many weights is needed. With
        ``write``, what every rank changed alike goes to the masters at the end; elements that
        nobody changed keep all their digits. With tensor parallelism they are this rank's pieces.
        A collective at both ends. Raises ReleasedWeightError at the end for changes without
        ``write`` and for changes that differ between ranks; none of them is kept.
        """
        wanted = names_under(self.model, module)
        named = dict(self.model.named_parameters(remove_duplicate=False))
        groups = [
            group
            for group in self.groups
            if wanted is None or any(id(named[p.name]) in wanted for p in group.parameters)
        ]
        for group in groups:
            show(group, named, self._copy_of(group))
        try:
            shown = {p.name: named[p.name] for g in groups for p in g.parameters}
            watch = Shown(shown, self.plan.parameters, self.mesh, self.world)
            yield self.model
            changes = watch.changed(write=write)
        finally:
            for group in groups:
                hide(group, named)
        if changes:
            for group in groups:
                for segment in (s for s in group.local if s.parameter.name in changes):
                    part = changes[segment.parameter.name].reshape(-1)[segment.start : segment.stop]
                    keep_changes(segment.master, part, group.sent_dtype)
            self.loaded()

    @torch.no_grad()
    def _copy_of(self, group: LayerGroup) -> Tensor:
        """The whole weights of a group in memory of their own; what a pass keeps stays."""
        fresh = group.version != self.engine.version
        if fresh:
            self.engine.gather(group)
        group.wait_gathered()
        group.weights.revive()  # they may have been set aside
        copy = group.weights.raw.clone()
        if fresh:
            group.release_weights()
        return copy

    def close(self) -> None:
        """Let everything in flight arrive; call it before the process groups are destroyed."""
        self.engine.finish_reductions()
        if self.engine.publication is not None:
            self.engine.publication.close()
        self.engine.transport.close()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by canonical name in the compute dtype, one group gathered at a time.

        A collective: every rank iterates to the end.
        """
        self.engine.settle_passes()
        for group in self.groups:
            self.engine.gather(group)
            group.wait_gathered()
            for parameter in group.parameters:
                piece = group.weights.raw_view(
                    parameter.name, parameter.piece_shape(self.mesh.tp_rank)
                )
                read = self.plan.compute(parameter.name)
                whole = self.exchange.whole(parameter.name, parameter.shape, read, piece.clone())
                yield parameter.name, whole
            group.release_weights()

    def parameter_norm(self) -> float:
        mine = (s.master for s in self._step.segments() if self._step.counts(s.parameter))
        return norm_over_ranks(mine, self.world, self.mesh.device)

    # --- reports ---------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """What has happened since the last call that a user wants to read: the fabric that was
        chosen, the pool that was opened.
        """
        said = list(self._notes)
        self._notes.clear()
        return said

    def report(self) -> str:
        return routing_report(self.plan.parameters)

    def publish_wait(self) -> float | None:
        publication = self.engine.publication
        return None if publication is None else publication.waited_seconds

    def copied_share(self) -> float:
        """Share of the gradient bytes that were copied into the groups' buffers, not born there."""
        copied, born = self.engine.copied_bytes, self.engine.born_bytes
        return copied / (copied + born) if copied + born else 0.0

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds right now, by kind; what lies in an open pool is counted under
        ``pool_*`` alone, used or not.
        """
        publication = self.engine.publication
        state = [t for tensors in self._step.state.values() for t in tensors.values()]
        if self._step.matrices is not None:
            state.extend(self._step.matrices.tensors())
        pooled = self.opened.plan.nbytes if self.opened is not None else {}
        return {
            "leader_copies": publication.resident_bytes if publication is not None else 0,
            "masters": sum(_bytes(g.master) for g in self.groups),
            "frozen_weights": sum(_bytes(g.frozen) for g in self.groups),
            "sharded_gradients": sum(
                _bytes(g.sharded_gradient) for g in self.groups if not g.sharded_pooled
            ),
            "optimizer_state": sum(_bytes(t) for t in state),
            "gathered_weights": sum(g.weights.resident_bytes for g in self.groups),
            "unsharded_gradients": sum(g.gradients.resident_bytes for g in self.groups),
            "accumulators": sum(g.sums.resident_bytes for g in self.groups),
            **{f"pool_{kind}": nbytes for kind, nbytes in pooled.items()},
        }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _stored_whole(name: str, key: str, data: Tensor) -> StoredTensor:
    """Optimizer state of a parameter that has no part for each of its pieces."""
    shape = tuple(data.shape)
    stored = f"{OPTIMIZER_PREFIX}{key}.{name}"
    return StoredTensor(name=stored, shape=shape, offset=(0,) * len(shape), data=data)


def _stored(name: str, segment: LocalSegment, data: Tensor) -> StoredTensor:
    shape = segment.parameter.shape
    return StoredTensor(name=name, shape=shape, offset=segment.offset, data=data)
