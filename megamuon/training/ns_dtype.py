"""What ``--ns-dtype auto`` means on the CPUs of a run.

Owns the choice between FP32 and BF16: a measurement on every rank, agreed over all of them.
Invariants: all ranks iterate in one dtype, BF16 only where it is faster on each; a resumed run
goes on in the dtype that it began with, so that it continues bit for bit, unless this machine
emulates that dtype, and then it says so. Small matrices are FP32 in any case (``optim.ns_plan``).
Tested by ``tests/training/test_ns_dtype.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamuon.arguments import Config
from megamuon.mesh import Mesh
from megamuon.optim import RECIPES
from megamuon.optim.ns_plan import LEAST_ROWS, CpuDtype
from megamuon.optim.ns_probe import LEAST_GAIN, bf16_gain

_BEARABLE = 0.5  # a resumed run keeps BF16 down to this gain: above, a difference is the machine's


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The dtype, and the line that says why; no line where nothing was to choose."""

    dtype: CpuDtype = "fp32"
    line: str = ""


def is_open(config: Config, mesh: Mesh) -> bool:
    """Whether this run iterates on CPUs in a dtype that no flag decides.  The Gram form and its
    restarts do where they are given: they were chosen for a dtype, and BF16 is the less safe one.
    """
    flags = config.optimizer
    iterates = RECIPES[flags.optimizer].newton_schulz is not None and not config.precision.fp64
    free = flags.ns_dtype == "auto" and flags.ns_form != "gram" and flags.ns_restarts is None
    return iterates and free and mesh.device.type == "cpu"


def choose_cpu_dtype(config: Config, mesh: Mesh, stored: CpuDtype | None) -> Choice:
    """The dtype of ``auto`` on CPUs.  A collective over all ranks, where there is a choice.

    ``stored``: of the run that this one resumes, None for a new run.
    """
    if not is_open(config, mesh):
        return Choice()
    gain = agreed_gain()
    how = f"BF16 products take 1/{gain:.1f} of FP32's time here"
    if gain < 1:
        how = f"BF16 products take {1 / max(gain, 1e-9):.3g} x FP32's time here"
    if stored is None:
        return _choice("bf16" if gain >= LEAST_GAIN else "fp32", how)
    if stored == "bf16" and gain < _BEARABLE:
        text = (
            f"WARNING: the checkpoint's run iterated in bf16; not bit for bit from here on: {how}"
        )
        return _choice("fp32", text)
    return _choice(stored, "as the checkpoint's run")


def _choice(dtype: CpuDtype, why: str) -> Choice:
    small = f" (fp32 below {LEAST_ROWS} rows or columns)" if dtype == "bf16" else ""
    return Choice(
        dtype=dtype, line=f"Newton-Schulz dtype auto: {dtype}{small}: {why}; --ns-dtype chooses"
    )


def agreed_gain() -> float:
    """The smallest ``bf16_gain`` of all ranks: their CPUs and their load may differ.  A
    collective.
    """
    gain = bf16_gain()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return gain
    least = torch.tensor(gain, dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)
