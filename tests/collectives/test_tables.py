"""Segment tables, packing and the fixed-order mean."""

from __future__ import annotations

import pytest
import torch

from megamuon.collectives import SegmentTable, TableSegment
from megamuon.collectives.base import mean_into, pack, unpack


def segment(rank: int, offset: int, numel: int) -> TableSegment:
    return TableSegment(rank=rank, offset=offset, numel=numel)


def test_neighbours_of_one_rank_merge_and_empty_segments_go() -> None:
    table = SegmentTable.build(
        3, [segment(1, 4, 2), segment(0, 0, 4), segment(1, 6, 3), segment(2, 9, 0)]
    )
    assert table.segments == (segment(0, 0, 4), segment(1, 4, 5))
    assert table.sizes == (4, 5, 0)


def test_bad_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        SegmentTable.build(2, [segment(0, 0, 4), segment(1, 3, 2)])
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        SegmentTable.build(2, [segment(2, 0, 4)])


def test_pack_and_unpack_are_inverse() -> None:
    buffer = torch.arange(10.0)
    parts = (segment(0, 1, 2), segment(0, 5, 3))
    packed = pack(buffer, parts, torch.float32)
    assert packed.tolist() == [1, 2, 5, 6, 7]
    target = torch.zeros(10)
    unpack(packed, target, parts)
    assert target.tolist() == [0, 1, 2, 0, 0, 5, 6, 7, 0, 0]
    assert pack(buffer, parts[:1], torch.float32).data_ptr() == buffer[1:].data_ptr()
    assert pack(buffer, parts[:1], torch.float32, alias=False).data_ptr() != buffer[1:].data_ptr()


def test_the_mean_adds_16_bit_parts_in_float32_in_rank_order() -> None:
    parts = [torch.tensor([256.0, 1.0], dtype=torch.bfloat16) for _ in range(3)]
    parts[1][0] = 1.0  # 256 + 1 is lost in BF16
    window = torch.zeros(2)
    mean_into(parts, window, 3, first=True)
    assert window.tolist() == pytest.approx([513.0 / 3, 1.0])
    mean_into(parts, window, 3, first=False)
    assert window.tolist() == pytest.approx([2 * 513.0 / 3, 2.0])
