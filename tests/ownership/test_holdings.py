"""Whose copy counts, who writes it, who works on it: from placements and the sizes of the axes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megamuon.matrices import LogicalParameter
from megamuon.ownership import PlanError, Topology, build_plan
from megamuon.ownership.holdings import (
    Home,
    Segment,
    Writers,
    cut_names,
    home_of,
    one_works,
    segments_of,
    speaks,
    storage_problem,
    summed_over_tp,
    writers,
)
from megamuon.placements import Axis, Owned, Placement, Shard, piece_of
from tests.support.ownership import parameter, table

SIZES = {Axis.REPLICATE: 2, Axis.SHARD: 3, Axis.TP: 2}
PLACES = [
    dict(zip(SIZES, place, strict=True))
    for place in itertools.product(*(range(size) for size in SIZES.values()))
]
CUT = Shard(0, (0, 4, 7))


def planned() -> list[LogicalParameter]:
    asked = [
        parameter("owned", 7, 4),
        parameter("cut", 7, 4, cut=CUT),
        parameter("gain", 4, tp_partial=True),
        table("table", 7, 3),
        table("vocabulary", 7, 3, cut=CUT),
    ]
    grid = Topology(replicas=2, shards=3, tp=2)
    return list(build_plan(asked, grid, lambda *_: 1.0, threshold=1).parameters)


def uneven(*bounds: int, cut: Shard | None = None) -> LogicalParameter:
    found = table("table", 7, 3, cut=cut)
    return replace(found, storage=found.storage.replaced(Axis.SHARD, Shard(0, bounds)))


PARAMETERS = [*planned(), uneven(0, 0, 6, 7)]
NAMES = [p.name for p in PARAMETERS[:-1]] + ["uneven"]


@pytest.mark.parametrize("asked", PARAMETERS, ids=NAMES)
def test_each_element_counts_once_and_is_written_once(asked: LogicalParameter) -> None:
    counted, written = {}, {}
    for place in PLACES:
        piece = piece_of(asked.shape, asked.storage, SIZES, place)
        if piece is None:
            continue
        rows = range(piece.offset[0], piece.offset[0] + piece.shape[0])
        share = writers(asked.storage, SIZES, place)
        for row in rows:
            counted[row] = counted.get(row, 0) + speaks(asked.storage, place)
            if share is not None:  # a share each, of the rows or of anything else
                written.setdefault(row, []).append(share)
    assert counted == dict.fromkeys(range(asked.shape[0]), 1)
    for shares in written.values():
        assert [s.index for s in shares] == list(range(shares[0].count))
    assert sorted(written) == list(range(asked.shape[0]))


@pytest.mark.parametrize("asked", PARAMETERS, ids=NAMES)
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_segments_tile_the_piece_and_are_where_the_pieces_are(
    asked: LogicalParameter, tp_rank: int
) -> None:
    segments = segments_of(asked, SIZES, tp_rank)
    edges = [s.start for s in segments] + [asked.piece_numel(tp_rank)]
    assert edges[0] == 0
    assert [s.stop for s in segments] == edges[1:]
    for place in PLACES:
        if place[Axis.TP] != tp_rank:
            continue
        piece = piece_of(asked.shape, asked.storage, SIZES, place)
        here = [
            s.stop - s.start
            for s in segments
            if s.shard == place[Axis.SHARD] and s.replica in (None, place[Axis.REPLICATE])
        ]
        assert here == ([piece.numel] if piece is not None and piece.numel else [])


def test_uneven_slices_are_where_their_bounds_are() -> None:
    assert segments_of(uneven(0, 0, 6, 7), SIZES, 0) == (
        Segment(0, 18, 1, None),
        Segment(18, 21, 2, None),
    )


def test_replicas_share_the_writing_and_tp_ranks_do_not() -> None:
    asked = {p.name: p for p in planned()}
    last = {Axis.REPLICATE: 1, Axis.SHARD: 2, Axis.TP: 1}
    assert writers(asked["table"].storage, SIZES, last) is None
    assert writers(asked["vocabulary"].storage, SIZES, last) == Writers(1, 2)
    assert writers(asked["table"].storage, SIZES, {**last, Axis.TP: 0}) == Writers(1, 2)
    assert writers(asked["cut"].storage, SIZES, last) == Writers(0, 1)


def test_who_works_alone() -> None:
    asked = {p.name: p for p in planned()}
    assert one_works(asked["cut"].update, SIZES)
    assert not one_works(asked["owned"].update, SIZES)  # all tp ranks repeat it
    assert one_works(asked["owned"].update, {**SIZES, Axis.TP: 1})
    assert not one_works(Placement(), SIZES)
    assert one_works(Placement(), {Axis.REPLICATE: 2})


def test_homes_and_the_tp_axis() -> None:
    asked = planned()
    assert home_of(asked[3]) is None
    on = asked[0].storage
    assert home_of(asked[0]) == Home(on.on(Axis.REPLICATE).index, on.on(Axis.SHARD).index)
    with pytest.raises(PlanError, match="nobody has been chosen to own m"):
        home_of(parameter("m", 3, 3))
    assert cut_names(asked) == {"cut", "vocabulary"}
    assert [p.name for p in summed_over_tp(asked)] == ["gain"]


@pytest.mark.parametrize(
    ("axis", "wrong", "message"),
    [
        (Axis.REPLICATE, Owned(2), "is stored by rank 2 of the 2 ranks on the replicate axis"),
        (Axis.SHARD, Owned(), "is stored by nobody of the 3 ranks on the shard axis"),
        (Axis.SHARD, Shard(1), "must have one owner|along dim 1"),
        (Axis.SHARD, Shard(0), "must have one owner"),
        (Axis.TP, Shard(0, (0, 7)), "does not make 2 pieces"),
        (Axis.TP, Shard(0), "does not make 2 pieces"),
    ],
)
def test_what_nobody_could_hold_is_refused(axis: Axis, wrong: object, message: str) -> None:
    asked = planned()[0]
    broken = replace(asked, storage=asked.storage.replaced(axis, wrong))
    problem = storage_problem(broken, SIZES)
    assert problem is not None
    assert any(part in problem for part in message.split("|"))


def test_slices_with_other_bounds_are_refused() -> None:
    assert storage_problem(uneven(0, 3, 5, 7), SIZES) is None
    assert "do not cut an extent of 7" in str(storage_problem(uneven(0, 3, 5, 8), SIZES))
    assert "do not cut an extent" in str(storage_problem(uneven(0, 3, 7), SIZES))
    # Bounds on the shard axis are of what tensor parallelism leaves each tp rank.
    assert "of 4" in str(storage_problem(uneven(0, 3, 5, 7, cut=CUT), SIZES))
