"""Random models and random uses of them, for the differential fuzz of the runtime.

Owns what a trial is: a function of a seed and a number of ranks, the same on every rank. Tested by
``tests/distributed/test_runtime_fuzz.py``.

A trial has a model (blocks of several kinds, ties, frozen parts, weights used outside their
modules, recomputation), a way to train it (line, ZeRO stage, replicas) and a program: what the
ranks do with the model until each of its steps. Ranks may run the blocks in any order, leave some
out, use some twice, stop early, and raise; what torch leaves undefined they do alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 6
TOKENS = 7
MOST_BLOCKS = 12
BOTTOM = ("table", "second", "free", "blocks.0.", "blocks.1.")  # nothing below trains either


@dataclass(frozen=True, kw_only=True)
class Call:
    """One forward pass of one rank."""

    order: tuple[int, ...]  # blocks, in the order of their use
    remat: bool = False
    tables: bool = True  # whether the second token table is used
    detached: int = 0  # so many of the last blocks are computed and add nothing to the loss
    fails: str = ""  # "", "forward" or "backward": raises in the middle of that

    def __str__(self) -> str:
        words = [",".join(map(str, self.order)) or "none"]
        words += ["recomputed"] if self.remat else []
        words += [] if self.tables else ["no table"]
        words += [f"last {self.detached} detached"] if self.detached else []
        words += [f"raises in {self.fails}"] if self.fails else []
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Action:
    """What all ranks do at the same time, each with a call of its own.

    train: forward and backward. keep: the same, gradients stay on the rank. evaluate: a forward
    without gradients. probe: one block by itself, without gradients. inputs: gradients of the
    inputs alone, by torch.autograd.grad. double: two forwards, one backward. again: two backwards
    of one forward. fail: some ranks raise, and all forget their gradients.
    """

    kind: str
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        return f"{self.kind} [{' | '.join(map(str, self.calls))}]"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One model, one way to train it, one program."""

    seed: int
    ranks: int
    replicas: int
    line: str
    zero_stage: int
    kinds: tuple[str, ...]  # of the blocks
    shared: tuple[tuple[int, int], ...]  # blocks (a, b): b computes with a weight of a
    tied: bool  # the head is the first token table
    frozen: tuple[str, ...]  # parameters whose names contain one of these do not train
    # The root uses a weight without calling its module, which must then be in the root's group.
    functional_root: bool
    steps: tuple[tuple[Action, ...], ...] = field(repr=False)

    def __str__(self) -> str:
        lines = [
            f"trial {self.seed}: line {self.line}, ZeRO-{self.zero_stage}, {self.ranks} ranks in"
            f" {self.replicas} replicas, blocks {' '.join(self.kinds)}, shared {self.shared}, tied"
            f" {self.tied}, frozen {self.frozen}"
        ]
        for number, actions in enumerate(self.steps):
            lines.append(f"  step {number}: " + "; ".join(map(str, actions)))
        return "\n".join(lines)


class Block(nn.Module):
    """A residual layer; ``kind`` says what of: a norm and two linear maps, or loose parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(WIDTH, WIDTH + 2)
        self.down = nn.Linear(WIDTH + 2, WIDTH, bias=kind == "biased")
        if kind == "plain":
            self.norm = nn.LayerNorm(WIDTH)
        elif kind == "gains":
            self.gain = nn.Parameter(torch.ones(WIDTH))
        elif kind == "idle":
            self.idle = nn.Parameter(torch.ones(WIDTH))  # in no computation
        elif kind == "island":
            self.down.logical_dtype = torch.float32  # a group apart, in the layer's turn

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = x
        if self.kind == "plain":
            h = self.norm(x)
        elif self.kind == "gains":
            h = torch.tanh(x) * self.gain
        if self.kind == "functional":
            h = functional.linear(h, self.up.weight * 1.0, self.up.bias)
        else:
            h = self.up(h)
        out = x + 0.3 * self.down(torch.tanh(h))
        return (out, x) if self.kind == "pair" else out  # a pair passes its input through


KINDS = ("plain", "plain", "biased", "gains", "functional", "idle", "pair", "island")


class Model(nn.Module):
    """Token tables, blocks, a head, and a weight that the root uses by itself."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.second = nn.Embedding(TOKENS, WIDTH)
        self.free = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(kind) for kind in trial.kinds)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.functional = trial.functional_root
        if trial.tied:
            self.head.weight = self.table.weight
        for first, second in trial.shared:
            self.blocks[second].up.weight = self.blocks[first].up.weight

    def forward(self, tokens: Tensor, offset: Tensor, call: Call) -> Tensor:
        """``tokens (batch,)`` and ``offset (batch, width)`` to logits ``(batch, tokens)``."""
        x = self.table(tokens) + offset
        if call.tables:
            x = x + self.second(tokens)
        x = x + (functional.linear(x, self.free.weight) if self.functional else self.free(x))
        middle = len(call.order) // 2
        counted = x
        for place, index in enumerate(call.order):
            if call.fails == "forward" and place == middle:
                raise ArithmeticError("on purpose")
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if call.remat else block(x)
            x = x[0] + 0.1 * x[1] if isinstance(x, tuple) else x
            if call.fails == "backward" and place == middle:
                x = _Raises.apply(x)
            if place < len(call.order) - call.detached:
                counted = x
        if call.fails == "forward" and not call.order:
            raise ArithmeticError("on purpose")
        return self.head(counted)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def build(trial: Trial) -> Model:
    """The trial's model in FP64, equal on every rank."""
    torch.manual_seed(trial.seed)
    model = Model(trial).to(torch.float64)
    for name, parameter in model.named_parameters():
        if any(part in name for part in trial.frozen):
            parameter.requires_grad_(False)
    return model


def inputs(trial: Trial, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Tokens ``(4,)`` and offsets ``(4, width)`` of a rank's forward pass ``number``."""
    generator = torch.Generator().manual_seed(1000 * trial.seed + 100 * rank + number)
    tokens = torch.randint(0, TOKENS, (4,), generator=generator)
    return tokens, torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


# --- generation ----------------------------------------------------------------------------------

LINES = ("C", "C", "C", "D", "D", "M", "B", "A")


def make_trial(seed: int, ranks: int) -> Trial:
    """Trial ``seed`` for ``ranks`` ranks."""
    draw = random.Random(f"{seed}:{ranks}")
    line = draw.choice(LINES)
    replicas = draw.choice([1, 1, 2]) if ranks % 2 == 0 and line != "M" else 1
    stages = {"A": (2, 3), "M": (3,), "B": (2, 3)}.get(line, (1, 2, 3, 3))
    depth = draw.choice([2, 3, 4, 6, 8, MOST_BLOCKS])
    kinds = tuple(draw.choice(KINDS) for _ in range(depth))
    shared: tuple[tuple[int, int], ...] = ()
    if depth > 2 and draw.random() < 0.3 and line != "A":
        first, second = sorted(draw.sample(range(depth), 2))
        shared = ((first, second),)
    frozen = draw.choice(
        [(), (), (), (".up.",), (f"blocks.{depth // 2}.",), ("blocks.0.", "table"), BOTTOM, BOTTOM]
    )
    alike = line == "A"  # FSDP2 asks all ranks to use the same parameters
    steps = tuple(_step(draw, ranks, depth, alike) for _ in range(draw.randint(3, 5)))
    if frozen == BOTTOM:
        shared = ()
        # A rank that refuses the first of two backward passes has no second.
        steps = tuple(tuple(a for a in actions if a.kind != "again") for actions in steps)
    ordinary = Action(kind="train", calls=(Call(order=tuple(range(depth))),) * ranks)
    if shared:  # a weight of another group is there for the module that has it too, and is called
        place = shared[0][1]
        kinds = (*kinds[:place], "plain", *kinds[place + 1 :])
    if line == "A":
        kinds = tuple("plain" if kind in ("idle", "pair") else kind for kind in kinds)
        frozen = ()
    return Trial(
        seed=seed,
        ranks=ranks,
        replicas=replicas,
        line=line,
        zero_stage=draw.choice(stages),
        kinds=kinds,
        shared=shared,
        tied=draw.random() < 0.4 and frozen != BOTTOM,  # the head trains: each loss has a backward
        frozen=frozen,
        functional_root=line not in "AB",
        # Three ordinary steps at the end: nothing that came before may hold on to more weights.
        steps=(*steps, (ordinary,), (ordinary,), (ordinary,)),
    )


def _step(draw: random.Random, ranks: int, depth: int, alike: bool) -> tuple[Action, ...]:
    actions: list[Action] = []
    strange = draw.random() < 0.7
    for _ in range(draw.choice([1, 1, 2, 3])):
        kind = "train"
        if draw.random() < 0.35:
            kinds = ["evaluate", "double"]
            kinds += [] if alike else ["probe", "inputs", "again", "keep", "keep", "fail"]
            kind = draw.choice(kinds)
        actions.append(_action(draw, kind, ranks, depth, strange, alike))
    actions.append(_action(draw, "train", ranks, depth, strange, alike))
    return tuple(actions)


def _action(
    draw: random.Random, kind: str, ranks: int, depth: int, strange: bool, alike: bool
) -> Action:
    call = _call(draw, depth, strange and not alike)
    calls = [call] * ranks
    if strange and not alike:
        remat = call.remat
        calls = [
            call if draw.random() < 0.4 else _call(draw, depth, True, remat) for _ in range(ranks)
        ]
    if kind == "probe":
        calls = [Call(order=(draw.randrange(depth),))] * ranks
    if kind == "fail":
        way = draw.choice(["forward", "backward"])
        failing = set(draw.sample(range(ranks), draw.randint(1, ranks)))
        calls = [
            Call(order=c.order, remat=c.remat, fails=way if rank in failing else "")
            for rank, c in enumerate(calls)
        ]
    return Action(kind=kind, calls=tuple(calls))


def _call(draw: random.Random, depth: int, strange: bool, remat: bool | None = None) -> Call:
    remat = draw.random() < 0.25 if remat is None else remat
    order = list(range(depth))
    if not strange or draw.random() < 0.3:
        return Call(order=tuple(order), remat=remat)
    way = draw.choice(["skip", "shuffle", "twice", "early", "any", "detached", "tables"])
    if way == "skip":
        order = [index for index in order if draw.random() < 0.7]
    elif way == "shuffle":
        draw.shuffle(order)
    elif way == "twice":
        order.insert(draw.randint(0, depth), draw.randrange(depth))
    elif way == "early":
        order = order[: draw.randint(0, depth)]
    elif way == "any":
        order = [draw.randrange(depth) for _ in range(draw.randint(0, depth + 2))]
    return Call(
        order=tuple(order),
        remat=remat,
        tables=way != "tables",
        detached=draw.randint(1, depth) if way == "detached" else 0,
    )
