"""Small models that are used in awkward ways, each run on owner ranks and on whole parameters.

Owns the scenarios of ``tests/distributed/test_runtime_rules.py``: a model and a loss per rank and
step. The oracle of each is plain autograd on every rank's loss in one process, averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

WIDTH = 6


class Block(nn.Module):
    """Two linear maps and a norm: a layer group."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Three blocks between a stem and a head that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2), remat: bool = False) -> Tensor:
        x = self.stem(x)
        for index in order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if remat else block(x)
        return self.head(x)


class Box:
    """An output that no tree utility can look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class OddBlock(Block):
    """Takes a plain Python object and returns one."""

    def forward(self, x: Box) -> Box:  # type: ignore[override]
        return Box(super().forward(x.value))


class OddStack(Stack):
    """Blocks that exchange opaque objects, so that no hook sees a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        box = Box(self.stem(x))
        for block in self.blocks:
            box = block(box)
        return self.head(box.value)


class ForeignOddBlock(OddBlock):
    """Opaque values and no linear map: neither hooks nor our function see its backward."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        del self.norm, self.up, self.down
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, x: Box) -> Box:  # type: ignore[override]
        return Box(torch.tanh(x.value) * self.gain)


class ForeignOddStack(OddStack):
    """Works at ZeRO-2, where weights stay from forward to backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ForeignOddBlock() for _ in range(3))


class Nested(Stack):
    """Blocks return their value inside a dict inside a tuple."""

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, ...]]:  # type: ignore[override]
        return {"out": (super().forward(x),)}


class SharedWeights(Stack):
    """The last block computes with a matrix of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Tied(nn.Module):
    """A token table used as the head too; 7 rows divide by no rank count here."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inputs(rank: int, step: int) -> Tensor:
    """Numbers that differ by rank and step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def tokens(rank: int, step: int) -> Tensor:
    """Token ids below 7."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(0, 7, (2, 5), generator=generator)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model, and the loss that a rank computes in a step."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    stages: tuple[int, ...] = (2, 3)  # ZeRO stages that it works at
    freeze: tuple[str, ...] = ()  # parameters whose names contain one of these do not train


def _frozen_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(inputs(rank, step).requires_grad_()).square().sum()


def _without_early_stop(model: nn.Module, rank: int, step: int) -> Tensor:
    """The recomputed forward runs its post-hooks too."""
    with set_checkpoint_early_stop(False):
        return model(inputs(rank, step), remat=True).square().sum()


SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(build=Stack, loss=lambda m, r, s: m(inputs(r, s)).square().sum()),
    "branch skipped on one rank": Scenario(
        build=Stack,
        loss=lambda m, r, s: m(inputs(r, s), order=(0, 2) if r == 1 else (0, 1, 2)).square().sum(),
    ),
    "branch skipped on one rank, later on another": Scenario(
        build=Stack,
        loss=lambda m, r, s: (
            m(inputs(r, s), order=(1,) if r == s % 2 else (0, 1, 2)).square().sum()
        ),
    ),
    "only the last layer on one rank": Scenario(
        build=Stack,
        loss=lambda m, r, s: m(inputs(r, s), order=(2,) if r == 1 else (0, 1, 2)).square().sum(),
    ),
    "layer that nobody uses": Scenario(
        build=Stack, loss=lambda m, r, s: m(inputs(r, s), order=(0, 2)).square().sum()
    ),
    "layer used twice": Scenario(
        build=Stack, loss=lambda m, r, s: m(inputs(r, s), order=(0, 1, 0, 2)).square().sum()
    ),
    "layers used out of order": Scenario(
        build=Stack, loss=lambda m, r, s: m(inputs(r, s), order=(2, 0, 1)).square().sum()
    ),
    "recompute": Scenario(
        build=Stack, loss=lambda m, r, s: m(inputs(r, s), remat=True).square().sum()
    ),
    "recompute of a layer used twice": Scenario(
        build=Stack,
        loss=lambda m, r, s: m(inputs(r, s), order=(0, 1, 0), remat=True).square().sum(),
    ),
    "recompute to the end": Scenario(build=Stack, loss=_without_early_stop),
    "two forwards, one backward": Scenario(
        build=Stack,
        loss=lambda m, r, s: m(inputs(r, s)).square().sum() + m(inputs(r, s + 50)).sum(),
    ),
    "opaque outputs": Scenario(build=OddStack, loss=lambda m, r, s: m(inputs(r, s)).square().sum()),
    "opaque outputs of foreign operations": Scenario(
        build=ForeignOddStack, loss=lambda m, r, s: m(inputs(r, s)).square().sum(), stages=(2,)
    ),
    "opaque outputs of a frozen layer": Scenario(
        build=OddStack, loss=_frozen_loss, freeze=("blocks.1",)
    ),
    "layers that share a weight": Scenario(
        build=SharedWeights, loss=lambda m, r, s: m(inputs(r, s)).square().sum()
    ),
    "nested outputs": Scenario(
        build=Nested, loss=lambda m, r, s: m(inputs(r, s))["out"][0].square().sum()
    ),
    "tied table": Scenario(build=Tied, loss=lambda m, r, s: m(tokens(r, s)).logsumexp(-1).sum()),
    "frozen matrices": Scenario(build=Stack, loss=_frozen_loss, freeze=(".up.",)),
    "frozen matrices and norms below a trained one": Scenario(
        build=Stack, loss=_frozen_loss, freeze=(".up.", ".norm.")
    ),
    "frozen layer": Scenario(build=Stack, loss=_frozen_loss, freeze=("blocks.1",)),
    "frozen stem, inputs without gradients": Scenario(
        build=Stack,
        loss=lambda m, r, s: m(inputs(r, s)).square().sum(),
        freeze=("stem", "blocks.0"),
    ),
}


def build(scenario: Scenario) -> nn.Module:
    """The scenario's model in FP64, equal on every rank."""
    torch.manual_seed(3)
    model = scenario.build().to(torch.float64)
    for name, parameter in model.named_parameters():
        if any(part in name for part in scenario.freeze):
            parameter.requires_grad_(False)
    return model


def expected(scenario: Scenario, world: int, step: int) -> tuple[dict[str, Tensor], set[str]]:
    """Mean gradients over the ranks on the initial weights, and the names that some rank
    touched.
    """
    model = build(scenario)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in named.items()}
    touched: set[str] = set()
    for rank in range(world):
        scenario.loss(model, rank, step).backward()
        for name, parameter in named.items():
            if parameter.grad is not None:
                touched.add(name)
                total[name] += parameter.grad / world
                parameter.grad = None
    return total, touched
