"""How long does writing a checkpoint take?  Ours, torch.distributed.checkpoint's own files, and
plain safetensors.

Owns the comparison of three ways to put the same tensors on the disk from one process: our
``save`` (hashed, synced, atomic), ``dcp.save`` with torch's file writer (synced), and
``safetensors.torch.save_file`` with an fsync of the file. Invariant: the three take turns, each
starts when the disk has nothing left to write, and each ends when its bytes are on the device.
Tested by ``tests/tools/test_checkpoint_write.py``.

Example: ``python tools/bench/checkpoint_write.py --json checkpoint_write.json``
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megamuon.checkpoint import Ranks, StoredTensor, save  # noqa: E402
from megamuon.console import run_script  # noqa: E402
from tools.bench.common import machine_facts, warn_if_busy  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402

WAYS = ("ours", "dcp", "safetensors")


def state_of(size: int) -> dict[str, torch.Tensor]:
    """About ``size`` bytes of random tensors as a run has them: per layer an FP32 master and a
    momentum of a large matrix, of a small one, and of a vector.
    """
    generator = torch.Generator().manual_seed(1)
    state: dict[str, torch.Tensor] = {}
    held, layer = 0, 0
    while held < size:
        for name, shape in (("mlp", (1024, 2048)), ("attention", (512, 1024)), ("norm", (1024,))):
            for kind in ("weight", "momentum"):
                tensor = torch.randn(shape, generator=generator)
                state[f"layers.{layer}.{name}.{kind}"] = tensor
                held += tensor.nbytes
        layer += 1
    return state


def write_ours(state: dict[str, torch.Tensor], folder: Path) -> None:
    """As a run of one rank saves."""
    pieces = [
        StoredTensor(name=name, shape=tuple(data.shape), offset=(0,) * data.dim(), data=data)
        for name, data in state.items()
    ]
    save(folder, 1, pieces, documents={"counters": {"iteration": 1}}, ranks=Ranks()).wait()


def write_dcp(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Torch's own file writer with its defaults: one file a rank, synced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def write_safetensors(state: dict[str, torch.Tensor], folder: Path) -> None:
    """One file, then its fsync: no hash, no index, nothing atomic."""
    folder.mkdir()
    path = folder / "all.safetensors"
    safetensors.torch.save_file(state, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], None]] = {
    "ours": write_ours,
    "dcp": write_dcp,
    "safetensors": write_safetensors,
}


@dataclass(frozen=True, kw_only=True)
class Writing:
    """One timed write."""

    seconds: float
    processor_seconds: float  # of all threads, in the program and in the kernel


def timed(write: Callable[[], None]) -> Writing:
    """One write, begun when the disk has nothing left to write."""
    os.sync()
    start, before = time.perf_counter(), os.times()
    write()
    seconds, after = time.perf_counter() - start, os.times()
    used = after.user + after.system - before.user - before.system
    return Writing(seconds=seconds, processor_seconds=used)


def measure(
    state: dict[str, torch.Tensor], parent: Path, repeats: int
) -> tuple[dict[str, list[Writing]], dict[str, int]]:
    """(the writes of each round, bytes on the disk) by way; a first round does not count."""
    writings: dict[str, list[Writing]] = {way: [] for way in WAYS}
    sizes: dict[str, int] = {}
    for repeat in range(-1, repeats):
        turn = repeat % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            folder = parent / way
            found = timed(partial(WRITERS[way], state, folder))
            if repeat >= 0:
                writings[way].append(found)
            sizes[way] = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            shutil.rmtree(folder)
    return writings, sizes


def figures_of(
    writings: dict[str, list[Writing]], sizes: dict[str, int], size: int
) -> dict[str, Any]:
    """Medians, and the medians of the ratios of each round."""

    def median(way: str, name: str) -> float:
        return round(statistics.median(getattr(found, name) for found in writings[way]), 4)

    figures: dict[str, Any] = {"bytes": size, "bytes_on_disk": sizes}
    for name in ("seconds", "processor_seconds"):
        figures[name] = {way: median(way, name) for way in WAYS}
    for other in WAYS[1:]:
        rounds = zip(writings["ours"], writings[other], strict=True)
        ratio = statistics.median(ours.seconds / theirs.seconds for ours, theirs in rounds)
        figures[f"ours_over_{other}"] = round(ratio, 3)
    return figures


def main(arguments: list[str] | None = None) -> None:
    """Write in turns; print and store the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib", type=int, default=1024, help="MiB of tensors (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="timed writes of each way (default: %(default)s)"
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="where to write; on the disk that is meant (default: the working directory)",
    )
    add_json_flag(parser, __file__)
    options = parser.parse_args(arguments)
    if options.mib < 1 or options.repeats < 1:
        parser.error("--mib and --repeats are 1 or more")
    warn_if_busy()
    state = state_of(options.mib << 20)
    size = sum(tensor.nbytes for tensor in state.values())
    with tempfile.TemporaryDirectory(dir=options.directory or Path.cwd()) as parent:
        writings, sizes = measure(state, Path(parent), options.repeats)
    figures = figures_of(writings, sizes, size)
    for way in WAYS:
        seconds, used = figures["seconds"][way], figures["processor_seconds"][way]
        print(
            f"{way:12} {seconds:7.3f} s  {size / seconds / 1e9:6.2f} GB/s"
            f"  {used:7.3f} s of processors"
        )
    print(
        f"ours over dcp {figures['ours_over_dcp']:.3f}, "
        f"over plain safetensors {figures['ours_over_safetensors']:.3f}"
    )
    write_json(options.json, __file__, {**figures, "machine": machine_facts()})


if __name__ == "__main__":
    sys.exit(run_script(main))
