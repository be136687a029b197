"""All lines of the paper side by side: the step by phase, bytes by link class, resident bytes.

  A  torch's FSDP2 with AdamW
  B  even slices; momentum is gathered and every rank works on every matrix
  C  this runtime on torch's collectives: every matrix has one owner, on HSDP one in all replicas
  D  the same owners; operators in shared memory gather, reduce and publish, in a symmetric pool
  M  MatrixFSDP: owners on one replica at ZeRO-3, segments sent from owner to rank

train the same preset from the same weights on the same tokens in one process group, in turns. A
phase is the work of the slowest rank in it; time that a rank stands in a wait is exposed
communication, or publish wait where it waits for another replica's new weights. Bytes are counted
from the collective calls of a step and compared with the closed forms (``ownership/estimate.py``
states them), resident bytes with the paper's section 4.4 and with each rank's plan. Line D's pool
and control memory come on top of that section's forms; the pool is compared with its own plan.

    python tools/bench/lines.py --model tiny --ranks 4 --json out.json

Exit status: 0, or 1 where a figure breaches its formula. Tested by ``tests/tools/test_lines.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from megamuon.console import run_script  # noqa: E402
from megamuon.models import PRESETS  # noqa: E402
from tools.bench.common import run_bench_ranks, warn_if_busy  # noqa: E402
from tools.bench.line_ranks import Schedule, by_name, work  # noqa: E402
from tools.bench.line_report import (  # noqa: E402
    Ranks,
    breaches,
    chart,
    farthest,
    figures,
    over_line,
    plotting,
    table,
)
from tools.figures import add_json_flag, write_json  # noqa: E402
from tools.reference_training import Training  # noqa: E402
from tools.sharded_training import LINES, Case, not_applicable  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAMW = "C adamw"  # what ``by_name`` calls line C with AdamW beside line C
TIMEOUT = 3600.0  # seconds of the whole run


def add_case_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is trained on which grid."""
    add = parser.add_argument
    add("--model", default="tiny", help="a preset")
    add("--ranks", type=int, default=4, help="Gloo ranks on this machine")
    add("--sharding", choices=("fsdp", "hsdp"), default="fsdp")
    add("--shard-size", type=int, help="hsdp: shard ranks of a replica (default: two replicas)")
    add("--zero-stage", type=int, choices=(1, 2, 3), default=3)
    add("--tp", type=int, default=1, help="tensor-parallel ranks behind each shard rank")
    add("--optimizer", choices=("muon", "adam"), default="muon", help="of matrices; line A: adam")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of computing and gathers")
    add("--reduce-dtype", choices=tuple(DTYPES), default="fp32", help="of gradients on their way")
    add("--sequence", type=int, default=128, help="tokens of a sample")
    add("--micro-batch", type=int, default=2, help="samples of a data-parallel rank per step")


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_case_flags(parser)
    add = parser.add_argument
    add("--lines", default=",".join(LINES), help="which lines, by commas")
    add("--against", choices=("adamw",), help="line C once more with AdamW: what Muon costs a step")
    add("--rounds", type=int, default=9, help="turns of every line")
    add("--steps", type=int, default=1, help="recorded steps of a turn")
    add("--png", type=Path, help="write the stacked bars there (needs matplotlib)")
    add_json_flag(parser, __file__)
    return parser


def cases_of(
    options: argparse.Namespace, names: Sequence[str]
) -> tuple[list[Case], dict[str, str]]:
    """The cases to run of the lines in ``names``, and why others are not.  Raises ValueError naming
    the flag at fault.
    """
    if not names or len(set(names)) < len(names) or not set(names) <= set(LINES):
        raise ValueError(f"--lines {','.join(names)}: name some of {','.join(LINES)}, each once")
    if options.model not in PRESETS:
        raise ValueError(f"--model {options.model}: no such preset: {', '.join(PRESETS)}")
    for name in ("ranks", "tp", "sequence", "micro_batch", "rounds", "steps"):
        if getattr(options, name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")
    if options.ranks < 2 or options.ranks % options.tp:
        raise ValueError(f"--ranks {options.ranks}: at least 2, and a multiple of --tp")
    places = options.ranks // options.tp
    replicas = _replicas(options, places)
    training = Training(
        model=options.model,
        optimizer=options.optimizer,
        dtype=torch.float32,
        batch=options.micro_batch * places,
        length=options.sequence,
    )
    cases, reasons = [], {}
    for name in names:
        case = Case(
            line=name,
            replicas=replicas,
            shards=places // replicas,
            tp=options.tp,
            zero_stage=options.zero_stage,
            training=training,
        )
        if reason := not_applicable(case):
            reasons[name] = reason
        else:
            cases.append(case)
    if getattr(options, "against", None) is not None:
        cases += _against(options, cases)
    if not cases:
        raise ValueError(f"nothing to run: {'; '.join(reasons.values())}")
    return cases, reasons


def _against(options: argparse.Namespace, cases: Sequence[Case]) -> list[Case]:
    """Line C once more, with AdamW."""
    if options.optimizer != "muon" or not {"A", "C"} <= {case.line for case in cases}:
        raise ValueError("--against adamw sets Muon on line C beside AdamW: it needs lines A and C")
    return [
        replace(case, training=replace(case.training, optimizer="adam"))
        for case in cases
        if case.line == "C"
    ]


def _against_figures(measured: Mapping[str, Ranks], lines: dict[str, Any]) -> dict[str, Any]:
    """Muon's whole step over AdamW's on line C, both over FSDP2's; the ratios of resident bytes
    that are farthest from 1, over all lines; how far losses are apart that should be equal.
    """
    over_adamw, over_fsdp2 = (over_line(measured, base, "step") for base in (ADAMW, "A"))
    line_d = {}
    if "D" in lines:
        line_d = {
            "d_over_c": over_line(measured, "C", "step")["D"],
            "d_over_a": over_fsdp2["D"],
            "line_d_resident_bytes_over_plan": lines["D"]["resident_bytes_over_plan"],
            "largest_loss_difference_d_and_c": _apart(lines["D"], lines["C"]),
        }
    return {
        **line_d,
        "c_over_a": over_fsdp2["C"],
        "largest_loss_difference_adamw": _apart(lines[ADAMW], lines["A"]),
        "busiest_owner_over_mean": measured["C"][0]["busiest_owner_over_mean"],
        "step_ratio_muon_vs_adamw": over_adamw["C"],
        "step_ratio_vs_fsdp2_adamw": over_fsdp2["C"],
        "step_ratio_adamw_vs_fsdp2_adamw": over_fsdp2[ADAMW],
        **{
            key: farthest(found[key] for found in lines.values())
            for key in ("resident_bytes_over_formula", "resident_bytes_over_plan")
        },
    }


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))


def _replicas(options: argparse.Namespace, places: int) -> int:
    if options.sharding == "fsdp":
        if options.shard_size is not None:
            raise ValueError("--shard-size is for --sharding hsdp")
        return 1
    shards = options.shard_size or max(places // 2, 1)
    if shards < 1 or places % shards:
        raise ValueError(f"--shard-size {shards} does not divide {places} data-parallel ranks")
    return places // shards


def document_of(
    options: argparse.Namespace,
    cases: list[Case],
    reasons: dict[str, str],
    ranks: list[dict[str, Any]],
) -> dict[str, Any]:
    """The whole result."""
    measured = {name: [rank[name] for rank in ranks] for name in by_name(cases)}
    lines = {line: figures(of_ranks) for line, of_ranks in measured.items()}
    wrong = [text for line, found in lines.items() for text in breaches(line, found)]
    kept = ("model", "ranks", "sharding", "zero_stage", "tp", "optimizer", "dtype", "reduce_dtype")
    kept += ("sequence", "micro_batch", "rounds", "steps")
    return {
        **{name: getattr(options, name) for name in kept},
        "grid": f"{cases[0].replicas}x{cases[0].shards}",
        "parameters": ranks[0][cases[0].line]["elements"],
        "newton_schulz_share": max(ranks[0][name]["newton_schulz_share"] for name in measured),
        "load": os.getloadavg()[0],
        "lines": lines,
        "not_applicable": reasons,
        "step_over_line_c": over_line(measured, "C", "step"),
        "step_over_line_a": over_line(measured, "A", "step"),
        "optimizer_over_line_c": over_line(measured, "C", "optimizer_with_waits"),
        **(_against_figures(measured, lines) if ADAMW in measured else {}),
        "breaches": wrong,
        "passed": not wrong,
    }


def print_document(document: dict[str, Any]) -> None:
    """The table and what follows from it."""
    print(
        f"{document['model']}, {document['parameters'] / 1e6:.2f} M parameters,"
        f" {document['ranks']} ranks, {document['sharding']} {document['grid']},"
        f" tp {document['tp']}, ZeRO-{document['zero_stage']}, {document['dtype']}"
        f" (reduced in {document['reduce_dtype']})"
    )
    print(table(document["lines"]))
    for line, reason in document["not_applicable"].items():
        print(f"  {line}: not applicable: {reason}")
    for name, base in (("step", "C"), ("step", "A"), ("optimizer", "C")):
        ratios = document[f"{name}_over_line_{base.lower()}"].items()
        text = ", ".join(f"{line} {ratio:.3f}" for line, ratio in ratios if line != base)
        if text:
            print(f"{name} time over line {base}'s: {text}")
    if "step_ratio_muon_vs_adamw" in document:
        print(
            f"step of Muon over AdamW's on line C: {document['step_ratio_muon_vs_adamw']:.3f}, over"
            f" FSDP2's: {document['step_ratio_vs_fsdp2_adamw']:.3f}; Newton-Schulz is"
            f" {document['newton_schulz_share']:.1%} of the FLOPs"
        )
    for text in document["breaches"]:
        print(f"BREACH {text}")


def main(argv: list[str] | None = None) -> int:
    """Run the lines and print the table."""
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        cases, reasons = cases_of(options, options.lines.split(","))
        if options.png:
            plotting()
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    warn_if_busy()
    schedule = Schedule(
        rounds=options.rounds,
        steps=options.steps,
        compute=DTYPES[options.dtype],
        reduce=DTYPES[options.reduce_dtype],
    )
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_bench_ranks(
            work, options.ranks, cases, schedule, folder=Path(folder), timeout=TIMEOUT
        )
    document = document_of(options, cases, reasons, ranks)
    print_document(document)
    if options.png:
        title = (
            f"{document['model']}, {document['ranks']} ranks, {document['sharding']}"
            f" {document['grid']}, ZeRO-{document['zero_stage']}"
        )
        chart(document["lines"], options.png, title)
    write_json(options.json, __file__, document)
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(run_script(main))
