"""The systems of ``optimizer_step.py``: owners on three lines, Muon on FSDP2 shards in four ways.

Owns the stack of linear layers that all of them train. Invariant: all have the same initial weights
and one formula for the update (``ITERATION``, or ``newton_schulz`` on DTensors), but for
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
from megamuon.optim.newton_schulz import NewtonSchulzConfig, orthogonalize
from megamuon.ownership import PlannerSettings
from megamuon.runtime import OptimizerSettings, RuntimeConfig, shard

LR, WD, MOMENTUM = 1e-3, 0.1, 0.95
# Of all systems alike: the DTensors of one of them know no symmetric products.
ITERATION = NewtonSchulzConfig(
    coefficients="polar_express", form="standard", symmetric_kernel=False
)


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
    """``ITERATION`` in plain operations, which run on DTensors too."""
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
            newton_schulz=ITERATION,
        )
        # A unit per matrix: the layers are uniform, so the default threshold would merge them.
        config = RuntimeConfig(
            unit_threshold=1,
            collectives=self.collectives,
            planner=PlannerSettings(policy=self.planner),
            ns_cost="closed-form",
            optimizer=OptimizerSettings(matrix=muon, clip=0.0),
        )
        self.runtime = shard(self.model, layers=(Layer,), config=config)

    def backward(self, rank: int, step: int) -> None:
        super().backward(rank, step)
        self.runtime.finish_reductions()

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
            update = orthogonalize(whole, ITERATION)
            mine = update.chunk(world)[dist.get_rank()]
            shard_of = parameter.to_local()
            shard_of.mul_(1 - LR * WD)
            shard_of.add_(mine, alpha=-scaled_lr(parameter.shape))


class Dealt(Fsdp2):
    """The usual way to run Muon on shards (Moonlight, Dion): every matrix is dealt to a rank, one
    all-to-all brings its momentum there whole, it is iterated once, and one all-to-all brings the
    update back to the shards.

    Matrices are dealt by the time of their iteration, the dearest first to the rank with least;
    element-wise work is fused over all shards (``torch._foreach``), and what one rank sends another
    is one stretch of one buffer. ``parts`` cuts the matrices into so many rounds: all of their
    first all-to-alls are under way before the first iteration, and each round's second one while
    the next round is iterated.
    """

    parts = 1

    def __init__(self, layers: int, shapes: list[tuple[int, int]]) -> None:
        super().__init__(layers, shapes)
        self.parameters = list(self.model.parameters())
        self.shards = [p.to_local() for p in self.parameters]
        self.buffers = [self.momenta[id(p)].to_local() for p in self.parameters]
        self.rates = [-scaled_lr(p.shape) for p in self.parameters]
        world = dist.get_world_size()
        rounds = deal([tuple(p.shape) for p in self.parameters], world, self.parts)
        self.rounds = [Round(owned, self.shards) for owned in rounds]

    @torch.no_grad()
    def step(self) -> None:
        gradients = [p.grad.to_local() for p in self.parameters]
        torch._foreach_mul_(self.buffers, MOMENTUM)
        torch._foreach_add_(self.buffers, gradients)
        torch._foreach_add_(gradients, self.buffers, alpha=MOMENTUM)  # Nesterov's input
        for one in self.rounds:
            one.send(gradients)
        for one in self.rounds:
            one.iterate()
        updates: dict[int, Tensor] = {}
        for one in self.rounds:
            updates.update(one.receive())
        torch._foreach_mul_(self.shards, 1 - LR * WD)
        scaled = torch._foreach_mul([updates[i] for i in range(len(self.shards))], self.rates)
        torch._foreach_add_(self.shards, scaled)
        for parameter in self.parameters:
            parameter.grad = None


class DealtInRounds(Dealt):
    """The same in four rounds, whose messages and iterations overlap."""

    parts = 4


class Round:
    """One all-to-all each way over the matrices that ``owned[rank]`` lists by index."""

    def __init__(self, owned: list[list[int]], shards: list[Tensor]) -> None:
        self.owned, self.shards = owned, shards
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.there = [sum(shards[i].numel() for i in indices) for indices in owned]  # to each owner
        # Rows divide by the number of ranks here, so every rank's shard of a matrix is as long.
        self.here = [self.there[self.rank]] * self.world
        self.whole = shards[0].new_empty(self.world, self.there[self.rank])
        self.whole_work: dist.Work | None = None
        self.back = shards[0].new_empty(sum(self.there))
        self.back_work: dist.Work | None = None

    def send(self, inputs: list[Tensor]) -> None:
        """Start to bring each matrix to its owner."""
        order = [inputs[i].reshape(-1) for indices in self.owned for i in indices]
        self.outgoing = torch.cat(order)  # kept until the message has gone
        self.whole_work = dist.all_to_all_single(
            self.whole.view(-1), self.outgoing, self.here, self.there, async_op=True
        )

    def iterate(self) -> None:
        """Iterate what this rank owns, and start to bring the updates back."""
        self.whole_work.wait()
        mine = self.owned[self.rank]
        pieces = self.whole.split([self.shards[i].numel() for i in mine], dim=1)
        for i, piece in zip(mine, pieces, strict=True):
            update = orthogonalize(piece.reshape(-1, self.shards[i].shape[1]), ITERATION)
            piece.copy_(update.reshape(self.world, -1))  # its place is that of the way back
        self.back_work = dist.all_to_all_single(
            self.back, self.whole.view(-1), self.there, self.here, async_op=True
        )

    def receive(self) -> dict[int, Tensor]:
        """Updates of this rank's shards by index."""
        self.back_work.wait()
        order = [i for indices in self.owned for i in indices]
        pieces = self.back.split([self.shards[i].numel() for i in order])
        return {i: piece.view_as(self.shards[i]) for i, piece in zip(order, pieces, strict=True)}


def deal(shapes: list[tuple[int, int]], world: int, parts: int) -> list[list[list[int]]]:
    """For each round and rank the indices of its matrices: every round is as even as the longest
    processing time first makes it, and rounds take equal shares of each shape.
    """
    rounds: list[list[list[int]]] = []
    for part in range(min(parts, len(shapes))):
        loads, owned = [0.0] * world, [[] for _ in range(world)]
        costs = {i: iteration_cost(*shapes[i]) for i in range(part, len(shapes), parts)}
        for i in sorted(costs, key=lambda i: (-costs[i], i)):
            least = min(range(world), key=lambda rank: (loads[rank], rank))
            loads[least] += costs[i]
            owned[least].append(i)
        rounds.append(owned)
    return rounds


def iteration_cost(rows: int, cols: int) -> float:
    """Multiplications of a step of the standard form, (4 a + 2) n^3 / 2."""
    short, long = sorted((rows, cols))
    return short * short * (2.0 * long + short)


class StockMuon(Fsdp2):
    """``torch.optim.Muon`` as it ships: BF16, its own coefficients."""

    def __init__(self, layers: int, shapes: list[tuple[int, int]]) -> None:
        super().__init__(layers, shapes)
        self.optimizer = torch.optim.Muon(self.model.parameters(), lr=LR, weight_decay=WD)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
