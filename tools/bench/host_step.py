"""Host work of one training step by part, on a model of very many very small parameters.

Shapes are tiny, so what is timed is what Python and torch do for each parameter, and not the
arithmetic: the parts that grow with the number of parameters stand out. Owners' and FSDP2's step,
one process:

    python tools/bench/host_step.py --parameters 70000
    python tools/bench/host_step.py --parameters 20000 --line A --profile

``--profile`` adds the functions with most time of their own in ``runtime.step``.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megamuon.baselines.fully_sharded import fully_shard_model
from megamuon.console import run_script
from megamuon.runtime import OptimizerSettings, RuntimeConfig, shard
from tools.figures import add_json_flag, write_json  # noqa: E402

WIDTH = 4
PER_LAYER = 500  # parameters: half of them matrices, half biases


class Layer(nn.Module):
    """Many small linear maps, one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count // 2))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.maps:
            x = x + each(x)
        return torch.tanh(x)


class Stack(nn.Module):
    """Layers to the wanted number of parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(PER_LAYER) for _ in range(max(1, parameters // PER_LAYER))
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    """Time forward, backward and step, and print them by the number of parameters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=70_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--line", choices=("A", "C"), default="C")
    parser.add_argument("--optimizer", choices=("muon", "adam", "sgd"), default="sgd")
    parser.add_argument("--profile", action="store_true")
    add_json_flag(parser, __file__)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Stack(arguments.parameters)
    count = sum(1 for _ in model.parameters())
    config = RuntimeConfig(
        zero_stage=2,
        collectives="grouped",
        optimizer=OptimizerSettings(matrices=arguments.optimizer),
    )
    make = fully_shard_model if arguments.line == "A" else shard
    started = time.process_time()
    runtime = make(model, layers=(Layer,), config=config)
    seconds: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    built = time.process_time() - started
    profile = cProfile.Profile()
    inputs = torch.randn(2, WIDTH)
    for step in range(arguments.steps + 1):
        marks = [time.process_time()]
        loss = runtime.model(inputs).square().mean()
        marks.append(time.process_time())
        loss.backward()
        marks.append(time.process_time())
        if arguments.profile and step:
            profile.enable()
        runtime.step(1e-6)
        profile.disable()
        marks.append(time.process_time())
        if step:  # the first one warms up
            for name, start, stop in zip(seconds, marks, marks[1:], strict=False):
                seconds[name].append(stop - start)
    best = {name: min(values) for name, values in seconds.items()}
    print(
        f"line {arguments.line}, {count} parameters, CPU seconds of the host, best of"
        f" {arguments.steps} (build {built:.2f} s)"
    )
    for name, value in best.items():
        print(f"  {name:9s} {value:8.3f} s  {value / count * 1e6:7.2f} us a parameter")
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(16)
    write_json(arguments.json, __file__, {"parameters": count, "build": built, **best})


if __name__ == "__main__":
    sys.exit(run_script(main))
