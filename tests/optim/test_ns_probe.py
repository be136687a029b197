"""The measurement of what this CPU multiplies fastest."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from megamuon.optim import ns_probe


class FakeCpu:
    """A clock that products advance: BF16 at ``gain`` times the speed of FP32."""

    def __init__(self, gain: float) -> None:
        self.gain, self.now = gain, 0.0
        self.sizes: list[int] = []

    def clock(self) -> float:
        return self.now

    def mm(self, left: Tensor, right: Tensor) -> Tensor:
        self.sizes.append(left.shape[0])
        flops = 2.0 * left.shape[0] ** 3
        self.now += flops / (1e11 * (self.gain if left.dtype == torch.bfloat16 else 1.0))
        return left


@pytest.mark.parametrize("gain", [0.003, 0.8, 2.1, 7.0])
def test_gain_is_that_of_the_products(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = FakeCpu(gain)
    monkeypatch.setattr(torch, "mm", cpu.mm)
    assert ns_probe.bf16_gain(cpu.clock) == pytest.approx(gain, rel=1e-3)
    assert cpu.now < 0.1
    # Where BF16 is emulated, a product of the large size alone would take 0.4 s.
    assert (max(cpu.sizes) > 200) == (gain > 0.25)


def test_it_takes_milliseconds_here() -> None:
    began = time.process_time()
    assert 1e-4 < ns_probe.bf16_gain() < 100
    assert time.process_time() - began < 2.0  # 0.03 here; emulated BF16 is the slowest case
