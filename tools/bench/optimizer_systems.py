"""The systems that ``optimizer_step.py`` compares: owners on three lines, Muon on FSDP2 shards.

Owns the stack of linear layers that all of them train. Invariant: all have the same initial weights
and one formula for the update (``newton_schulz``, or the runtime's own standard form), but for
``StockMuon``; what differs is the distribution. Tested by ``tests/tools/test_optimizer_step.py``.
"""

from __future__ import annotations

import abc

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megamuon.optim.coefficients import coefficient_set
from megamuon.optim.muon import MuonConfig
from megamuon.optim.newton_schulz import NewtonSchulzConfig
from megamuon.ownership import PlannerSettings
from megamuon.runtime import OptimizerSettings, RuntimeConfig, shard

LR, WD, MOMENTUM = 1e-3, 0.1, 0.95


class Layer(nn.Module):
    """Matrices applied one after another, each to and from a common width."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(i, o, bias=False) for o, i in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.maps:
            x = torch.tanh(linear(x[..., : linear.in_features]))
        return x


class Stack(nn.Module):
    """Layers of matrices; a few rows of input, so that the optimizer is what costs."""

    def __init__(self, layers: int, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shapes) for _ in range(layers))
        self.width = shapes[0][1]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def newton_schulz(matrix: Tensor) -> Tensor:
    """The standard form in plain operations, which run on tensors and on DTensors alike."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm()
    for a, b, c in coefficient_set("polar_express").sequence(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def scaled_lr(shape: torch.Size) -> float:
    """Learning rate times 0.2 sqrt(max(rows, columns))."""
    return LR * 0.2 * max(shape) ** 0.5


class System(abc.ABC):
    """One way to train the stack: ``backward`` makes gradients, ``step`` is what is timed."""

    warm_up = 1  # steps before that

    def __init__(self, layers: int, shapes: list[tuple[int, int]]) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Stack(layers, shapes)
        for parameter in self.model.parameters():  # keeps signals alive through all the layers
            nn.init.orthogonal_(parameter, gain=5 / 3)
        self.width = shapes[0][1]

    def backward(self, rank: int, step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(4, self.width, generator=generator)
        self.model(inputs).square().mean().backward()

    @abc.abstractmethod
    def step(self) -> None:
        """What is timed: from gradients to new weights."""

    def weights(self) -> list[Tensor]:
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters()]


class Owners(System):
    """This runtime, line C."""

    planner = "lpt"
    collectives = "grouped"

    def __init__(self, layers: int, shapes: list[tuple[int, int]]) -> None:
        super().__init__(layers, shapes)
        muon = MuonConfig(
            momentum=MOMENTUM,
            newton_schulz=NewtonSchulzConfig(coefficients="polar_express", form="standard"),
        )
        # A unit per matrix: the layers are uniform, so the default threshold would merge them.
        config = RuntimeConfig(
            unit_threshold=1,
            collectives=self.collectives,
            planner=PlannerSettings(policy=self.planner),
            optimizer=OptimizerSettings(muon=muon, clip=0.0),
        )
        self.runtime = shard(self.model, layers=(Layer,), config=config)

    def backward(self, rank: int, step: int) -> None:
        super().backward(rank, step)
        self.runtime.engine.finish_reductions()

    def step(self) -> None:
        self.runtime.step(LR, WD)

    def weights(self) -> list[Tensor]:
        whole = dict(self.runtime.full_parameters())
        return [whole[name] for name, _ in self.model.named_parameters()]

    def close(self) -> None:
        """Let everything in flight arrive; a collective."""
        self.runtime.close()


class OwnersD(Owners):
    """This runtime, line D: its pool opens at the end of the second step."""

    collectives = "ready"
    warm_up = 3


class OwnersM(Owners):
    """This runtime, line M."""

    planner = "role_greedy"
    collectives = "p2p"


class Fsdp2(System):
    """The shards of FSDP2 with momentum on them."""

    def __init__(self, layers: int, shapes: list[tuple[int, int]]) -> None:
        super().__init__(layers, shapes)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.momenta = {id(p): torch.zeros_like(p) for p in self.model.parameters()}

    def inputs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Nesterov inputs; gradients are consumed."""
        found = []
        for parameter in self.model.parameters():
            momentum = self.momenta[id(parameter)]
            momentum.mul_(MOMENTUM).add_(parameter.grad)
            found.append((parameter, parameter.grad + MOMENTUM * momentum))
            parameter.grad = None
        return found

    @torch.no_grad()
    def step(self) -> None:
        for parameter, momentum in self.inputs():
            update = newton_schulz(momentum)
            parameter.mul_(1 - LR * WD)
            parameter.add_(update, alpha=-scaled_lr(parameter.shape))


class GatherOnce(Fsdp2):
    """One all-gather of everything, then all matrices on all ranks."""

    @torch.no_grad()
    def step(self) -> None:
        pairs = self.inputs()
        local = [momentum.to_local() for _, momentum in pairs]
        flat = torch.cat([part.reshape(-1) for part in local])
        world = dist.get_world_size()
        gathered = flat.new_empty(world * flat.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, flat)
        ranks = gathered.view(world, -1).split([part.numel() for part in local], dim=1)
        for (parameter, _), pieces in zip(pairs, ranks, strict=True):
            whole = pieces.reshape(parameter.shape)  # rows divide by the number of ranks here
            update = newton_schulz(whole)
            mine = update.chunk(world)[dist.get_rank()]
            shard_of = parameter.to_local()
            shard_of.mul_(1 - LR * WD)
            shard_of.add_(mine, alpha=-scaled_lr(parameter.shape))


class StockMuon(Fsdp2):
    """``torch.optim.Muon`` as it ships: BF16, its own coefficients."""

    def __init__(self, layers: int, shapes: list[tuple[int, int]]) -> None:
        super().__init__(layers, shapes)
        self.optimizer = torch.optim.Muon(self.model.parameters(), lr=LR, weight_decay=WD)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
