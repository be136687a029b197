"""Optimizer step on owners against the two ways to run Muon on FSDP2 shards.

Four systems train the same stack of linear layers in one process group, interleaved, with one
formula (the standard Newton-Schulz form, Polar Express coefficients, FP32), so that only the
distribution differs:

  owners        this runtime, line C: every matrix is updated once, by its owner
  owners_m      line M: the same with MatrixFSDP's planner, which gives owners single matrices by
                their size, and segments sent from owner to rank
  fsdp2_muon    the iteration on FSDP2 ``DTensor``s, as ``torch.optim.Muon`` runs it: every product
                is a DTensor operation
  gather_once   one all-gather of all momenta, then Newton-Schulz of every matrix on every rank

With ``--stock``, ``torch.optim.Muon`` itself (BF16) is timed beside them on the small setting, for
information: BF16 is emulated on most CPUs, which would flatter us. Collectives inside our step are
counted as torch dispatches them. ``--ranks`` takes a list: every number of ranks is run, the result
of each is under ``by_ranks``, and the figures at the top are those of the last.

    python tools/bench/optimizer_step.py --ranks 2,4,8 --json out.json

Tested by ``tests/tools/test_optimizer_step.py``.
"""

from __future__ import annotations

import abc
import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from megamuon.optim.coefficients import coefficient_set  # noqa: E402
from megamuon.optim.muon import MuonConfig  # noqa: E402
from megamuon.optim.newton_schulz import NewtonSchulzConfig  # noqa: E402
from megamuon.ownership import PlannerSettings  # noqa: E402
from megamuon.runtime import OptimizerSettings, RuntimeConfig, shard  # noqa: E402
from tools.bench.common import count_collectives, run_bench_ranks, warn_if_busy  # noqa: E402

LR, WD, MOMENTUM = 1e-3, 0.1, 0.95
SETTINGS = {
    # name: (layers, [(out, in) of each layer's matrices])
    "many_small": (12, [(128, 128), (128, 128), (256, 128), (128, 256)]),
    "few_large": (4, [(1024, 1024), (1024, 1024)]),
}


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


def timed(system: System, rank: int, step: int) -> float:
    """Seconds of one optimizer step, the slowest rank's."""
    system.backward(rank, step)
    dist.barrier()
    start = time.perf_counter()
    system.step()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def work(
    rank: int,
    world: int,
    settings: dict[str, tuple[int, list[tuple[int, int]]]],
    repeats: int,
    stock: bool,
) -> dict[str, object]:
    """All settings on one rank; rank 0's result is used."""
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    kinds: dict[str, Callable[..., System]] = {
        "owners": Owners,
        "owners_m": OwnersM,
        "fsdp2_muon": Fsdp2,
        "gather_once": GatherOnce,
    }
    for name, (layers, shapes) in settings.items():
        systems = {kind: build(layers, shapes) for kind, build in kinds.items()}
        for index, system in enumerate(systems.values()):
            timed(system, rank, index)  # warm-up, on different data
        times: dict[str, list[float]] = {kind: [] for kind in systems}
        for step in range(repeats):
            for kind, system in systems.items():
                times[kind].append(timed(system, rank, 10 + step))
        systems["owners"].backward(rank, 99)
        with count_collectives() as counted:
            systems["owners"].step()
        medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
        entry: dict[str, object] = {
            "matrices": layers * len(shapes),
            "shapes": [list(shape) for shape in shapes],
            "seconds": medians,
            "speedup_vs_fsdp2_muon": medians["fsdp2_muon"] / medians["owners"],
            "speedup_vs_gather_once": medians["gather_once"] / medians["owners"],
            "line_c_over_fsdp2_muon": ratio(times["owners"], times["fsdp2_muon"]),
            "line_m_over_fsdp2_muon": ratio(times["owners_m"], times["fsdp2_muon"]),
            "collectives_in_our_step": counted,
            "largest_weight_difference": _difference(layers, shapes, kinds, rank),
        }
        if stock and name == "many_small":
            system = StockMuon(layers, shapes)
            seconds = timed(system, rank, 50)
            entry["stock_muon_seconds"] = seconds
            entry["line_c_over_stock_muon"] = medians["owners"] / seconds
            entry["line_m_over_stock_muon"] = medians["owners_m"] / seconds
        results[name] = entry
    return results


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over repeats of the ratio of times: drifts of the machine hit both alike."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _difference(
    layers: int, shapes: list[tuple[int, int]], kinds: dict[str, Callable[..., System]], rank: int
) -> float:
    """After one step from equal weights and gradients, how far the systems are apart: they compute
    the same.
    """
    ends = []
    for build in kinds.values():
        system = build(layers, shapes)
        system.backward(rank, 7)
        system.step()
        ends.append([w.detach().clone() for w in system.weights()])
    return max(
        float((a - b).abs().max())
        for other in ends[1:]
        for a, b in zip(ends[0], other, strict=True)
    )


def run(ranks: int, repeats: int, stock: bool) -> dict[str, Any]:
    """The result of one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_bench_ranks(work, ranks, SETTINGS, repeats, stock, folder=Path(folder))[0]
    norm_scalars = 1  # the one collective that a step may have on FSDP without TP
    counted = max(sum(r["collectives_in_our_step"].values()) for r in results.values())
    return {
        "ranks": ranks,
        "repeats": repeats,
        "settings": results,
        "speedup_vs_fsdp2_muon": min(r["speedup_vs_fsdp2_muon"] for r in results.values()),
        "speedup_vs_gather_once": min(r["speedup_vs_gather_once"] for r in results.values()),
        "line_c_over_fsdp2_muon": max(r["line_c_over_fsdp2_muon"] for r in results.values()),
        "line_m_over_fsdp2_muon": max(r["line_m_over_fsdp2_muon"] for r in results.values()),
        "optimizer_collectives": counted - norm_scalars,
    }


def print_document(document: dict[str, Any]) -> None:
    """The table of one number of ranks."""
    print(
        f"optimizer step, {document['ranks']} ranks, median of {document['repeats']} (seconds)",
        flush=True,
    )
    for name, entry in document["settings"].items():
        seconds = "  ".join(f"{kind} {value:.4f}" for kind, value in entry["seconds"].items())
        print(
            f"  {name:<11} {entry['matrices']:>3} matrices  {seconds}"
            f"  | owners are {entry['speedup_vs_fsdp2_muon']:.2f} x fsdp2_muon,"
            f" {entry['speedup_vs_gather_once']:.2f} x gather_once;"
            f" weights agree to {entry['largest_weight_difference']:.1e}"
        )
        print(
            f"              time over fsdp2_muon: line C {entry['line_c_over_fsdp2_muon']:.3f},"
            f" line M {entry['line_m_over_fsdp2_muon']:.3f}"
        )
        if "stock_muon_seconds" in entry:
            print(
                f"              torch.optim.Muon (BF16): {entry['stock_muon_seconds']:.3f};"
                f" over it line C {entry['line_c_over_stock_muon']:.3f},"
                f" line M {entry['line_m_over_stock_muon']:.3f}"
            )
    print(f"collectives in our step beyond the norm scalar: {document['optimizer_collectives']}")


def rank_counts(text: str) -> list[int]:
    """``2,4,8``.  Raises ArgumentTypeError for what the settings cannot run on."""
    rows = min(out for _, shapes in SETTINGS.values() for out, _ in shapes)
    found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    for count in found:
        if count < 1 or rows % count:  # gather_once cuts matrices into equal shards
            raise argparse.ArgumentTypeError(
                f"{text}: choose divisors of {rows}, the fewest rows of a matrix"
            )
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the settings and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--ranks", type=rank_counts, default=[4], help="Gloo ranks on this machine, or a list")
    add("--repeats", type=int, default=5, help="timed steps per system")
    add("--stock", action="store_true", help="time torch.optim.Muon (BF16) too")
    add("--json", type=Path, help="write the result there")
    options = parser.parse_args(argv)
    warn_if_busy()
    found: dict[str, dict[str, Any]] = {}
    for ranks in options.ranks:
        found[str(ranks)] = run(ranks, options.repeats, options.stock)
        print_document(found[str(ranks)])
    if options.json:
        document = {**found[str(options.ranks[-1])], "by_ranks": found}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
