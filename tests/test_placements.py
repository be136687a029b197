"""Placements: equality, order of axes, even and given bounds."""

import pytest
import torch

from megamuon.placements import Axis, Owned, Partial, Placement, Replicate, Shard


def test_an_axis_that_is_not_named_replicates():
    placement = Placement.of({Axis.TP: Shard(1, (0, 3, 8))})
    assert placement.on(Axis.SHARD) == Replicate()
    assert placement.on(Axis.TP) == Shard(1, (0, 3, 8))


def test_equal_placements_are_equal_however_they_are_written():
    one = Placement.of({Axis.TP: Partial(), Axis.REPLICATE: Owned(1), Axis.CP: Replicate()})
    two = Placement.of({Axis.REPLICATE: Owned(1), Axis.TP: Partial()})
    assert one == two
    assert hash(one) == hash(two)
    assert one.replaced(Axis.TP, Replicate()) == Placement.of({Axis.REPLICATE: Owned(1)})
    with pytest.raises(ValueError, match="out of order"):
        Placement(((Axis.TP, Partial()), (Axis.REPLICATE, Owned(1))))


@pytest.mark.parametrize("extent", [0, 1, 5, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_shard_without_bounds_follows_torch_chunk(extent, ranks):
    pieces = torch.arange(extent).chunk(ranks)
    for index in range(ranks):
        start, stop = Shard(0).interval(index, extent=extent, ranks=ranks)
        wanted = pieces[index].tolist() if index < len(pieces) else []
        assert list(range(start, stop)) == wanted


def test_bounds_are_checked_against_the_tensor():
    assert Shard(0, (0, 2, 7)).interval(1, extent=7, ranks=2) == (2, 7)
    with pytest.raises(ValueError, match="extent of 8"):
        Shard(0, (0, 2, 7)).interval(1, extent=8, ranks=2)
    with pytest.raises(ValueError, match="must rise from 0"):
        Shard(0, (0, 5, 3))
    with pytest.raises(ValueError, match="0 or more"):
        Owned(-1)
