"""Placement in a flat buffer, and the life of its storage."""

from __future__ import annotations

import torch
from torch import nn

from megamuon.kernels.linear import adjacent
from megamuon.matrices import Kind, Layout, LogicalParameter, Route
from megamuon.runtime.buffers import ALIGNMENT, FlatBuffer, place


def parameter(name: str, *shape: int, fusion: str = "") -> LogicalParameter:
    return LogicalParameter(
        name=name,
        shape=shape,
        kind=Kind.MATRIX,
        route=Route.MUON,
        layout=Layout.OWNER,
        reason="test",
        fusion=fusion,
    )


PARAMETERS = (
    parameter("norm", 5),
    parameter("q", 3, 5, fusion="qkv"),
    parameter("q.bias", 3, fusion="qkv.bias"),
    parameter("k", 2, 5, fusion="qkv"),
    parameter("k.bias", 2, fusion="qkv.bias"),
    parameter("o", 5, 3),
)


def test_fusion_blocks_are_aligned_and_their_members_adjacent() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        layout = place(PARAMETERS, dtype.itemsize)
        buffer = FlatBuffer(layout, dtype, torch.device("cpu"))
        views = {p.name: buffer.view(p.name, p.shape) for p in PARAMETERS}
        assert adjacent([views["q"], views["k"]])
        assert adjacent([views["q.bias"], views["k.bias"]])
        assert not adjacent([views["k"], views["o"]])
        for start in ("norm", "q", "q.bias", "o"):
            assert layout.offsets[start] * dtype.itemsize % ALIGNMENT == 0
        ends = sorted((layout.offsets[p.name], p.numel) for p in PARAMETERS)
        assert all(a + n <= b for (a, n), (b, _) in zip(ends, ends[1:], strict=False))


def test_released_storage_comes_back_under_the_same_views() -> None:
    buffer = FlatBuffer(place(PARAMETERS, 4), torch.float32, torch.device("cpu"))
    weight = nn.Parameter(buffer.view("o", (5, 3)))
    buffer.raw.fill_(2.0)
    assert bool((weight == 2).all())
    resident = buffer.resident_bytes
    buffer.release()
    assert buffer.resident_bytes == 0 and weight.untyped_storage().nbytes() == 0
    buffer.revive()
    buffer.raw.fill_(3.0)
    assert bool((weight == 3).all()) and buffer.resident_bytes == resident


def test_writes_through_raw_are_invisible_to_autograd() -> None:
    """The rule: a plain copy_, even on detach(), bumps the counter and breaks the backward; raw
    does not.
    """
    buffer = FlatBuffer(place(PARAMETERS, 4), torch.float32, torch.device("cpu"))
    weight = nn.Parameter(buffer.view("o", (5, 3)))
    inputs = torch.ones(3, requires_grad=True)
    out = (weight @ inputs).square().sum()
    buffer.raw.fill_(1.0)
    out.backward()  # would raise "modified by an inplace operation" after a counted write
    out = (weight @ inputs).square().sum()
    weight.detach().copy_(torch.zeros(5, 3))
    try:
        out.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError("torch no longer counts this write: the rule can go")
