"""AllGatherV and ReduceScatterV on shared memory, against torch.distributed's calls on Gloo.

  ready         our operators: one call, data moves when it is ready (DMuon-2, section 5)
  per_owner     a broadcast, or a reduce, per owner
  grouped       all owners in one uneven all-to-all
  equal_length  all_gather_into_tensor and reduce_scatter_tensor of as many bytes in equal parts

move the same payload between the same processes, in turns, call by call. Its segments have lengths
1:2:3:1:..., one for each owner; owners are the first rank of each node, or all ranks of one node. A
time is the median over repeats of the slowest rank's. Each system's result is compared with the
data once per size: gathers bit for bit, sums of integers exactly.

    python tools/bench/collectives.py --ranks 4 --json out.json

Keys: ``speedup_small_vs_X`` is X's time over ours up to 1 MiB, ``large_speedup_vs_X`` from 16 MiB
on; both are geometric means over sizes and operations. ``large_fraction_of_copy_bandwidth`` holds
gathers from 16 MiB on against the machine's memory: the time in which N ranks copy the payload once
each, from private memory to private memory, started together, over the time of our gather. With
several nodes the gather also copies the payload into ring slots, R - 1 times beside the N - 1
results; ``..._with_ring_slots`` counts these as copies that were made.

Other modes run instead: ``--latency-us`` measures the operators over an injected link
(``collectives_latency.py``), ``--publish-replay`` the publish on a virtual clock and
``--publish-bytes`` the publish with real bytes (``publish_replay.py``).

Exit status: 0; 1 where a result is wrong; 2 for arguments that cannot be run. Tested by
``tests/tools/test_bench_collectives.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from megamuon.collectives.host_library import available  # noqa: E402
from megamuon.console import run_script  # noqa: E402
from tools.bench import collectives_latency as latency  # noqa: E402
from tools.bench.collectives_ranks import OPERATIONS, VALUES, Job, work  # noqa: E402
from tools.bench.collectives_report import chart, figures, merge, table  # noqa: E402
from tools.bench.common import machine_facts, run_bench_ranks, warn_if_busy  # noqa: E402
from tools.bench.line_report import plotting  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

SIZES = "16KiB,64KiB,256KiB,1MiB,16MiB,64MiB,256MiB"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_RANKS = 256 // (VALUES - 1)  # sums stay below 256, which BF16 holds exactly


def size_of(text: str) -> int:
    """Bytes of ``64KiB``, ``1M``, ``4096``. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+) ?([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 16KiB, 1MiB or bytes")
    return int(match[1]) * UNITS[match[2].upper()]


def sizes_of(text: str) -> tuple[int, ...]:
    """Sizes by commas, ascending."""
    return tuple(sorted({size_of(part) for part in text.split(",")}))


def grid_of(text: str) -> tuple[int, int]:
    """``2x4``: replicas and shards. Raises ArgumentTypeError."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no grid: write NODESxRANKS, as 2x4")
    return int(match[1]), int(match[2])


def nodes_of(text: str) -> list[int]:
    """Numbers of nodes by commas, ascending. Raises ArgumentTypeError."""
    found = sorted({int(part) if part.isdecimal() else 0 for part in text.split(",")})
    if found[0] < 2 or found[-1] > 64 or len(found) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r}: name two or more numbers of nodes from 2 to 64, as 2,4,8"
        )
    return found


def operations_of(text: str) -> tuple[str, ...]:
    """Operations by commas. Raises ArgumentTypeError."""
    names = tuple(text.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(OPERATIONS):
        raise argparse.ArgumentTypeError(
            f"{text!r}: name some of {','.join(OPERATIONS)}, each once"
        )
    return names


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="processes on this machine")
    add("--grid", type=grid_of, help="declared nodes x ranks of each (default: one node)")
    add("--sizes", type=sizes_of, default=sizes_of(SIZES), help=f"of payloads (default: {SIZES})")
    add("--operations", type=operations_of, default=OPERATIONS, help="default: gather,reduce")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of the payload")
    add("--repeats", type=int, default=0, help="timed calls of each system (default: by size)")
    add("--latency-us", type=float, help="measure over a link: what each put takes")
    add(
        "--link-gbps",
        type=float,
        default=0.0,
        help="with --latency-us: its bandwidth (0: no limit)",
    )
    add("--nodes", type=nodes_of, default=[2, 4, 8, 16, 32], help="with --latency-us")
    add("--publish-replay", action="store_true", help="replay the publish of five published rails")
    add(
        "--publish-bytes",
        action="store_true",
        help="publish them at 1/64 of their size, as threads",
    )
    add("--png", type=Path, help="write a chart of the speedups there (needs matplotlib)")
    add_json_flag(parser, __file__)
    return parser


def job_of(options: argparse.Namespace) -> Job:
    """What to measure.  Raises ValueError naming the flag at fault."""
    if not 2 <= options.ranks <= MOST_RANKS:
        raise ValueError(f"--ranks {options.ranks}: choose 2 to {MOST_RANKS}")
    replicas, shards = options.grid or (1, options.ranks)
    if replicas * shards != options.ranks:
        raise ValueError(f"--grid {replicas}x{shards} does not hold --ranks {options.ranks}")
    if options.repeats < 0:
        raise ValueError(f"--repeats {options.repeats}: choose 1 or more, or leave it out")
    dtype = DTYPES[options.dtype]
    if options.sizes[0] < 256 * options.ranks:
        raise ValueError(f"--sizes: {options.sizes[0]} bytes: at least 256 for each rank")
    return Job(
        replicas=replicas,
        shards=shards,
        sizes=options.sizes,
        operations=options.operations,
        dtype=dtype,
        repeats=options.repeats,
    )


def compare(job: Job, dtype: str) -> tuple[dict[str, Any], list[str]]:
    """Run the ranks: the document, and what was wrong."""
    with tempfile.TemporaryDirectory(prefix="megamuon-bench-") as folder:
        ranks = run_bench_ranks(work, job.replicas * job.shards, job, folder=Path(folder))
    runs, wrong = merge(ranks)
    operations: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        entry = {key: value for key, value in run.items() if key != "operation"}
        operations.setdefault(run["operation"], []).append(entry)
    document = {
        "ranks": job.replicas * job.shards,
        "grid": f"{job.replicas}x{job.shards}",
        "dtype": dtype,
        "operations": operations,
        **figures(runs, job.replicas, job.shards),
    }
    return document, wrong


def other_mode(options: argparse.Namespace) -> bool:
    """Whether something else than the comparison was asked for."""
    return options.latency_us is not None or options.publish_replay or options.publish_bytes


def other_modes(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of ``--latency-us``, ``--publish-replay`` and ``--publish-bytes``."""
    document: dict[str, Any] = {}
    if options.latency_us is not None:
        link = latency.Link(latency_us=options.latency_us, gbps=options.link_gbps)
        document |= latency.figures(link, options.nodes, options.repeats or 5)
        print(latency.describe(document), flush=True)
    if options.publish_replay:
        from tools.bench.publish_replay import describe, publish_replay

        document |= publish_replay()
        print(describe(document), flush=True)
    if options.publish_bytes:
        from tools.bench.publish_replay import describe_bytes, publish_bytes

        document["publish_bytes"] = publish_bytes()
        print(describe_bytes(document["publish_bytes"]), flush=True)
    return document


def check_modes(options: argparse.Namespace) -> None:
    """Raises ValueError where flags do not go together."""
    if options.latency_us is not None and options.latency_us <= 0:
        raise ValueError(f"--latency-us {options.latency_us:g}: choose more than 0")
    if options.link_gbps < 0:
        raise ValueError(f"--link-gbps {options.link_gbps:g}: choose 0 (no limit) or more")
    if options.link_gbps and options.latency_us is None:
        raise ValueError("--link-gbps is for --latency-us")
    if options.png and other_mode(options):
        raise ValueError(
            "--png shows the comparison: leave --latency-us, --publish-replay and --publish-bytes"
            " out"
        )


def main(argv: list[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = build_parser()
    options = parser.parse_args(argv)
    wrong: list[str] = []
    try:
        job = job_of(options)
        check_modes(options)
        if reason := available():
            raise ValueError(f"there is nothing to measure: {reason}")
        if options.png:
            plotting()
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    warn_if_busy()
    facts = machine_facts()
    if other_mode(options):
        document = other_modes(options)
    else:
        document, wrong = compare(job, options.dtype)
        print(table(document), flush=True)
        if options.png:
            chart(document, options.png)
    document["machine"] = facts
    document["wrong"] = wrong
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    write_json(options.json, __file__, document)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_script(main))
