"""``TrainableRuntime``: the protocol that loop, checkpoints and tools use, whoever shards.

Owns ``TrainableRuntime``. The loop, checkpoints, logging and tools hold a runtime by this protocol
and ask for nothing else; ``Runtime`` (owners) and the baselines derive from it, so that one which
lacks a method cannot be made. Names, shapes and dtypes of their state are the same. Tested by
``tests/runtime/test_trainable.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from megamuon.checkpoint.tensors import StoredTensor
from megamuon.collectives.traffic import Traffic
from megamuon.mesh import Mesh
from megamuon.ownership.plan import OwnershipPlan
from megamuon.runtime.config import RuntimeConfig
from megamuon.runtime.module_buffers import ModuleBuffers
from megamuon.runtime.step_parts import RateOf, StepResult
from megamuon.runtime.weights import LoadedParameters

OPTIMIZER_PREFIX = "optimizer."  # of the names of optimizer state: optimizer.<state>.<parameter>


class TrainableRuntime(Protocol):
    """A sharded model, its optimizer and their state."""

    model: nn.Module
    plan: OwnershipPlan  # which parameters there are, and where they lie
    config: RuntimeConfig
    mesh: Mesh
    rank: int  # this rank's place
    world: dist.ProcessGroup | None  # all ranks; None: one
    buffers: ModuleBuffers
    traffic: Traffic  # bytes that this rank has sent

    @property
    @abstractmethod
    def version(self) -> int:
        """Applied updates and loads so far."""

    # --- training --------------------------------------------------------------------------------

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside keep their gradients on the rank; the next one outside reduces the
        sum.  It nests: the outermost one counts.
        """

    @abstractmethod
    def finish_reductions(self) -> None:
        """Wait until the gradients of all backward passes so far lie where ``step`` reads them."""

    @abstractmethod
    def step(
        self,
        lr: float,
        wd: float = 0.0,
        *,
        lr_of: RateOf | None = None,
    ) -> StepResult:
        """Update the weights with the gradients since the last step.

        ``lr_of`` gives a parameter's own learning rate where it is not ``lr`` (Megatron's
        --decoupled-lr).  A collective.
        """

    @abstractmethod
    def clear_gradients(self) -> None:
        """Forget all gradients since the last step."""

    # --- state -----------------------------------------------------------------------------------

    @abstractmethod
    def state(
        self, *, optimizer: bool = True, everywhere: bool = False, buffers: bool = True
    ) -> list[StoredTensor]:
        """This rank's pieces of every weight (by canonical name), persistent buffer and optimizer
        tensor (``optimizer.<state>.<name>``); the tensors are the live ones.

        Each element is listed by one rank. With ``everywhere`` (what a load wants) each rank lists
        all it holds.
        """

    @abstractmethod
    def loaded(self) -> None:
        """Masters were written from outside: whoever keeps copies must get the new ones.  Every
        rank calls this.
        """

    # --- whole weights ---------------------------------------------------------------------------

    @abstractmethod
    def masters(self) -> list[Tensor]:
        """This rank's share of the weights that train, in the master dtype, always in the same
        order; the tensors are the live ones. Frozen ones have none (under line A they do, as FSDP2
        keeps them). Call ``loaded`` on every rank after writing to them.
        """

    @abstractmethod
    def swapped(self, values: Sequence[Tensor]) -> AbstractContextManager[None]:
        """A context in which the model computes with ``values``, one for each of ``masters()``,
        such as a moving average of them. A collective at both ends.
        """

    @abstractmethod
    def load_parameters(
        self,
        values: Mapping[str, Tensor] | None,
        *,
        source_rank: int | None = None,
        strict: bool = True,
    ) -> LoadedParameters:
        """Fill weights and persistent buffers from whole tensors by name, such as a state dict:
        given on every rank, or on ``source_rank`` alone (None on the others). The optimizer's state
        stays. A collective.

        Raises ValueError for names (if ``strict``) and shapes that do not fit the model, and
        ReplicaMismatchError where ranks were given different values, before anything is written.
        """

    @abstractmethod
    def gathered(
        self, module: nn.Module | None = None, *, write: bool = False
    ) -> AbstractContextManager[nn.Module]:
        """A context in which the parameters of ``module`` (default: of the model) and of those that
        are gathered with them are whole, in the compute dtype: FSDP's ``summon_full_params``.

        With ``write``, what every rank changed alike goes to the masters at the end; elements that
        nobody changed keep all their digits. With tensor parallelism they are this rank's pieces.
        A collective at both ends. Raises ReleasedWeightError at the end for changes without
        ``write`` and for changes that differ between ranks; none of them is kept.
        """

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by canonical name in the compute dtype, a few gathered at a time.

        A collective: every rank iterates to the end.
        """

    @abstractmethod
    def parameter_norm(self) -> float:
        """L2 norm of all parameters, each element once.  A collective of one scalar."""

    # --- reports ---------------------------------------------------------------------------------

    @abstractmethod
    def report(self) -> str:
        """Routes, reasons and counts."""

    @abstractmethod
    def notes(self) -> list[str]:
        """What has happened since the last call that a user wants to read."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds right now, by kind."""

    @abstractmethod
    def copied_share(self) -> float:
        """Share of the gradient bytes that were copied on their way to a reduction."""

    @abstractmethod
    def publish_wait(self) -> float | None:
        """Seconds that this rank's gathers have waited for published weights so far; None where
        nothing is published.
        """

    @abstractmethod
    def close(self) -> None:
        """Let everything in flight arrive; call it before the process groups are destroyed."""
