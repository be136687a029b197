"""One rank of the differential fuzz: a trial on the runtime, beside plain autograd.

Owns the comparison. Invariant: the oracle uses torch alone (whole parameters, ``torch.optim``, one
all-reduce of the gradients), nothing of the runtime. Tested by
``tests/distributed/test_runtime_fuzz.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.mesh import Mesh
from megamuon.optim import SgdConfig
from megamuon.runtime import RuntimeConfig, shard
from megamuon.runtime.config import OptimizerSettings
from tools.fuzz_trials import BOTTOM, Action, Block, Call, Model, Trial, build, inputs

F64 = torch.float64
LR = 0.002  # so small that no trial diverges
MOMENTUM = 0.9
TOLERANCE = 1e-9
REFUSAL = (
    "of which nothing trains"  # of a gradient that comes to a layer that is not gathered again
)
SPARE_GROUPS = 3  # layer groups alive at a time in an ordinary pass: computing, next, releasing


class MismatchError(AssertionError):
    """The runtime and plain autograd part."""


def run_trial(trial: Trial, rank: int, **settings: Any) -> None:
    """Run ``trial`` as ``rank`` of the default group, with further ``settings`` of RuntimeConfig.
    Raises MismatchError, or whatever fails.
    """
    pair = Pair(trial, rank, **settings)
    for number, actions in enumerate(trial.steps):
        ordinary = number == len(trial.steps) - 1
        watch = pair.watch() if ordinary else None
        for action in actions:
            pair.act(action)
        pair.step(number)
        if watch is not None:
            pair.check_resident(watch)
    pair.compare_weights()
    pair.runtime.close()


class Pair:
    """The model under the runtime, and a whole one."""

    def __init__(self, trial: Trial, rank: int, **settings: Any) -> None:
        self.trial, self.rank, self.forwards = trial, rank, 0
        self.model = build(trial)
        self.plain = build(trial)
        self.runtime = _shard(trial, rank, self.model, settings)
        self.trainable = {n: p for n, p in self.plain.named_parameters() if p.requires_grad}
        self._reached: set[str] = set()
        self._watch_frozen()
        self.optimizer = torch.optim.SGD(self.trainable.values(), lr=LR, momentum=MOMENTUM)

    # --- actions ---------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Do it on both models, and compare what they compute."""
        call, where = action.calls[self.rank], str(action)
        self.forwards += 1
        tokens, offset = inputs(self.trial, self.rank, self.forwards)
        if action.kind == "probe":
            with torch.no_grad():
                block = call.order[0]
                found, wanted = (m.blocks[block](offset) for m in (self.model, self.plain))
                pairs = zip(
                    *(o if isinstance(o, tuple) else (o,) for o in (found, wanted)), strict=True
                )
                for mine, right in pairs:
                    self._same(mine, right, where)
        elif action.kind == "evaluate":
            with torch.no_grad():
                found, wanted = (m(tokens, offset, call) for m in (self.model, self.plain))
            self._same(found, wanted, where)
        elif action.kind == "inputs":
            self._both(lambda model: _of_inputs(model, tokens, offset, call), where)
        elif action.kind == "fail":
            self._fail(action, tokens, offset)
        else:
            self._train(action.kind, call, tokens, offset, where)

    def _train(self, kind: str, call: Call, tokens: Tensor, offset: Tensor, where: str) -> None:
        def run(model: nn.Module) -> Tensor:
            out = model(tokens, offset, call)
            loss = out.square().mean()
            if kind == "double":
                loss = loss + model(tokens, offset * 0.5, call).square().mean()
            loss.backward(retain_graph=kind == "again")
            if kind == "again":
                loss.backward()
            return out.detach()

        with self.runtime.accumulate() if kind == "keep" else nullcontext():
            self._both(run, where)

    def _both(self, run: Callable[[nn.Module], Tensor], where: str) -> None:
        """What ``run`` gives for both models. The runtime must refuse, on this rank alone, where a
        gradient comes to a layer that the ranks agreed not to gather again; all forget theirs then.
        """
        self._reached.clear()
        wanted = run(self.plain)
        refused = None
        try:
            self._same(run(self.model), wanted, where)
        except RuntimeError as error:
            if REFUSAL not in str(error):
                raise
            refused = error
            self.runtime.engine.settle_passes()  # completes the pass that the others are still in
        due = self._refusals()
        if bool(due) != (refused is not None):
            raise MismatchError(f"{where}: gradients reach {due}, and the runtime said {refused}")
        anywhere = torch.tensor(float(bool(due)))
        if self.trial.frozen == BOTTOM:
            dist.all_reduce(anywhere)
        if anywhere:
            self.runtime.clear_gradients()
            self.optimizer.zero_grad()

    def _refusals(self) -> list[str]:
        if self.trial.line == "A" or self.trial.zero_stage == 1:
            return []
        return [g.name for g in self.runtime.groups if g.unread and g.name in self._reached]

    def _watch_frozen(self) -> None:
        """Note which frozen blocks of the plain model a gradient reaches."""
        for index, block in enumerate(self.plain.blocks):
            if not any(parameter.requires_grad for parameter in block.parameters()):
                block.register_forward_hook(
                    lambda _, __, out, name=f"blocks.{index}": self._listen(name, out)
                )

    def _listen(self, name: str, out: Any) -> None:
        for tensor in out if isinstance(out, tuple) else (out,):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._reached.add(name))

    def _fail(self, action: Action, tokens: Tensor, offset: Tensor) -> None:
        """Some ranks raise: nobody has a backward pass then, or all forget it."""
        call = action.calls[self.rank]
        way = next(c.fails for c in action.calls if c.fails)
        try:
            out = self.model(tokens, offset, call)
            if way == "backward":
                out.square().mean().backward()
        except ArithmeticError:
            assert call.fails
        except RuntimeError as error:
            if REFUSAL not in str(error):
                raise
        if way == "backward":
            self.runtime.clear_gradients()
            self.optimizer.zero_grad()

    def step(self, number: int) -> None:
        """Update both, and compare the norms of the averaged gradients."""
        result = self.runtime.step(LR)
        norm = self._average()
        self._close(result.gradient_norm, norm, f"gradient norm of step {number}")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _average(self) -> float:
        """Average the plain gradients over the ranks; what no rank touched stays None."""
        for parameter in self.trainable.values():
            used = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(used)
            if used:
                total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(total)
                parameter.grad = total / self.trial.ranks
        found = [p.grad for p in self.trainable.values() if p.grad is not None]
        return float(torch.stack([g.square().sum() for g in found]).sum().sqrt()) if found else 0.0

    # --- comparisons -----------------------------------------------------------------------------

    def compare_weights(self) -> None:
        """All weights at the end."""
        plain = dict(self.plain.named_parameters(remove_duplicate=False))
        for name, whole in self.runtime.full_parameters():
            self._same(whole, plain[name].detach(), f"weight {name} at the end")

    def watch(self) -> list[int]:
        """Count layers whose groups are alive; the list's first entry is the most at a time."""
        most, alive = [0], set()
        groups = self.runtime.groups if self.trial.line != "A" else ()
        layers = {group.index: group.key.module for group in groups}

        def seen(index: int, lives: bool) -> None:
            (alive.add if lives else alive.discard)(index)
            most[0] = max(most[0], len({layers[other] for other in alive}))

        for group in groups:
            # A pooled buffer tells the pool.
            if group.weights.watch is None and group.name.startswith("blocks."):
                group.weights.watch = lambda lives, index=group.index: seen(index, lives)
        return most

    def check_resident(self, most: list[int]) -> None:
        """An ordinary pass at ZeRO-3 holds a few layers at a time, whatever came before."""
        if self.trial.zero_stage == 3:
            further = self.runtime.config.schedule.prefetch_depth - 1
            allowed = SPARE_GROUPS + len(self.trial.shared) + max(0, further)
            if most[0] > allowed:
                raise MismatchError(f"{most[0]} layer groups alive at a time, {allowed} expected")

    def _same(self, found: Tensor, wanted: Tensor, where: str) -> None:
        scale = max(1.0, float(wanted.detach().abs().max()))
        worst = float((found.detach() - wanted.detach()).abs().max())
        if not worst <= TOLERANCE * scale:
            raise MismatchError(f"{where}: off by {worst!r} beside values up to {scale!r}")

    def _close(self, found: float, wanted: float, where: str) -> None:
        if not abs(found - wanted) <= TOLERANCE * max(1.0, abs(wanted)):
            raise MismatchError(f"{where}: {found!r}, plain autograd {wanted!r}")


def _of_inputs(model: nn.Module, tokens: Tensor, offset: Tensor, call: Call) -> Tensor:
    at = offset.clone().requires_grad_()
    return torch.autograd.grad(model(tokens, at, call).square().sum(), at)[0]


def _shard(trial: Trial, rank: int, model: Model, further: dict[str, Any]) -> Any:
    mesh = Mesh(
        world_size=trial.ranks,
        rank=rank,
        local_rank=rank,
        replicas=trial.replicas,
        shards=trial.ranks // trial.replicas,
        device=torch.device("cpu"),
        backend="gloo",
    )
    layers: tuple[type[nn.Module], ...] = (Block,)
    settings: dict[str, Any] = {
        "zero_stage": trial.zero_stage,
        "compute_dtype": F64,
        "reduce_dtype": F64,
        "master_dtype": F64,
        "ns_cost": "closed-form",
        "unit_threshold": 50,  # so small that every block has several owners
        "optimizer": OptimizerSettings(matrices="sgd", rest=SgdConfig(momentum=MOMENTUM), clip=0.0),
        **further,
    }
    if trial.line == "A":
        return fully_shard_model(model, layers=layers, config=RuntimeConfig(**settings), mesh=mesh)
    settings["check_collective_order"] = True
    settings["collectives"] = {"D": "ready", "M": "p2p"}.get(trial.line, "grouped")
    settings["owner_layout"] = trial.line != "B"
    return shard(model, layers=layers, config=RuntimeConfig(**settings), mesh=mesh)
