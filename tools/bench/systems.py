"""The systems that ``train_step.py`` and ``lines.py`` compare, and what a step costs in operations.

Owns ``Setting`` (a decoder and its tokens), the systems, lines among them, and their timed step.
Invariant: all systems of a bench have the same model class, initial weights, tokens, learning rate,
decay and clipping, so that only the runtime and the optimizer differ. Tested by
``tests/tools/test_train_step.py`` and ``tests/tools/test_lines.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.baselines.fully_sharded_runtime import FullyShardedRuntime
from megamuon.matrices import Route
from megamuon.mesh import Mesh, new_group
from megamuon.models import GPT, DecoderLayer, GPTConfig, flops_per_token
from megamuon.optim.newton_schulz import NewtonSchulzConfig
from megamuon.ownership import OwnershipPlan
from megamuon.runtime import OptimizerSettings, Runtime, RuntimeConfig, shard
from megamuon.runtime.publication import Publication
from megamuon.sharding import apply_sharding, plan_sharding
from tools.bench.footprint import reachable_tensors
from tools.reference_training import model_config
from tools.sharded_training import Case, runtime_config

LR, WD, CLIP = 1e-3, 0.1, 1.0
PHASES = ("forward", "backward", "optimizer", "total")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A decoder and what one rank feeds it per step."""

    layers: int
    hidden: int
    ffn: int
    sequences: int  # per rank
    positions: int  # tokens of a sequence

    @property
    def model(self) -> GPTConfig:
        """A Llama-like decoder over bytes, so that the tables are small beside the matrices."""
        heads = self.hidden // 32
        return GPTConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_attention_heads=heads,
            num_query_groups=heads // 2,
            kv_channels=32,
            vocab_size=256,
            max_position_embeddings=self.positions,
            tied_embeddings=False,
        )

    @property
    def unit_threshold(self) -> int:
        """The smallest matrix of a layer: each is a unit, and the gains of a layer are one."""
        return self.model.key_size * self.hidden

    def tokens(self, rank: int, step: int) -> Tensor:
        """Random bytes ``(sequences, positions + 1)``, the same for every system.

        Only 16 of the 256 occur, so that losses fall at once and a wrong update would show.
        """
        generator = torch.Generator().manual_seed(100_003 * step + rank)
        shape = (self.sequences, self.positions + 1)
        return torch.randint(0, 16, shape, generator=generator)


def build_model(config: GPTConfig) -> GPT:
    """The decoder with its initial weights, equal on all ranks and for all systems."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        model.initialise_(name, parameter.data, generator)
    return model


class Owners:
    """This runtime with Muon or AdamW on its owners: line C with grouped collectives, line D with
    ready ones.
    """

    def __init__(self, setting: Setting, matrices: str, collectives: str = "grouped") -> None:
        self.model = build_model(setting.model)
        config = RuntimeConfig(
            collectives=collectives,
            unit_threshold=setting.unit_threshold,
            ns_cost="measured",
            optimizer=OptimizerSettings(matrices=matrices, clip=CLIP),
        )
        self.runtime: Runtime = shard(self.model, layers=(DecoderLayer,), config=config)

    def backward(self, loss: Tensor) -> None:
        """Gradients are on their owners when it returns."""
        loss.backward()
        self.runtime.finish_reductions()

    def step(self) -> None:
        """Clip and update."""
        self.runtime.step(LR, WD)

    def tensors(self) -> Iterator[Tensor]:
        """All that the runtime and the model hold."""
        return reachable_tensors(self.runtime)

    def close(self) -> None:
        """Let everything in flight arrive; a collective."""
        self.runtime.close()


class Fsdp2:
    """Line A: plain torch."""

    def __init__(self, setting: Setting) -> None:
        self.model = build_model(setting.model)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WD},
                {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=LR,
        )

    def backward(self, loss: Tensor) -> None:
        """FSDP2 waits for its reductions at the end of the backward pass."""
        loss.backward()

    def step(self) -> None:
        """Clip and update."""
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> Iterator[Tensor]:
        """Shards, their gradients and the optimizer's state."""
        yield from reachable_tensors(self.model)
        yield from reachable_tensors(dict(self.optimizer.state))

    def close(self) -> None:
        """Nothing is in flight between two steps."""


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


System = Owners | Fsdp2 | Line
SYSTEMS: dict[str, Callable[[Setting], System]] = {
    "owner_muon": lambda setting: Owners(setting, "muon"),
    "owner_adamw": lambda setting: Owners(setting, "adam"),
    "fsdp2_adamw": Fsdp2,
    "ready_muon": lambda setting: Owners(setting, "muon", "ready"),
}


def staged_step(system: System, tokens: Tensor, mark: Callable[[str], object]) -> float:
    """One step and its loss; ``mark`` is called with the name of each phase at its start, and with
    "end".
    """
    mark("forward")
    loss = system.model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
    mark("backward")
    system.backward(loss)
    mark("optimizer")
    system.step()
    mark("end")
    return float(loss.detach())


def train(system: System, tokens: Tensor) -> tuple[list[float], float]:
    """One step: this rank's seconds of each of ``PHASES``, and its loss."""
    marks: list[float] = []
    loss = staged_step(system, tokens, lambda _: marks.append(time.perf_counter()))
    phases = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    return [*phases, marks[-1] - marks[0]], loss


def timed(system: System, tokens: Tensor) -> tuple[dict[str, float], float]:
    """One step of all ranks at once: seconds of the slowest rank per phase, and the mean loss."""
    dist.barrier()
    phases, loss = train(system, tokens)
    slowest = torch.tensor(phases, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(mean)
    named = dict(zip(PHASES, slowest.tolist(), strict=True))
    return named, float(mean) / dist.get_world_size()


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


def step_flops(setting: Setting, world: int, plan: OwnershipPlan) -> tuple[float, float]:
    """FLOPs of one step on all ranks: the model's (forward and backward) and Newton-Schulz's."""
    tokens = world * setting.sequences * setting.positions
    newton_schulz = sum(
        newton_schulz_flops(*parameter.shape, NewtonSchulzConfig())
        for parameter in plan.parameters
        if parameter.route is Route.MATRIX
    )
    return tokens * flops_per_token(setting.model, setting.positions), newton_schulz
