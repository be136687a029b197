"""Gradients of several micro-batches under FSDP2, added in FP32 whatever reductions send.

Owns ``WideAccumulation``. FSDP2 keeps gradients that are not reduced yet in the reduce dtype: with
BF16 reductions each micro-batch would be rounded to it, and the error would grow with their number.
Invariant: what is kept from micro-batch to micro-batch has at least the master's FP32, and is
rounded once, when it is sent. Tested by ``tests/distributed/test_line_a_accumulation.py``.

FSDP2 has no public place for this: the two methods of ``FSDPParam`` that end a backward pass are
replaced on its instances. They are those of torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from megamuon.runtime.config import RuntimeConfig


class WideAccumulation:
    """Keeps unreduced gradients in FP32; does nothing where reductions are not narrower."""

    def __init__(self, modules: Sequence[FSDPModule], config: RuntimeConfig) -> None:
        self._reduce_dtype = config.reduce_dtype
        self._on = False  # since the last step some backward pass did not reduce
        if config.reduce_dtype.itemsize >= 4:
            return
        for module in modules:
            group = module._get_fsdp_state()._fsdp_param_group
            for held in () if group is None else group.fsdp_params:
                held.to_accumulated_grad_if_needed = partial(_widen, held)
                held.accumulate_unsharded_grad_if_needed = partial(
                    self._accumulate, group, held, held.accumulate_unsharded_grad_if_needed
                )

    def begin(self) -> None:
        """The next backward pass does not reduce."""
        self._on = True

    def end(self) -> None:
        """Nothing is kept any more."""
        self._on = False

    def _accumulate(self, group: Any, held: Any, usual: Callable[[], None]) -> None:
        usual()
        if self._on:
            # A reduction takes gradients of one dtype, and sends it where it was told no other.
            _widen(held)
            group._reduce_dtype = self._reduce_dtype


def _widen(held: Any) -> None:
    """Keep a narrow gradient of this backward pass as an FP32 sum, to which later ones add."""
    if not hasattr(held, "_unsharded_param") or held.unsharded_accumulated_grad is not None:
        return
    gradient = held._unsharded_param.grad
    if gradient is not None and gradient.dtype.itemsize < 4:
        held._unsharded_param.grad = None
        held.unsharded_accumulated_grad = gradient.to(torch.float32)
