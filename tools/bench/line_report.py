"""What ``lines.py`` makes of the ranks' measurements: figures, checks, a table, a chart.

Owns the meaning of every key in the bench's JSON. Invariant: pure but for the file that the chart
is written to; a figure that is off its formula is a sentence in ``breaches``, which decides the
exit status. Tested by ``tests/tools/test_lines.py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megamuon.ownership.estimate import RESIDENT, Key
from tools.bench.line_ranks import CLASSES, PHASES

BYTES_WITHIN = 0.01  # of the closed form: traffic
RESIDENT_WITHIN = 0.02  # of the closed form: mean over ranks
PLAN_WITHIN = 0.001  # of its plan: each rank
# Kinds of traffic without a closed form.
FREE = (
    "norm",
    "pass_end",
    "tp_activations",
)
IN_THE_STEP = {*FREE, "publish", "tp_matrices"}  # what an owner's optimizer step may send

Ranks = Sequence[Mapping[str, Any]]  # one line's measurements of all ranks


def figures(ranks: Ranks) -> dict[str, Any]:
    """One line's figures: bytes summed over ranks, times of the slowest rank of each step."""
    slowest = [max(step, key=lambda s: s["step"]) for step in zip(*_steps(ranks), strict=True)]
    medians = {
        f"{name}_ms": statistics.median(step[name] for step in slowest) * 1e3
        for name in ("step", *PHASES, "optimizer_with_waits")
    }
    return {
        **medians,
        **_traffic(ranks),
        **_resident(ranks),
        **_pool(ranks),
        "peak_bytes_worst_rank": max(rank["peak"] for rank in ranks),
        "collectives": ranks[0]["collectives"],
        "losses": ranks[0]["losses"],
    }


def _steps(ranks: Ranks) -> list[list[dict[str, float]]]:
    return [rank["steps"] for rank in ranks]


def _traffic(ranks: Ranks) -> dict[str, Any]:
    formula: dict[Key, int] = ranks[0]["traffic_formula"]
    sent, wire = (_over_ranks(rank[name] for rank in ranks) for name in ("sent", "wire"))
    over = {
        " ".join(key): sent.get(key, 0) / formula[key] if key in formula else float("inf")
        for key in {**formula, **sent}
        if key in formula or (sent[key] and key[0] not in FREE)
    }
    step = sorted({kind for rank in ranks for kind in rank["optimizer_step_sent"]})
    return {
        "bytes_over_formula": farthest(over.values()),
        "bytes_over_formula_by_kind": over,
        "bytes": {name: sum(n for (_, c), n in sent.items() if c == name) for name in CLASSES},
        "bytes_on_the_wire": {
            name: sum(n for (_, c), n in wire.items() if c == name) for name in CLASSES
        },
        "bytes_by_kind": {" ".join(key): nbytes for key, nbytes in sent.items() if nbytes},
        "bytes_formula_by_kind": {" ".join(key): nbytes for key, nbytes in formula.items()},
        "bytes_padding": sum(formula.values()) - sum(ranks[0]["traffic_formula_unpadded"].values()),
        "bytes_in_optimizer_step": {
            kind: sum(rank["optimizer_step_sent"].get(kind, 0) for rank in ranks) for kind in step
        },
    }


def _over_ranks(ranks: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total: dict[Key, int] = {}
    for rank in ranks:
        for key, nbytes in rank.items():
            total[key] = total.get(key, 0) + nbytes
    return total


def _resident(ranks: Ranks) -> dict[str, Any]:
    formula: dict[str, float] = ranks[0]["resident_formula"]
    mean = {
        kind: statistics.fmean(rank["resident"][kind] for rank in ranks)
        for kind in ranks[0]["resident"]
    }
    over_plan = [
        rank["resident"][kind] / rank["resident_plan"][kind]
        for rank in ranks
        for kind in RESIDENT
        if rank["resident_plan"][kind]
    ]
    return {
        "resident_bytes_over_formula": sum(mean[k] for k in RESIDENT) / sum(formula.values()),
        "resident_bytes_over_formula_by_kind": {
            kind: mean[kind] / formula[kind] for kind in RESIDENT if formula[kind]
        },
        "resident_bytes_over_plan": farthest(over_plan),
        "resident_bytes_mean": mean,
        "resident_bytes_formula": formula,
        "resident_bytes_of_ranks": [rank["resident"] for rank in ranks],
        "memory_of_ranks": [rank["memory"] for rank in ranks],
    }


def _pool(ranks: Ranks) -> dict[str, Any]:
    """Line D's pool, equal on all ranks; and all that a rank keeps over the closed form, which has
    no pool: parameters, gradients, state, pool and control memory.
    """
    pools = [rank["pool"] for rank in ranks]
    if pools[0] is None:
        return {}
    formula = sum(ranks[0]["resident_formula"].values())
    kept = (*RESIDENT, "pool", "control")
    mean = statistics.fmean(sum(rank["resident"][kind] for kind in kept) for rank in ranks)
    closed = [pool for pool in pools if not pool["open"]]
    found = {"pool": (closed or pools)[0], "resident_bytes_with_pool_over_formula": mean / formula}
    if not closed:
        over = (pool["bytes"] / pool["plan_bytes"] for pool in pools)
        found["pool_bytes_over_plan"] = farthest(over)
        kinds = (sum(pool["by_kind"].values()) / pool["bytes"] for pool in pools)
        found["pool_kinds_over_bytes"] = farthest(kinds)
    return found


def farthest(ratios: Any) -> float:
    """The ratio that is farthest from 1; 1 of none."""
    return max(ratios, key=lambda value: abs(value - 1), default=1.0)


def breaches(line: str, found: Mapping[str, Any]) -> list[str]:
    """What of a line's figures is not as formulas and plan say, in words."""
    wrong = [
        f"line {line}: {kind} sends {ratio:.4f} times its formula"
        for kind, ratio in found["bytes_over_formula_by_kind"].items()
        if abs(ratio - 1) > BYTES_WITHIN
    ]
    mean = {"resident bytes": found["resident_bytes_over_formula"]}
    for kind, ratio in (mean | found["resident_bytes_over_formula_by_kind"]).items():
        if abs(ratio - 1) > RESIDENT_WITHIN:
            wrong.append(f"line {line}: {kind} take {ratio:.4f} times their formula")
    if abs(found["resident_bytes_over_plan"] - 1) > PLAN_WITHIN:
        ratio = found["resident_bytes_over_plan"]
        wrong.append(f"line {line}: a rank holds {ratio:.4f} times its plan")
    for kind in ("transient", "unaccounted"):
        if most := max(rank[kind] for rank in found["resident_bytes_of_ranks"]):
            wrong.append(f"line {line}: {most} {kind} bytes on a rank between passes")
    if "pool" in found:
        wrong += _pool_breaches(line, found)
    allowed = IN_THE_STEP | ({"matrix_gather"} if line == "B" else set())
    for kind in sorted(set(found["bytes_in_optimizer_step"]) - allowed):
        wrong.append(f"line {line}: the optimizer step sends {kind}")
    return wrong


def _pool_breaches(line: str, found: Mapping[str, Any]) -> list[str]:
    if "pool_bytes_over_plan" not in found:
        notes = "; ".join(found["pool"]["notes"])
        return [f"line {line}: the symmetric pool is not open on a rank: {notes}"]
    wrong = []
    if (ratio := found["pool_bytes_over_plan"]) != 1:
        wrong.append(f"line {line}: the pool takes {ratio:.4f} times its plan")
    if (ratio := found["pool_kinds_over_bytes"]) != 1:
        wrong.append(f"line {line}: the pool's kinds add up to {ratio:.4f} times the pool")
    return wrong


def over_line(measured: Mapping[str, Ranks], base: str, phase: str) -> dict[str, float]:
    """A phase's time over line ``base``'s: medians over steps of ratios of the slowest ranks, so
    that a drift of the machine hits both alike.
    """
    if base not in measured:
        return {}
    times = {
        line: [max(s[phase] for s in step) for step in zip(*_steps(ranks), strict=True)]
        for line, ranks in measured.items()
    }
    return {
        line: statistics.median(a / b for a, b in zip(mine, times[base], strict=True))
        for line, mine in times.items()
    }


# --- what people read ----------------------------------------------------------------------------


def table(lines: Mapping[str, Mapping[str, Any]]) -> str:
    """Times, bytes and memory of all lines."""
    heads = ("step", "forward", "backward", "optim.", "exposed", "publish")
    text = ["milliseconds, slowest rank, medians", _row("line", heads)]
    for line, found in lines.items():
        keys = ("step", *PHASES)
        text.append(_row(line, [f"{found[f'{key}_ms']:.1f}" for key in keys]))
    text += ["", "MiB sent per step, all ranks"]
    text.append(_row("line", ("in replicas", "across", "tp", "norm KiB", "/formula", "padding")))
    for line, found in lines.items():
        moved = [_mib(found["bytes"][name]) for name in CLASSES[:3]]
        moved.append(f"{found['bytes']['world'] / 1024:.1f}")
        moved += [f"{found['bytes_over_formula']:.4f}", _mib(found["bytes_padding"])]
        text.append(_row(line, moved))
    text += ["", "resident MiB per rank, mean; peak of a step, worst rank"]
    text.append(_row("line", ("weights", "gradients", "state", "sum", "/formula", "/plan", "peak")))
    for line, found in lines.items():
        held = [found["resident_bytes_mean"][kind] for kind in RESIDENT]
        ratios = (found["resident_bytes_over_formula"], found["resident_bytes_over_plan"])
        cells = [*map(_mib, (*held, sum(held))), *(f"{ratio:.4f}" for ratio in ratios)]
        text.append(_row(line, [*cells, _mib(found["peak_bytes_worst_rank"])]))
    text += [_wire_text(line, found) for line, found in lines.items() if line == "A"]
    text += [_pool_text(line, found) for line, found in lines.items() if "pool" in found]
    return "\n".join(text)


def _wire_text(line: str, found: Mapping[str, Any]) -> str:
    """What line A's times mean: on CPUs its library does more than it does on GPUs."""
    needed, wire = (sum(found[key].values()) for key in ("bytes", "bytes_on_the_wire"))
    return (
        f"line {line} on Gloo: reduce_scatter_tensor moves an all-reduce's bytes, so"
        f" {_mib(wire)} MiB are sent where {_mib(needed)} are needed, and FSDP2 gathers"
        " synchronously on CPUs: its times say little about NCCL"
    )


def _pool_text(line: str, found: Mapping[str, Any]) -> str:
    pool = found["pool"]
    if not pool["open"]:
        return f"line {line}: no pool"
    kinds = ", ".join(f"{kind} {_mib(size)}" for kind, size in pool["by_kind"].items() if size)
    left_out = len(pool["groups_left_out"])
    return (
        f"line {line} keeps a pool of {_mib(pool['bytes'])} MiB ({kinds}), where its buffers alone"
        f" would take {_mib(pool['unshared_bytes'])}, and {_mib(pool['control_bytes'])} MiB of"
        f" control memory: in all {found['resident_bytes_with_pool_over_formula']:.4f} x formula"
        + (f"; {left_out} groups are left out" if left_out else "")
    )


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<6}" + "".join(f"{cell:>11}" for cell in cells)


def _mib(count: float) -> str:
    return f"{count / 2**20:.2f}"


def plotting() -> Any:
    """matplotlib's figure class. Raises RuntimeError with what to do where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "--png needs matplotlib, which is not installed: pip install matplotlib, or leave"
            " --png out"
        ) from error
    return Figure


def _scaled(found: Mapping[str, Any]) -> dict[str, float]:
    total = sum(found[f"{phase}_ms"] for phase in PHASES)
    return {phase: found[f"{phase}_ms"] * found["step_ms"] / total for phase in PHASES}


def chart(lines: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Stacked bars: the whole step of every line on the left, what is no computation on the right
    (as the paper's Figure 10). Medians of phases are scaled to add up to the median step.
    """
    figure = plotting()(figsize=(9, 4.5), layout="constrained")
    whole, rest = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = dict(zip(PHASES, ("#4c72b0", "#8fb0d9", "#55a868", "#dd8452", "#c44e52"), strict=True))
    scaled = {line: _scaled(found) for line, found in lines.items()}
    for axes, phases in ((whole, PHASES), (rest, PHASES[3:])):
        bottom = dict.fromkeys(lines, 0.0)
        for phase in phases:
            heights = [scaled[line][phase] for line in lines]
            axes.bar(
                list(lines),
                heights,
                bottom=list(bottom.values()),
                width=0.6,
                color=colors[phase],
                label=phase.replace("_", " "),
            )
            bottom = {line: bottom[line] + scaled[line][phase] for line in lines}
        for place, total in enumerate(bottom.values()):
            axes.text(place, total, f"{total:.0f}", ha="center", va="bottom", fontsize=9)
        axes.set_xlabel("line")
        axes.set_ylim(0, 1.12 * max(bottom.values()) or 1)
        axes.spines[["top", "right"]].set_visible(False)
    whole.set_ylabel("ms per step, slowest rank")
    whole.set_title("whole step", fontsize=10)
    rest.set_title("waiting", fontsize=10)
    figure.suptitle(title, fontsize=11)
    handles, names = whole.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
