"""The systems that ``train_step.py`` compares, and what one step of them costs in operations.

Owns ``Setting`` (a decoder and its tokens), the systems and their timed step. Invariant: all
systems have the same model class, initial weights, tokens, learning rate, decay and clipping, so
that only the runtime and the optimizer differ. Tested by ``tests/tools/test_train_step.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megamuon.matrices import Route
from megamuon.models import GPT, DecoderLayer, GPTConfig, flops_per_token
from megamuon.optim.newton_schulz import NewtonSchulzConfig
from megamuon.ownership import OwnershipPlan
from megamuon.runtime import OptimizerSettings, Runtime, RuntimeConfig, shard
from tools.bench.footprint import reachable_tensors

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
    """This runtime, line C, with Muon or AdamW on its owners."""

    def __init__(self, setting: Setting, matrices: str) -> None:
        self.model = build_model(setting.model)
        config = RuntimeConfig(
            unit_threshold=setting.unit_threshold,
            ns_cost="measured",
            optimizer=OptimizerSettings(matrices=matrices, clip=CLIP),
        )
        self.runtime: Runtime = shard(self.model, layers=(DecoderLayer,), config=config)

    def backward(self, loss: Tensor) -> None:
        """Gradients are on their owners when it returns."""
        loss.backward()
        self.runtime.engine.finish_reductions()

    def step(self) -> None:
        """Clip and update."""
        self.runtime.step(LR, WD)

    def tensors(self) -> Iterator[Tensor]:
        """All that the runtime and the model hold."""
        return reachable_tensors(self.runtime)


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


System = Owners | Fsdp2
SYSTEMS: dict[str, Callable[[Setting], System]] = {
    "owner_muon": lambda setting: Owners(setting, "muon"),
    "owner_adamw": lambda setting: Owners(setting, "adam"),
    "fsdp2_adamw": Fsdp2,
}


def train(system: System, tokens: Tensor) -> tuple[list[float], float]:
    """One step: this rank's seconds of each of ``PHASES``, and its loss."""
    marks = [time.perf_counter()]
    loss = system.model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
    marks.append(time.perf_counter())
    system.backward(loss)
    marks.append(time.perf_counter())
    system.step()
    marks.append(time.perf_counter())
    phases = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    return [*phases, marks[-1] - marks[0]], float(loss.detach())


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
        if parameter.route is Route.MUON
    )
    return tokens * flops_per_token(setting.model, setting.positions), newton_schulz
