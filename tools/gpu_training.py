"""Trains a tiny model on GPUs with line D over the device operators and with line C, and compares.

Owns the first proof that training through ``--fabric nccl`` gives what grouped calls give. Run it
under torchrun, with several ranks; they may share a GPU where NCCL allows that
(``NCCL_MULTI_RANK_GPU_ENABLE=1``)::

    CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32 \\
        torchrun --nproc-per-node 4 tools/gpu_training.py [--rows 2] [--json FILE]

Exit status 0: equal within the tolerance; 1: they differ (``differs`` in the JSON file); 3: there
is no GPU. What cannot run raises. Tested without a GPU by ``tests/tools/test_gpu_training.py``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from megamuon.console import run_script  # noqa: E402
from tools.figures import add_json_flag, write_json  # noqa: E402
from tools.reference_training import Training
from tools.sharded_training import TIMEOUT, Case, Difference, compare, train

STEPS = 6  # the pool opens after the second
TOLERANCE = 1e-4  # of losses and weights in FP32: NCCL adds in an order of its own


def compare_lines(rank: int, world: int, replicas: int, device: torch.device) -> Difference:
    """What line D over the nccl fabric differs in from line C, on this rank. A collective.

    Raises ValueError for a number of ranks that ``replicas`` does not divide, and RuntimeError
    where the pool did not open.
    """
    if world % replicas:
        raise ValueError(f"--rows {replicas} does not divide {world} ranks")
    training = Training(model="nano", steps=STEPS, dtype=torch.float32)
    c, d = (
        Case(line=line, replicas=replicas, shards=world // replicas, training=training)
        for line in "CD"
    )
    theirs, _ = train(c, rank, device=device)
    ours, placements = train(d, rank, device=device, fabric="nccl")
    return compare(ours, theirs, placements, tp_rank=0)


def main(arguments: list[str] | None = None) -> int:
    """Exit status, see above."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1, help="replicas (HSDP); 1 is FSDP")
    add_json_flag(parser, __file__)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_training: there is no GPU here, nothing was trained")
        return 3
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    found = compare_lines(rank, world, options.rows, device)
    differs = max(found.loss, found.weight) > TOLERANCE
    verdicts = [False] * world
    dist.all_gather_object(verdicts, differs)
    print(f"gpu_training: rank {rank}: {found}")
    if rank == 0 and options.json:
        report = {**asdict(found), "ranks": world, "rows": options.rows, "differs": any(verdicts)}
        write_json(options.json, __file__, report)
    dist.destroy_process_group()
    return int(any(verdicts))


if __name__ == "__main__":
    sys.exit(run_script(main))
