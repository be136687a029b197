"""Placements: equality, order of axes, even and given bounds."""

import itertools

import pytest
import torch

from megamuon.placements import (
    Axis,
    Owned,
    Partial,
    Piece,
    Placement,
    Replicate,
    Shard,
    piece_of,
)


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


def pieces(shape, placement, sizes):
    """What each rank has, by its place, with every axis of ``sizes``."""
    return {
        place: piece_of(shape, placement, sizes, dict(zip(sizes, place, strict=True)))
        for place in itertools.product(*(range(size) for size in sizes.values()))
    }


def test_axes_cut_from_the_inside_out():
    placement = Placement.of({Axis.TP: Shard(0, (0, 5, 8)), Axis.SHARD: Shard(0)})
    found = pieces((8, 3), placement, {Axis.SHARD: 2, Axis.TP: 2})
    assert found[0, 0] == Piece((0, 0), (3, 3))  # of the 5 rows that tp rank 0 has
    assert found[1, 0] == Piece((3, 0), (2, 3))
    assert found[0, 1] == Piece((5, 0), (2, 3))
    assert found[1, 1] == Piece((7, 0), (1, 3))


@pytest.mark.parametrize("tp", [Replicate(), Shard(1, (0, 1, 1, 7)), Shard(0, (0, 2, 3, 9))])
@pytest.mark.parametrize("shard", [Shard(0), Shard(1)])
def test_pieces_tile_the_tensor(tp, shard):
    placement = Placement.of({Axis.TP: tp, Axis.SHARD: shard})
    covered = torch.zeros(9, 7)
    for (_, tp_rank), piece in pieces((9, 7), placement, {Axis.SHARD: 4, Axis.TP: 3}).items():
        assert covered[piece.slices].shape == piece.shape
        if tp != Replicate() or tp_rank == 0:
            covered[piece.slices] += 1
    assert covered.eq(1).all()


def test_uneven_bounds_on_the_shard_axis():
    placement = Placement.of({Axis.SHARD: Shard(0, (0, 0, 7, 9))})
    found = pieces((9, 2), placement, {Axis.SHARD: 3})
    assert [piece.numel for piece in found.values()] == [0, 14, 4]


def test_an_owned_tensor_is_on_one_rank():
    placement = Placement.of({Axis.REPLICATE: Owned(1), Axis.SHARD: Owned(0)})
    found = pieces((3, 2), placement, {Axis.REPLICATE: 2, Axis.SHARD: 2})
    assert [place for place, piece in found.items() if piece is not None] == [(1, 0)]
    assert found[1, 0] == Piece((0, 0), (3, 2))
    with pytest.raises(ValueError, match="nobody has been chosen on the shard axis"):
        piece_of((3,), Placement.of({Axis.SHARD: Owned()}), {}, {})
