"""A model under FSDP2 in training: step, state, memory.

Owns ``FullyShardedRuntime``, a ``TrainableRuntime``. Invariant: names, shapes and dtypes of its
state are those of ``Runtime`` with AdamW; state is read from and written to FSDP2's own shards.
Tested by ``tests/distributed/test_fully_sharded.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megamuon import mesh as grid
from megamuon.baselines.fully_sharded_accumulation import WideAccumulation
from megamuon.baselines.fully_sharded_build import present
from megamuon.baselines.fully_sharded_step import FullyShardedStep
from megamuon.checkpoint.tensors import StoredTensor
from megamuon.collectives.traffic import Traffic
from megamuon.matrices import LogicalParameter, routing_report
from megamuon.mesh import Mesh
from megamuon.ownership.holdings import EVERYBODY, writers
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.config import RuntimeConfig
from megamuon.runtime.exchange import Exchange
from megamuon.runtime.module_buffers import ModuleBuffers
from megamuon.runtime.released import TRAINABLE, ReleasedWeightError
from megamuon.runtime.step_parts import RateOf, StepResult, norm_over_ranks
from megamuon.runtime.trainable import OPTIMIZER_PREFIX, TrainableRuntime
from megamuon.runtime.weights import (
    LoadedParameters,
    Shown,
    keep_changes,
    load_parameters,
    names_under,
    swapped,
)


class FullyShardedRuntime(TrainableRuntime):
    """What ``fully_shard_model`` returns."""

    def __init__(
        self,
        *,
        model: nn.Module,
        plan: OwnershipPlan,
        config: RuntimeConfig,
        mesh: Mesh,
        shard_group: dist.ProcessGroup,
        exchange: Exchange,
        modules: Sequence[FSDPModule],
        step: FullyShardedStep,
        world: dist.ProcessGroup | None,
        traffic: Traffic,
        buffers: ModuleBuffers,
        owns_process_group: bool,
    ) -> None:
        self.model = model
        self.plan = plan
        self.rank = mesh.place
        self.config = config
        self.mesh = mesh
        self.exchange = exchange
        self.buffers = buffers
        self.world = world
        self.traffic = traffic
        self._version = 0
        self._shard_group = shard_group
        self._modules = tuple(modules)  # the root last
        self._step = step
        self._owns_process_group = owns_process_group
        self._accumulating = 0  # contexts of ``accumulate`` that are open
        self._wide = WideAccumulation(self._modules, config)

    # --- training --------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        root = self._modules[-1]
        self._accumulating += 1
        self._wide.begin()
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._accumulating -= 1
            root.set_requires_gradient_sync(self._accumulating == 0)

    def finish_reductions(self) -> None:
        """Nothing to wait for: FSDP2 ends its reductions with the backward pass."""

    def step(
        self,
        lr: float,
        wd: float = 0.0,
        *,
        lr_of: RateOf | None = None,
    ) -> StepResult:
        """Update this rank's rows with the gradients since the last step.

        ``lr_of`` gives a parameter's own learning rate where it is not ``lr``. Collectives: the
        norm scalar with its riders, and the sum of partial gradients under tensor parallelism.
        """
        self._check_trainable()
        if any(gradient is not None for gradient in self._whole_gradients()):
            # Every backward pass was inside ``accumulate``: end one that does reduce.
            self._modules[-1]._get_fsdp_state()._root_post_backward_final_callback()
        result = self._step(lr_of or (lambda _: lr), wd)
        self._wide.end()
        self._reshard()
        if not result.skipped:
            self._version += 1
        return result

    def clear_gradients(self) -> None:
        for piece in self._step.trainable:
            piece.tensor.grad = None
        for held in self._fsdp_parameters():
            held.unsharded_accumulated_grad = None
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None
        self._wide.end()
        self._reshard()

    def _check_trainable(self) -> None:
        """Raise ReleasedWeightError where requires_grad has changed since the model was sharded."""
        for piece in self._step.pieces:
            if piece.tensor.requires_grad != piece.parameter.trainable:
                raise ReleasedWeightError(f"{piece.parameter.name}: {TRAINABLE}")

    def _reshard(self) -> None:
        """Drop gathered weights that a forward pass without a backward left: they go stale when
        masters change.
        """
        for module in self._modules:
            module.reshard()

    # --- what FSDP2 does not publish -------------------------------------------------------------
    # Held, and not yet reduced, gradients have no public name; these are of torch 2.11 to 2.13.

    def _fsdp_parameters(self) -> Iterator[Any]:
        for module in self._modules:
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield from group.fsdp_params

    def _whole_gradients(self) -> Iterator[Tensor | None]:
        for held in self._fsdp_parameters():
            yield held.unsharded_accumulated_grad
            yield held._unsharded_param.grad if hasattr(held, "_unsharded_param") else None

    # --- state -----------------------------------------------------------------------------------

    def state(
        self, *, optimizer: bool = True, everywhere: bool = False, buffers: bool = True
    ) -> list[StoredTensor]:
        """This rank's pieces of every weight (by canonical name), persistent buffer and optimizer
        tensor (``optimizer.<state>.<name>``); the tensors are the live ones.

        Each element is listed by one rank: the replicas of the mesh list a share each of what they
        hold alike; where nothing is cut the first tensor-parallel rank lists, and a scalar the
        first holder. With ``everywhere`` (what a load wants) all ranks list all that they hold.
        """
        found: list[StoredTensor] = []
        if buffers:
            speaks = self.mesh.rank == 0
            found.extend(self.buffers.stored(everywhere=everywhere, speaks=speaks))
        sizes, place = self.mesh.sizes, self.mesh.coordinates
        for piece in self._step.pieces:
            name, storage = piece.parameter.name, piece.parameter.storage
            share = EVERYBODY if everywhere else writers(storage, sizes, place)
            if not piece.master.numel() or share is None:
                continue
            pieces = [piece.stored(name, piece.master)]
            first = everywhere or not (any(pieces[0].offset) or share.index)
            for key, tensor in (self._step.state.get(name, {}) if optimizer else {}).items():
                stored = f"{OPTIMIZER_PREFIX}{key}.{name}"
                if tensor.ndim:
                    pieces.append(piece.stored(stored, tensor))
                elif first:
                    found.append(StoredTensor(name=stored, shape=(), offset=(), data=tensor))
            shares = (piece.share(*share) for piece in pieces)
            found.extend(share for share in shares if share is not None)
        return found

    def loaded(self) -> None:
        """Masters were written from outside: gathered weights are stale now."""
        self._reshard()
        self._version += 1

    # --- whole weights ---------------------------------------------------------------------------

    def masters(self) -> list[Tensor]:
        """This rank's replicas of each parameter."""
        return [piece.master for piece in self._step.pieces]

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
        """FSDP2's own gather. A forward pass inside ends it early."""
        wanted = names_under(self.model, module)
        before = present(self.model, self.plan.parameters)
        pieces = {p.parameter.name: p for p in self._step.pieces}
        modules = []
        for each in self._modules:
            group = each._get_fsdp_state()._fsdp_param_group
            held = [] if group is None else [p.sharded_param for p in group.fsdp_params]
            if wanted is None or any(id(tensor) in wanted for tensor in held):
                modules.append(each)
        for each in modules:
            each.unshard()
        now = present(self.model, self.plan.parameters)
        shown = {n: t for n, t in now.items() if t is not before[n]}
        try:
            watch = Shown(shown, self.plan.parameters, self.mesh, self.world)
            yield self.model
            changes = {n: t.clone() for n, t in watch.changed(write=write).items()}
        finally:
            for each in modules:
                each.reshard()
        for name, whole in changes.items():
            piece = pieces[name]
            part = whole[piece.first_row :][: len(piece.master)]
            keep_changes(piece.master, part, self._dtype(piece.parameter))
        if changes:
            self.loaded()

    def _dtype(self, parameter: LogicalParameter) -> torch.dtype:
        return self.config.dtypes_of(parameter.dtype)[0]

    @torch.no_grad()
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by canonical name in the compute dtype, one gathered at a time.

        A collective: every rank iterates to the end.
        """
        ranks = self.mesh.shards
        for piece in self._step.pieces:
            parameter = piece.parameter
            shape = parameter.piece_shape(self.mesh.tp_rank)
            size = (-(-shape[0] // ranks), *shape[1:])
            mine = piece.master.new_zeros(size, dtype=self._dtype(parameter))
            mine[: len(piece.master)].copy_(piece.master)
            parts = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(parts, mine, group=self._shard_group)
            nbytes = (ranks - 1) * mine.numel() * mine.element_size()
            self.traffic.sent("gather", "shard", nbytes)
            local = torch.cat(parts)[: shape[0]]
            read = self.plan.compute(parameter.name)
            yield (
                parameter.name,
                self.exchange.whole(parameter.name, parameter.shape, read, local),
            )

    def parameter_norm(self) -> float:
        mine = (piece.master for piece in self._step.pieces if piece.counts)
        return norm_over_ranks(mine, self.world, self.mesh.device)

    # --- reports ---------------------------------------------------------------------------------

    def report(self) -> str:
        return routing_report(self.plan.parameters)

    def notes(self) -> list[str]:
        """Torch's collectives leave nothing to say."""
        return []

    def copied_share(self) -> float:
        """Share of the gradient bytes that were copied on their way: FSDP2 copies all into its
        reductions.
        """
        return 1.0

    def publish_wait(self) -> None:
        """Nothing is published."""

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds right now, by the kinds of ``Runtime.memory``; masters with
        FSDP2's padding.
        """
        held = list(self._fsdp_parameters())
        whole = [h._unsharded_param.grad for h in held if hasattr(h, "_unsharded_param")]
        sharded = [piece.gradient for piece in self._step.trainable]
        state = [t for tensors in self._step.state.values() for t in tensors.values()]
        return {
            "masters": _bytes(piece.master for piece in self._step.pieces),
            "sharded_gradients": _bytes(sharded),
            "optimizer_state": _bytes(state),
            "gathered_weights": _bytes(t for h in held for t in h.all_gather_outputs),
            "unsharded_gradients": _bytes(whole),
            "accumulators": _bytes(h.unsharded_accumulated_grad for h in held),
            "leader_copies": 0,
        }

    def close(self) -> None:
        """End the process group that ``fully_shard_model`` started for itself, if it did."""
        if self._owns_process_group:
            self._owns_process_group = False
            grid.destroy()


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind ``tensors``, each once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
