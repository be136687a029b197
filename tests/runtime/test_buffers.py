"""Placement in a flat buffer, and the life of its storage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megamuon.kernels.linear import adjacent
from megamuon.matrices import Kind, LogicalParameter, Route, placements_for
from megamuon.placements import Placed
from megamuon.runtime.buffers import ALIGNMENT, FlatBuffer, place


def parameter(name: str, *shape: int, fusion: str = "") -> LogicalParameter:
    return LogicalParameter(
        name=name,
        shape=shape,
        kind=Kind.MATRIX,
        route=Route.MATRIX,
        **placements_for(Route.MATRIX, Placed(shape=shape), owned=True),
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


def test_a_bound_buffer_keeps_its_address_and_its_holder_is_told() -> None:
    buffer = FlatBuffer(place(PARAMETERS, 4), torch.float32, torch.device("cpu"))
    memory = torch.full((buffer.raw.numel() + 8,), 7.0)
    with pytest.raises(ValueError, match="cannot live in"):
        buffer.bind(memory)
    buffer.bind(memory[8:])
    told: list[bool] = []
    buffer.watch = told.append
    assert not buffer.alive and buffer.resident_bytes == 0
    # A view of a released buffer can be made, and reads what the range holds, whoever wrote it.
    weight = nn.Parameter(torch.zeros(5, 3))
    weight.data = buffer.raw_view("o", (5, 3))
    assert told == [] and bool((weight == 7).all())
    version = weight._version
    for value in (1.0, 2.0):
        buffer.revive()
        buffer.revive()
        buffer.raw.fill_(value)
        assert bool((weight == value).all()) and bool((memory[:8] == 7).all())
        assert buffer.raw.data_ptr() == memory[8:].data_ptr() and buffer.resident_bytes == 0
        buffer.release()
        buffer.release()
    assert told == [True, False, True, False]
    assert weight._version == version and memory.untyped_storage().nbytes() == memory.nbytes


def test_contents_that_were_set_aside_come_back() -> None:
    for bound in (False, True):
        buffer = FlatBuffer(place(PARAMETERS, 4), torch.float32, torch.device("cpu"))
        if bound:
            buffer.bind(torch.zeros(buffer.raw.numel()))
            buffer.revive()
        told: list[bool] = []
        buffer.watch = told.append
        buffer.raw.fill_(3.0)
        buffer.set_aside()
        assert not buffer.alive and told == [False] and buffer.resident_bytes == buffer.nbytes
        if bound:
            buffer.raw.fill_(float("nan"))  # somebody else lives there now
        buffer.revive()
        assert bool((buffer.raw == 3).all()) and told == [False, True]
        assert buffer.resident_bytes == (0 if bound else buffer.nbytes)
        buffer.set_aside()
        buffer.release()  # forgets them
        buffer.raw_piece("o", 0, 15)  # making a view revives nothing
        assert told == [False, True, False] and buffer.resident_bytes == 0
