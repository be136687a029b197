"""Moves are compiled from placements: which, in what order, between whom, and how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from megamuon.ownership.inventory import cut_by_name, inventory
from megamuon.ownership.owners import tp_owners
from megamuon.ownership.planner import build_plan
from megamuon.ownership.settings import Topology
from megamuon.ownership.update_plan import (
    Journey,
    Move,
    UpdatePlan,
    compile_moves,
    compile_update,
    matrices_of,
)
from megamuon.placements import Axis, Owned, Piece, Placement, Shard

SHAPE = (10, 6)
SIZES = {Axis.REPLICATE: 2, Axis.SHARD: 3, Axis.TP: 2}
TP_CUT = Shard(0, (0, 7, 10))
TP_CUT_1 = Shard(1, (0, 4, 6))


def places(sizes: dict[Axis, int]) -> list[dict[Axis, int]]:
    return [
        dict(zip(sizes, chosen, strict=True)) for chosen in product(*map(range, sizes.values()))
    ]


def on(**axes: object) -> Placement:
    return Placement.of({Axis(name): placement for name, placement in axes.items()})


OWNED = {"replicate": Owned(1), "shard": Owned(2)}
# name -> storage, update, moves there, moves back (what only cuts or forgets is "local")
CASES: dict[str, tuple[Placement, Placement, list[str], list[str]]] = {
    "whole on its owner": (on(**OWNED), on(**OWNED), [], []),
    "an owner's matrix in tp pieces": (
        on(**OWNED, tp=TP_CUT),
        on(**OWNED, tp=Owned(1)),
        ["tp to_owner"],
        ["tp from_owner"],
    ),
    "slices, gathered by everybody": (
        on(shard=Shard(0)),
        on(),
        ["shard gather"],
        ["shard local"],
    ),
    "slices of tp pieces, gathered by everybody": (
        on(shard=Shard(0), tp=TP_CUT_1),
        on(),
        ["shard gather", "tp gather"],
        ["tp local", "shard local"],
    ),
    "slices of tp pieces, to one rank of each replica": (
        on(shard=Shard(0), tp=TP_CUT),
        on(shard=Owned(2), tp=Owned(0)),
        ["shard to_owner", "tp to_owner"],
        ["tp from_owner", "shard from_owner"],
    ),
    "slices, to one rank of all": (
        on(shard=Shard(0)),
        on(replicate=Owned(1), shard=Owned(0)),
        ["replicate local", "shard to_owner"],
        ["shard from_owner", "replicate broadcast"],
    ),
}


def compiled(name: str, sizes: dict[Axis, int] = SIZES) -> UpdatePlan:
    storage, update, _, _ = CASES[name]
    journey = Journey(name="w", shape=SHAPE, source=storage, target=update)
    return compile_update([journey], sizes, torch.float32)


def words(moves: Sequence[Move]) -> list[str]:
    return [f"{move.axis} {move.kind}" for move in moves]


@pytest.mark.parametrize("name", CASES)
def test_moves_follow_from_the_placements(name: str) -> None:
    """Together from the outside in, apart from the inside out; equal placements move nothing."""
    plan = compiled(name)
    assert (words(plan.there), words(plan.back)) == CASES[name][2:]
    sent = [word for word in (*CASES[name][2], *CASES[name][3]) if not word.endswith("local")]
    assert words(plan.moves) == sent
    assert plan.axes == {Axis(word.split()[0]) for word in sent}


def cells(piece: Piece | None) -> set[tuple[int, int]]:
    if piece is None:
        return set()
    return {
        (i, j) for i in range(SHAPE[0])[piece.slices[0]] for j in range(SHAPE[1])[piece.slices[1]]
    }


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_what_it_wants_from_ranks_that_have_it(name: str) -> None:
    """Element by element, beside the placements: sends and receives of two ranks agree, and what
    crosses between ranks is what the move says it sends.
    """
    plan = compiled(name)
    for move in (*plan.there, *plan.back):
        crossing = 0
        for place in places(SIZES):
            hop = move.at(place).hops.get("w")
            if hop is None:
                continue
            received: list[tuple[int, int]] = []
            for peer, part in enumerate(hop.receives):
                theirs = move.at({**place, move.axis: peer}).hops["w"]
                assert theirs.sends[place[move.axis]] == part
                assert cells(part) <= cells(theirs.before)
                received += cells(part)
                crossing += 0 if part is None or peer == place[move.axis] else part.numel
            if hop.receives:
                assert sorted(received) == sorted(cells(hop.after))
            else:  # nothing travels: it had all that it keeps
                assert cells(hop.after) <= cells(hop.before)
        assert move.nbytes == crossing * 4


def test_bytes_by_hand() -> None:
    """60 elements of 4 bytes; the tp pieces have 42 and 18."""
    assert [m.nbytes for m in compiled("an owner's matrix in tp pieces").moves] == [42 * 4, 42 * 4]
    # Two replicas, one group for each tp rank, which each send all but their own to two others.
    assert [m.nbytes for m in compiled("slices, gathered by everybody").moves] == [
        2 * 2 * 2 * 60 * 4
    ]
    # dim 1 is cut at 4 of 6: slices of 10 rows of 4 and of 2, then pieces of 40 and 20 elements.
    cut = compiled("slices of tp pieces, gathered by everybody")
    assert [m.nbytes for m in cut.moves] == [2 * 2 * 60 * 4, 2 * 3 * 60 * 4]
    # 6 of the 7 rows of one piece, and 2 of the 3 of the other, are not on shard 2 yet.
    one = compiled("slices of tp pieces, to one rank of each replica")
    assert [m.nbytes for m in one.moves] == [
        2 * (36 + 12) * 4,
        2 * 18 * 4,
        2 * 18 * 4,
        2 * (36 + 12) * 4,
    ]
    # 6 of 10 rows inside one replica, for each tp rank; the whole to the other replica.
    relay = compiled("slices, to one rank of all")
    assert [m.nbytes for m in relay.moves] == [2 * 36 * 4, 2 * 36 * 4, 2 * 60 * 4]


def test_axes_of_one_rank_move_nothing() -> None:
    alone = dict.fromkeys(SIZES, 1)
    for target in (on(), on(shard=Owned(0), tp=Owned(0))):
        source = on(shard=Shard(0), tp=Shard(0, (0, 10)))
        journey = Journey(name="w", shape=SHAPE, source=source, target=target)
        plan = compile_update([journey], alone, torch.float32)
        assert plan.moves == () and plan.moved == frozenset()
        assert plan.workers(dict.fromkeys(SIZES, 0)) == {"w"}


def test_who_works_and_who_speaks() -> None:
    """Everybody where everybody has a use for it; a rank without rows has none, unless others wait
    for what it does.
    """
    everybody = compiled("slices, gathered by everybody")
    assert all(everybody.workers(place) == {"w"} for place in places(SIZES))
    speakers = [place for place in places(SIZES) if everybody.speaks("w", place)]
    assert speakers == [dict.fromkeys(SIZES, 0)]
    wide = {**SIZES, Axis.SHARD: 6}  # 10 rows for 6 ranks: two each, and none for the last
    working = [
        bool(compiled("slices, gathered by everybody", wide).workers(p)) for p in places(wide)
    ]
    assert working == [place[Axis.SHARD] < 5 for place in places(wide)]
    storage, update = on(shard=Shard(0)), on(shard=Owned(5))
    last = compile_update(
        [Journey(name="w", shape=SHAPE, source=storage, target=update)], wide, torch.float32
    )
    assert [bool(last.workers(p)) for p in places(wide)] == [
        p[Axis.SHARD] == 5 for p in places(wide)
    ]
    assert [p for p in places(wide) if last.speaks("w", p)] == [
        {Axis.REPLICATE: 0, Axis.SHARD: 5, Axis.TP: 0}
    ]


def test_tensors_of_one_kind_move_together_in_the_order_given() -> None:
    names = ("b", "a", "c")
    journeys = [
        Journey(name=name, shape=SHAPE, source=on(tp=TP_CUT), target=on(tp=Owned(index % 2)))
        for index, name in enumerate(names)
    ]
    journeys.append(Journey(name="g", shape=SHAPE, source=on(tp=TP_CUT), target=on()))
    moves = compile_moves(journeys, SIZES, torch.float64)
    assert [(m.kind, m.parameters) for m in moves] == [("gather", ("g",)), ("to_owner", names)]
    assert moves[1].nbytes == 2 * 3 * (18 + 42 + 18) * 8


def test_only_ranks_of_the_owner_s_group_take_part() -> None:
    (there,) = compiled("an owner's matrix in tp pieces").there
    taking_part = [place for place in places(SIZES) if there.at(place).hops]
    assert taking_part == [{Axis.REPLICATE: 1, Axis.SHARD: 2, Axis.TP: index} for index in range(2)]


def test_changes_that_no_move_makes_are_refused() -> None:
    journey = Journey(name="w", shape=SHAPE, source=on(shard=Owned(0)), target=on(shard=Owned(1)))
    with pytest.raises(ValueError, match="w: nothing moves a tensor along shard from Owned"):
        compile_moves([journey], SIZES, torch.float32)
    journey = replace(journey, source=on(shard=Shard(0), tp=TP_CUT), target=on(shard=Shard(0)))
    with pytest.raises(ValueError, match="w cannot change along tp while shard cuts it"):
        compile_moves([journey], SIZES, torch.float32)


@pytest.mark.parametrize("tp", [1, 2])
def test_matrices_of_a_model_go_to_their_tp_owners_and_back(tp: int) -> None:
    parameters = cut_by_name(inventory("qwen2.5-1.5b"), tp)
    plan = build_plan(
        parameters, Topology(replicas=2, shards=2, tp=tp), lambda rows, cols: rows * cols
    )
    update = compile_update(matrices_of(plan.parameters), plan.topology.sizes, torch.float32)
    assert len(update.matrices) == 196
    if tp == 1:
        assert update.moves == ()
        return
    there, back = update.moves
    owners = tp_owners(plan.parameters)
    away = sum(
        p.piece_numel(rank)
        for p in parameters
        for rank in range(tp)
        if p.name in owners and rank != owners[p.name]
    )
    assert there.parameters == back.parameters == tuple(m.name for m in update.matrices)
    assert there.nbytes == back.nbytes == away * 4


def test_the_whole_is_nowhere_else() -> None:
    """Replicated storage that one rank updates: the others forget it and get it back."""
    journey = Journey(name="w", shape=SHAPE, source=on(), target=on(shard=Owned(1)))
    plan = compile_update([journey], SIZES, torch.float32)
    assert (words(plan.there), words(plan.back)) == (["shard local"], ["shard broadcast"])
    kept = [place[Axis.SHARD] for place in places(SIZES) if plan.workers(place)]
    assert set(kept) == {1}
