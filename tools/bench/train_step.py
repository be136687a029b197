"""Whole training step of lines C and D and of FSDP2: time by phase, memory, resident bytes.

Four systems train the same decoder from the same weights on the same tokens in one process group,
interleaved, in FP32 with gradient clipping:

  owner_muon   line C: matrices on owners, Muon, ZeRO-3, grouped collectives
  owner_adamw  line C with ``--optimizer adam``: the fair comparison with FSDP2
  fsdp2_adamw  line A: ``fully_shard`` per layer and root, ``torch.optim.AdamW``
  ready_muon   line D: as owner_muon, with operators in shared memory and a symmetric pool

at two settings: ``communication_heavy`` (few tokens against many parameters) and ``compute_heavy``
(Newton-Schulz is under 5 % of the step's FLOPs). A phase's time is the slowest rank's; ratios are
medians over repeats of the ratios inside one repeat; ``d_over_c``, ``d_over_a`` and ``c_over_a``
are those of whole steps of the lines. Timing starts when line D's pool is open. The backward phase
ends when all gradients are reduced, so the optimizer phase holds no gradient traffic. Resident
bytes are those of all distinct tensor storages that are reachable from a system between two steps;
the peak adds the most that torch's allocator held on top within a step, activations and
communication buffers included. Line D's pool and control memory count as resident, beside a plan
that has them and a formula that has not.

    python tools/bench/train_step.py --ranks 4 --json out.json

``--quick`` runs both settings with small sizes, to try the script; its figures mean nothing.
Tested by ``tests/tools/test_train_step.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from megamuon.console import run_script  # noqa: E402
from megamuon.ownership import OwnershipPlan  # noqa: E402
from tools.bench.common import count_collectives, run_bench_ranks, warn_if_busy  # noqa: E402
from tools.bench.footprint import (  # noqa: E402
    FP32,
    formula_bytes,
    peak_growth,
    plan_bytes,
    shared_of,
    storage_bytes,
)
from tools.bench.systems import (  # noqa: E402
    PHASES,
    SYSTEMS,
    Owners,
    Setting,
    System,
    step_flops,
    timed,
    train,
)
from tools.figures import add_json_flag, write_json  # noqa: E402

WARM_UP = 3  # steps: orders freeze, optimizer state is made, line D opens its pool and fills tables
SETTINGS = {
    "communication_heavy": Setting(layers=12, hidden=256, ffn=768, sequences=1, positions=32),
    "compute_heavy": Setting(layers=4, hidden=192, ffn=512, sequences=24, positions=256),
}
QUICK = {
    "communication_heavy": Setting(layers=4, hidden=64, ffn=192, sequences=1, positions=16),
    "compute_heavy": Setting(layers=2, hidden=64, ffn=192, sequences=16, positions=128),
}


def memory_step(system: System, tokens: Tensor) -> dict[str, Any]:
    """Untimed steps under watch: peak of the tensors, the runtime's own bytes, collectives.

    ``peak_runtime_bytes`` is the largest total of ``Runtime.memory()`` at the start of each layer's
    forward, after the forward, at each gradient of the backward, and after the step.
    """
    totals: list[int] = []
    handles = []
    if isinstance(system, Owners):
        runtime = system.runtime

        def sample(*_: object) -> None:
            totals.append(sum(runtime.memory().values()))

        layers = system.model.model.layers
        handles = [layer.register_forward_pre_hook(sample) for layer in layers]
        handles += [system.model.register_forward_hook(sample)]
        parameters = system.model.parameters()
        handles += [p.register_post_accumulate_grad_hook(sample) for p in parameters]
    resident = resident_bytes(system)
    growth = peak_growth(lambda: train(system, tokens))
    if isinstance(system, Owners):
        totals.append(sum(system.runtime.memory().values()))
    for handle in handles:
        handle.remove()
    with count_collectives() as counted:
        train(system, tokens)
    return {
        "resident_bytes": resident,
        "growth_bytes": growth,
        "peak_runtime_bytes": max(totals) if totals else None,
        "collectives": counted,
    }


def resident_bytes(system: System) -> int:
    """Bytes of all storages of a system, and of the segments that it shares on the host fabric."""
    if not isinstance(system, Owners):
        return storage_bytes(system.tensors())
    shared = shared_of(system.runtime)
    return storage_bytes(system.tensors(), shared.pool_at) + shared.pool + shared.control


def planned_bytes(system: Owners, rank: int) -> int:
    """What the ownership plan gives ``rank``, and what line D's pool adds by its own plan."""
    runtime = system.runtime
    planned, shared = plan_bytes(runtime.plan, rank), shared_of(runtime)
    if runtime.opened is None:
        return planned + shared.control
    return planned + runtime.opened.plan.total - shared.sharded + shared.control


def work(rank: int, world: int, settings: dict[str, Setting], repeats: int) -> dict[str, Any]:
    """All settings on one rank."""
    torch.set_num_threads(1)
    # FSDP2 warns of in-place operations on a model output that is a view; nobody does any here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    return {name: run_setting(rank, world, setting, repeats) for name, setting in settings.items()}


def run_setting(rank: int, world: int, setting: Setting, repeats: int) -> dict[str, Any]:
    """Times, losses and memory of all systems; times and losses are equal on all ranks."""
    systems = {name: build(setting) for name, build in SYSTEMS.items()}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    losses: dict[str, list[float]] = {name: [] for name in systems}
    order = list(systems)
    for step in range(WARM_UP + repeats):
        for name in order:
            seconds, loss = timed(systems[name], setting.tokens(rank, step))
            losses[name].append(loss)
            if step >= WARM_UP:
                times[name].append(seconds)
        order = order[1:] + order[:1]  # nobody always runs after the same other
    memory = {
        name: memory_step(system, setting.tokens(rank, WARM_UP + repeats))
        for name, system in systems.items()
    }
    owners = {name: s.runtime.plan for name, s in systems.items() if isinstance(s, Owners)}
    for name, plan in owners.items():
        memory[name]["formula_bytes"] = formula_bytes(plan.parameters, world)
        memory[name]["plan_bytes"] = planned_bytes(systems[name], rank)
    _refuse_grouped_calls(systems["ready_muon"])
    for system in systems.values():
        system.close()
    elements = sum(p.numel for p in owners["owner_muon"].parameters)
    memory["fsdp2_adamw"]["formula_bytes"] = 3 * FP32 * elements / world
    model_flops, ns_flops = step_flops(setting, world, owners["owner_muon"])
    return {
        "parameters": elements,
        "tokens_per_step": world * setting.sequences * setting.positions,
        "newton_schulz_share": ns_flops / (model_flops + ns_flops),
        "busiest_owner_over_mean": _busiest_over_mean(owners["owner_muon"]),
        "times": times,
        "losses": losses,
        "memory": memory,
    }


def _refuse_grouped_calls(system: Owners) -> None:
    """Times of a line D that fell back to grouped calls would be line C's under another name."""
    runtime = system.runtime
    if runtime.mesh.places > 1 and runtime.opened is None:
        raise RuntimeError(f"the symmetric pool never opened: {'; '.join(runtime.notes())}")


def _busiest_over_mean(plan: OwnershipPlan) -> float:
    """Newton-Schulz time of the busiest owner over the mean, by the plan's costs."""
    loads = [0.0] * plan.topology.world
    for owner, cost in zip(plan.owners, plan.costs, strict=True):
        loads[owner] += cost
    return max(loads) * len(loads) / sum(loads)


def summary(ranks: list[dict[str, Any]], setting: Setting) -> dict[str, Any]:
    """One setting's results of all ranks as the figures that are printed and written."""
    first = ranks[0]
    times: dict[str, list[dict[str, float]]] = first["times"]
    muon, adamw, fsdp2, ready = (times[name] for name in SYSTEMS)
    losses = first["losses"]
    pairs = zip(losses["owner_adamw"], losses["fsdp2_adamw"], strict=True)
    return {
        **vars(setting),
        "parameters": first["parameters"],
        "tokens_per_step": first["tokens_per_step"],
        "newton_schulz_share": first["newton_schulz_share"],
        "busiest_owner_over_mean": first["busiest_owner_over_mean"],
        "seconds": {
            name: {phase: statistics.median(s[phase] for s in steps) for phase in PHASES}
            for name, steps in times.items()
        },
        "step_ratio_muon_vs_adamw": ratio(muon, adamw),
        "step_ratio_vs_fsdp2_adamw": ratio(muon, fsdp2),
        "step_ratio_adamw_vs_fsdp2_adamw": ratio(adamw, fsdp2),
        "d_over_c": ratio(ready, muon),
        "d_over_a": ratio(ready, fsdp2),
        "c_over_a": ratio(muon, fsdp2),
        "losses": losses,
        "largest_loss_difference_d_and_c": max(
            abs(a - b) for a, b in zip(losses["ready_muon"], losses["owner_muon"], strict=True)
        ),
        "largest_loss_difference_adamw": max(abs(a - b) for a, b in pairs),
        "memory": {name: memory_summary([r["memory"][name] for r in ranks]) for name in SYSTEMS},
    }


def ratio(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Median over repeats of the ratio of step times: drifts of the machine hit both alike."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(a["total"] / b["total"] for a, b in pairs)


def memory_summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over ranks, ratios to formula and plan, and the worst rank's peaks."""
    resident = statistics.mean(r["resident_bytes"] for r in ranks)
    peaks = [r["peak_runtime_bytes"] for r in ranks]
    found = {
        "resident_bytes_mean": resident,
        "resident_bytes_of_ranks": [r["resident_bytes"] for r in ranks],
        "formula_bytes": ranks[0]["formula_bytes"],
        "resident_bytes_over_formula": resident / ranks[0]["formula_bytes"],
        "peak_bytes_worst_rank": max(r["resident_bytes"] + r["growth_bytes"] for r in ranks),
        "peak_runtime_bytes_worst_rank": None if None in peaks else max(peaks),
        "collectives": ranks[0]["collectives"],
    }
    if "plan_bytes" in ranks[0]:
        # The rank that is farthest from its plan, above or below.
        over = [r["resident_bytes"] / r["plan_bytes"] for r in ranks]
        found["resident_bytes_over_plan"] = max(over, key=lambda value: abs(value - 1))
    return found


def document_of(settings: dict[str, Any], ranks: int, repeats: int, quick: bool) -> dict[str, Any]:
    """The whole result; the figures at the top are those of the aims."""
    compute = settings["compute_heavy"]
    owners = [s["memory"][n] for s in settings.values() for n in ("owner_muon", "owner_adamw")]

    def farthest(key: str) -> float:
        return max((memory[key] for memory in owners), key=lambda value: abs(value - 1))

    over_plan = [s["memory"]["ready_muon"]["resident_bytes_over_plan"] for s in settings.values()]

    return {
        "ranks": ranks,
        "repeats": repeats,
        "quick": quick,
        "step_ratio_muon_vs_adamw": compute["step_ratio_muon_vs_adamw"],
        "step_ratio_vs_fsdp2_adamw": compute["step_ratio_vs_fsdp2_adamw"],
        **{
            key: {name: entry[key] for name, entry in settings.items()}
            for key in ("d_over_c", "d_over_a", "c_over_a")
        },
        "resident_bytes_over_formula": farthest("resident_bytes_over_formula"),
        "resident_bytes_over_plan": farthest("resident_bytes_over_plan"),
        "line_d_resident_bytes_over_plan": max(over_plan, key=lambda value: abs(value - 1)),
        "settings": settings,
    }


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f}"


def print_setting(name: str, entry: dict[str, Any]) -> None:
    """One setting's table."""
    print(
        f"\n{name}: {entry['parameters'] / 1e6:.2f} M parameters, {entry['tokens_per_step']} tokens"
        f" per step; Newton-Schulz is {entry['newton_schulz_share']:.1%} of the FLOPs,"
        f" busiest owner {entry['busiest_owner_over_mean']:.2f} x the mean"
    )
    heads = ("forward", "backward", "optim.", "step s", "resident", "formula", "peak MiB")
    print("  " + " " * 12 + "".join(f"{head:>10}" for head in heads))
    for system, seconds in entry["seconds"].items():
        memory = entry["memory"][system]
        cells = [f"{seconds[phase]:.4f}" for phase in PHASES]
        keys = ("resident_bytes_mean", "formula_bytes", "peak_bytes_worst_rank")
        cells += [_mib(memory[key]) for key in keys]
        print(f"  {system:<12}" + "".join(f"{cell:>10}" for cell in cells))
    print(
        f"  step: owner_muon is {entry['step_ratio_muon_vs_adamw']:.3f} x owner_adamw,"
        f" {entry['step_ratio_vs_fsdp2_adamw']:.3f} x fsdp2_adamw;"
        f" owner_adamw is {entry['step_ratio_adamw_vs_fsdp2_adamw']:.3f} x fsdp2_adamw"
    )
    print(
        f"  step: line D is {entry['d_over_c']:.3f} x line C (ready_muon over owner_muon),"
        f" {entry['d_over_a']:.3f} x line A (fsdp2_adamw); line C is {entry['c_over_a']:.3f} x A"
    )
    print(
        "  losses of owner_adamw and fsdp2_adamw agree to"
        f" {entry['largest_loss_difference_adamw']:.1e};"
        f" runtime's own bytes peak at"
        f" {_mib(entry['memory']['owner_muon']['peak_runtime_bytes_worst_rank'])} MiB"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the settings and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=4, help="Gloo ranks on this machine")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps per system")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    add_json_flag(parser, __file__)
    options = parser.parse_args(argv)
    warn_if_busy()
    settings = QUICK if options.quick else SETTINGS
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_bench_ranks(work, options.ranks, settings, options.repeats, folder=Path(folder))
    entries = {
        name: summary([rank[name] for rank in ranks], setting) for name, setting in settings.items()
    }
    document = document_of(entries, options.ranks, options.repeats, options.quick)
    print(f"training step, {options.ranks} ranks, medians of {options.repeats}, slowest rank")
    for name, entry in entries.items():
        print_setting(name, entry)
    print(
        "\nresident bytes, farthest from 1: "
        f"mean over ranks {document['resident_bytes_over_formula']:.4f} x formula,"
        f" worst rank {document['resident_bytes_over_plan']:.4f} x its plan;"
        f" line D's {document['line_d_resident_bytes_over_plan']:.4f} x its plan"
    )
    write_json(options.json, __file__, document)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
