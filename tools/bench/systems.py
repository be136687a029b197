"""The lines that ``lines.py`` compares, and what a step costs in operations.

Owns ``Line`` (a preset on a line's runtime), its step by phase, and the FLOPs of a step. Invariant:
all lines of a bench have the same model class, initial weights, tokens, learning rate, decay and
clipping, so that only the runtime and the optimizer differ. Tested by ``tests/tools/test_lines.py``
and ``tests/tools/test_footprint.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.baselines.fully_sharded_runtime import FullyShardedRuntime
from megamuon.matrices import Route
from megamuon.mesh import Mesh, new_group
from megamuon.models import GPT, flops_per_token
from megamuon.optim.newton_schulz import NewtonSchulzConfig
from megamuon.ownership import OwnershipPlan
from megamuon.runtime import Runtime, shard
from megamuon.runtime.publication import Publication
from megamuon.sharding import apply_sharding, plan_sharding
from tools.bench.footprint import reachable_tensors
from tools.reference_training import model_config
from tools.sharded_training import Case, runtime_config

LR, WD, CLIP = 1e-3, 0.1, 1.0


class Line:
    """A line of the paper on a preset: A (FSDP2), B, C, D or M."""

    def __init__(self, case: Case, rank: int, *, compute: torch.dtype, reduce: torch.dtype) -> None:
        """``compute`` and ``reduce``: dtypes of gathered weights and of gradients on their way;
        masters are FP32.  A collective over all ranks.
        """
        self.case = case
        self.mesh = Mesh(
            world_size=case.ranks,
            rank=rank,
            local_rank=rank,
            replicas=case.replicas,
            shards=case.shards,
            tp=case.tp,
            device=torch.device("cpu"),
            backend="gloo",
        )
        with torch.device("meta"):
            config = model_config(case.training.model)
            self.model, template = GPT(config), GPT(config)  # the second fills whole weights
        placements = None
        if case.tp > 1:
            sharding = plan_sharding(self.model, tp=case.tp)
            placements = sharding.placements
            group = new_group(self.mesh, "tp")
            apply_sharding(self.model, sharding, tp_rank=self.mesh.tp_rank, group=group)
        self.runtime: Runtime | FullyShardedRuntime = (
            fully_shard_model if case.line == "A" else shard
        )(
            self.model,
            layers=GPT.layer_classes,
            config=replace(runtime_config(case), compute_dtype=compute, reduce_dtype=reduce),
            mesh=self.mesh,
            placements=placements,
            initial=template.initialise_,
        )

    def tokens(self, step: int) -> Tensor:
        """Tokens of this rank's place ``(samples, length + 1)``, the same for every line."""
        training, place = self.case.training, self.mesh.sample_rank
        generator = torch.Generator().manual_seed(100_003 * step + place)
        shape = (training.batch // self.mesh.sample_ranks, training.length + 1)
        return torch.randint(0, 256, shape, generator=generator)

    def backward(self, loss: Tensor) -> None:
        """Gradients are where they are needed when it returns."""
        loss.backward()
        self.runtime.finish_reductions()

    def step(self) -> None:
        """Clip and update."""
        self.runtime.step(LR, WD)

    @property
    def publication(self) -> Publication | None:
        """Where several replicas publish weights."""
        return self.runtime.engine.publication if isinstance(self.runtime, Runtime) else None

    def settle(self) -> None:
        """Let what was published arrive, so that nobody else's step pays for it."""
        if self.publication is not None:
            self.publication.publisher.drain()

    def tensors(self) -> Iterator[Tensor]:
        """All that the runtime and the model hold."""
        return reachable_tensors(self.runtime)

    def close(self) -> None:
        """Let everything in flight arrive; a collective."""
        self.runtime.close()


def staged_step(line: Line, tokens: Tensor, mark: Callable[[str], object]) -> float:
    """One step and its loss; ``mark`` is called with the name of each phase at its start, and with
    "end".
    """
    mark("forward")
    loss = line.model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
    mark("backward")
    line.backward(loss)
    mark("optimizer")
    line.step()
    mark("end")
    return float(loss.detach())


def newton_schulz_flops(rows: int, cols: int, config: NewtonSchulzConfig) -> int:
    """FLOPs (two per multiply-add) of one orthogonalisation on this CPU, symmetry not exploited.

    With n <= m: X X^T and Q X cost 2 n^2 m each, a product of n x n matrices 2 n^3. The standard
    form takes 4 n^2 m + 2 n^3 per iteration; the Gram form (Gram Newton-Schulz, section on its
    algorithm) takes the long products at its start, its restarts and its end only.
    """
    n, m = min(rows, cols), max(rows, cols)
    long, square = 2 * n * n * m, 2 * n**3
    plan = config.plan(rows, cols, device_type="cpu", input_dtype=torch.float32)
    steps = len(config.polynomials)
    if plan.form == "standard":
        return steps * (2 * long + square)
    total = 2 * long * (1 + len(plan.restarts))  # per segment: R = X X^T, then Q X
    for index in range(steps):
        first_of_segment = index == 0 or index in plan.restarts
        goes_on = index < steps - 1 and index + 1 not in plan.restarts
        total += square * (1 + (not first_of_segment) + 2 * goes_on)
    return total


def newton_schulz_share(case: Case, plan: OwnershipPlan) -> float:
    """Newton-Schulz's share of the FLOPs of one step on all ranks; the rest is the model's forward
    and backward pass.
    """
    training = case.training
    whole = (
        training.batch
        * training.length
        * flops_per_token(model_config(training.model), training.length)
    )
    matrices = (p for p in plan.parameters if p.route is Route.MATRIX)
    spent = sum(newton_schulz_flops(*p.shape, NewtonSchulzConfig()) for p in matrices)
    return spent / (whole + spent)
