"""The device code on one GPU: what ``tools/gpu_checks.sh`` runs after it has built the libraries.

Owns the list of loopback cases and the attempt to run NCCL's device interface with two ranks on one
GPU. A case is a process of its own, because a fault on a GPU spoils the process that caused it.
Invariant: a line says "ok" only after every element was compared. Without the libraries or a GPU
it ends with status 3. Its list of cases is tested by ``tests/test_gpu_checks.py``.

    python tools/gpu_checks.py loopback --json FILE     the operators on virtual places
    python tools/gpu_checks.py nccl --json FILE         two ranks of NCCL on this GPU
    python tools/gpu_checks.py join FILE ... --json FILE
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from ctypes import c_double, c_int, c_uint64
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "megamuon" / "_native" / "libmegamuon_loopback.so"
GATHER, REDUCE, PUBLISH = 0, 1, 2
KINDS = {GATHER: "gather", REDUCE: "reduce", PUBLISH: "publish"}
F32, F64, BF16, F16 = 0, 1, 2, 3
DTYPES = {F32: "f32", F64: "f64", BF16: "bf16", F16: "f16"}
MIB = 1 << 20
MAX_BLOCKS = 16


class NativeCase(ctypes.Structure):
    """mm_loopback_case of csrc/bindings/loopback_api.h."""

    _fields_ = (
        *((name, c_int) for name in ("kind", "nodes", "columns", "pipelines", "groups", "slots")),
        *((name, c_int) for name in ("segments", "slot_dtype", "wire_dtype", "window_dtype")),
        *((name, c_int) for name in ("granule", "calls", "timed", "shuffle")),
        *((name, c_uint64) for name in ("chunk_bytes", "star_bytes", "bytes", "seed")),
        ("deadline_seconds", c_double),
    )


class NativeResult(ctypes.Structure):
    """mm_loopback_result of csrc/bindings/loopback_api.h."""

    _fields_ = (
        *((name, c_uint64) for name in ("bytes", "checked", "mismatches")),
        *((name, c_int) for name in ("blocks", "star")),
        *((name, c_double) for name in ("call_seconds", "copy_seconds")),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One loopback case; the fields of mm_loopback_case."""

    kind: int
    nodes: int
    columns: int
    pipelines: int = 1
    groups: int = 1
    slots: int = 8
    segments: int = 2
    slot_dtype: int = F32
    wire_dtype: int = F32
    window_dtype: int = F32
    granule: int = 16
    calls: int = 6
    timed: int = 0
    shuffle: int = 1
    chunk_bytes: int = 64 * 1024
    star_bytes: int = 0
    bytes: int = MIB
    seed: int = 1
    deadline_seconds: float = 10.0

    def name(self) -> str:
        """For the table."""
        parts = [f"{KINDS[self.kind]:8}{self.nodes:2} x {self.columns}"]
        parts.append(f"{self.pipelines:2}p{self.groups:2}g")
        size = self.bytes
        parts.append(f"{size // MIB:5} MiB" if size >= MIB else f"{size // 1024:5} KiB")
        if self.kind == REDUCE:
            names = (DTYPES[d] for d in (self.slot_dtype, self.wire_dtype, self.window_dtype))
            parts.append("/".join(names))
        if self.star_bytes:
            parts.append("star")
        if self.granule % 16:
            parts.append("unaligned")
        return "  ".join(parts)


def checked_cases() -> list[Case]:
    """Small cases of every kind: ring and star, all dtypes, odd sizes, few slots, small chunks."""
    cases = []
    for nodes, columns in ((1, 2), (1, 4), (2, 1), (2, 2), (3, 2), (4, 2), (4, 1), (5, 3)):
        groups = min(nodes, 4)
        pipelines = max(1, min(MAX_BLOCKS // groups, 128 // (nodes * columns * groups)))
        shape = {"nodes": nodes, "columns": columns, "groups": groups, "seed": nodes * 10 + columns}
        for kind in (GATHER, REDUCE):
            cases.append(Case(kind=kind, pipelines=pipelines, **shape))
            cases.append(Case(kind=kind, chunk_bytes=4096, slots=1, bytes=MIB // 2, **shape))
            if nodes > 1:
                cases.append(Case(kind=kind, star_bytes=64 * MIB, bytes=MIB // 4, **shape))
    grid = {"nodes": 3, "columns": 2, "groups": 3}
    for slot, wire, window in (
        *((BF16, BF16, F32), (F32, BF16, F32), (BF16, F32, F32), (F16, F16, F32)),
        (F64, F64, F64),
    ):
        dtypes = {"slot_dtype": slot, "wire_dtype": wire, "window_dtype": window}
        cases.append(Case(kind=REDUCE, **grid, **dtypes))
        cases.append(Case(kind=REDUCE, star_bytes=64 * MIB, bytes=MIB // 4, **grid, **dtypes))
    cases.append(Case(kind=GATHER, granule=1, bytes=300_000, **grid))
    cases.append(Case(kind=REDUCE, granule=2, slot_dtype=BF16, bytes=300_000, **grid))
    for nodes in (1, 2, 4, 8):
        cases.append(Case(kind=PUBLISH, nodes=nodes, columns=1, segments=6, bytes=4 * MIB))
    return cases


def timed_cases() -> list[Case]:
    """Larger cases, timed; gathers are checked as well."""
    cases = []
    for size in (MIB // 4, 16 * MIB, 64 * MIB):
        for nodes, columns, pipelines, groups in ((1, 8, 16, 1), (2, 4, 8, 2), (4, 2, 4, 4)):
            shape = {"nodes": nodes, "columns": columns, "pipelines": pipelines, "groups": groups}
            common = {"bytes": size, "timed": 20, "calls": 2 if size <= 16 * MIB else 0}
            cases.append(Case(kind=GATHER, **shape, **common))
            dtypes = {"slot_dtype": BF16, "wire_dtype": BF16}
            calls = common | {"calls": 1 if size <= MIB else 0}
            cases.append(Case(kind=REDUCE, **shape, **dtypes, **calls))
    cases.append(Case(kind=PUBLISH, nodes=8, columns=1, segments=6, bytes=64 * MIB, timed=5))
    return cases


# --- loopback ------------------------------------------------------------------------------------


def run_here(case: Case) -> dict[str, object]:
    """Run one case in this process."""
    library = ctypes.CDLL(str(LIBRARY))
    native, result = NativeCase(**asdict(case)), NativeResult()
    text = ctypes.create_string_buffer(2048)
    status = library.mm_loopback_run(ctypes.byref(native), ctypes.byref(result), text, len(text))
    found = {name: getattr(result, name) for name, _ in NativeResult._fields_}
    return {**found, "error": text.value.decode(errors="replace") if status < 0 else ""}


def run_apart(case: Case) -> dict[str, object]:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "case", json.dumps(asdict(case))]
    # One hardware queue for all streams would put the publish's tasks behind its waiting kernel.
    environment = {**os.environ, "CUDA_MODULE_LOADING": "EAGER"}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": "did not end within 90 s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"exit status {done.returncode}: {done.stderr.strip()[-400:]}"}


def verdict(case: Case, result: dict[str, object]) -> tuple[bool, str]:
    """Whether a case passed, and its cell of the table."""
    if result.get("error"):
        return False, f"FAILED: {result['error']}"
    if result["mismatches"]:
        return False, f"FAILED: {result['mismatches']} of {result['checked']} elements differ"
    if case.calls and not result["checked"]:
        return False, "FAILED: nothing was compared"
    text = f"ok  {result['checked']} compared" if case.calls else "not compared"
    if seconds := float(result["call_seconds"]):
        places = case.nodes * case.columns
        rate = int(result["bytes"]) / seconds / 1e9
        text += f"  {seconds * 1e6:9.1f} us  {rate:7.1f} GB/s per place"
        if copy := float(result["copy_seconds"]):
            text += f"  {seconds / copy:6.2f} x the copy of its {places} results"
    return True, text


def loopback(seconds: float) -> tuple[bool, dict[str, object]]:
    """Run all cases until ``seconds`` are over; whether all that ran passed."""
    started, rows, good = time.monotonic(), [], True
    cases = checked_cases() + timed_cases()
    for number, case in enumerate(cases):
        if time.monotonic() - started > seconds:
            print(f"gpu_checks: out of time, {len(cases) - number} cases were not run")
            break
        result = run_apart(replace(case, seed=case.seed + 1000 * number))
        passed, text = verdict(case, result)
        good = good and passed
        rows.append({"case": asdict(case), "passed": passed, **result})
        print(f"{case.name():58}{text}", flush=True)
    passed = sum(bool(row["passed"]) for row in rows)
    print(f"gpu_checks: loopback: {passed} of {len(rows)} cases passed, {len(cases)} in all")
    return good, {"loopback": rows, "cases": len(cases)}


# --- two ranks of NCCL on one GPU ----------------------------------------------------------------


def nccl_rank(rank: int, ranks: int, store_path: str) -> dict[str, object]:
    """Communicator, windows, a gather and a reduction at one rank of 1 x ``ranks``."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    from megamuon.collectives.device_engine import DeviceEngine
    from megamuon.collectives.device_library import DeviceLibrary, available
    from megamuon.collectives.device_streams import CudaStreams
    from megamuon.collectives.host_library import OperatorConfig

    if reason := available():
        return {"stage": "library", "error": reason}
    torch.cuda.set_device(0)
    store = dist.FileStore(store_path, ranks)
    library = DeviceLibrary()
    if rank == 0:
        store.set("id", DeviceEngine.unique_id(library))
    engine = DeviceEngine(
        library,
        bytes(store.get("id")),
        rank=rank,
        nodes=1,
        columns=ranks,
        device=0,
        operators=2,
        deadline=15.0,
    )
    stream = torch.cuda.current_stream().cuda_stream
    found = engine.capability()
    capability = {name: getattr(found, name) for name, _ in type(found)._fields_}
    places = tuple(range(ranks))
    gather = OperatorConfig(
        kind="all_gather", nodes=1, columns=ranks, ranks=places, control_offset=0, groups=8
    )
    reduce = replace(gather, kind="reduce_scatter", control_offset=engine.control_bytes(gather))
    control = reduce.control_offset + engine.control_bytes(reduce)
    span = 4 * MIB
    pool = engine.open(control, 4 * span)
    memory = CudaStreams(torch.device("cuda:0")).memory(pool, 4 * span)
    share = span // ranks
    op, second = engine.operator(gather, "gather"), engine.operator(reduce, "reduce")
    table = engine.gather_table(op, [(0, k, k * share, share) for k in places], "group")
    torch.manual_seed(1)
    expected = torch.randint(0, 255, (span,), dtype=torch.uint8, device="cuda")
    memory[:span].fill_(0xEE)
    mine = slice(rank * share, (rank + 1) * share)
    memory[mine] = expected[mine]
    for _ in range(3):
        engine.gather(op, table, 0, stream)
    torch.cuda.synchronize()
    engine.check()
    different = int((memory[:span] != expected).sum())

    numel = span // 4
    sums = engine.reduce_table(
        second,
        [(0, k, k * share // 4, share // 4, 0) for k in places],
        "group",
        slot=torch.float32,
        wire=torch.float32,
        window=torch.float32,
    )
    slots = memory[span : 2 * span].view(torch.float32)
    slots.copy_(torch.arange(numel, device="cuda") % 1000 + rank)
    engine.reduce(second, sums, span, 2 * span, stream, first=True, divisor=float(ranks))
    torch.cuda.synchronize()
    engine.check()
    window = memory[2 * span : 2 * span + share].view(torch.float32)
    mean = (torch.arange(numel, device="cuda") % 1000).float() + (ranks - 1) / 2
    wrong = int((window != mean[rank * share // 4 : (rank + 1) * share // 4]).sum())
    engine.close()
    return {
        "stage": "done",
        "error": "",
        "capability": capability,
        "gather_differs": different,
        "reduction_differs": wrong,
    }


def nccl(ranks: int = 2) -> tuple[bool, dict[str, object]]:
    """Try it and say what happened; only a wrong result is a failure, a refusal is a finding."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "rank"]
        environment = {**os.environ, "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), f"{folder}/store"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + 75
        results = [_read_rank(process, deadline) for process in processes]
    for rank, result in enumerate(results):
        print(f"gpu_checks: nccl rank {rank}: {json.dumps(result)}")
    wrong = sum(
        int(result.get("gather_differs", 0)) + int(result.get("reduction_differs", 0))
        for result in results
    )
    ran = all(result.get("stage") == "done" for result in results)
    print(
        "gpu_checks: nccl: "
        + (
            f"ran on {ranks} ranks of one GPU, {wrong} elements differ"
            if ran
            else "did not run with several ranks on one GPU, for the reasons above"
        )
    )
    return not wrong, {"nccl": results, "ran": ran}


def _read_rank(process: subprocess.Popen[str], deadline: float) -> dict[str, object]:
    try:
        output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return {"stage": "timeout", "error": output.strip()[-600:]}
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {"stage": "crash", "error": output.strip()[-600:]}


def run_rank(rank: int, ranks: int, store_path: str) -> dict[str, object]:
    """``nccl_rank``, with what it raises as its result."""
    try:
        return nccl_rank(rank, ranks, store_path)
    except Exception as error:  # the finding of the attempt, whatever it is
        return {"stage": "error", "error": f"{type(error).__name__}: {error}"}


# --- command line --------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = ("loopback", "nccl", "join", "case", "rank")
    parser.add_argument(
        "command",
        choices=commands,
        help="command: loopback or nccl; the others are parts of them",
    )
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no case after so many")
    options = parser.parse_args(arguments)
    if options.command == "case":
        print(json.dumps(run_here(Case(**json.loads(options.rest[0])))))
        return 0
    if options.command == "rank":
        print(json.dumps(run_rank(int(options.rest[0]), int(options.rest[1]), options.rest[2])))
        return 0
    if options.command == "join":
        good, report = True, {}
        for path in map(Path, options.rest):
            report |= json.loads(path.read_text()) if path.is_file() else {path.stem: "missing"}
    elif not LIBRARY.is_file():
        print(
            f"gpu_checks: {LIBRARY} is not there: run tools/gpu_checks.sh on a machine with a GPU"
        )
        return 3
    else:
        good, report = loopback(options.seconds) if options.command == "loopback" else nccl()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from megamuon.console import run_script

    sys.exit(run_script(main))
