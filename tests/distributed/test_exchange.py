"""Pieces along the tp axis come together to whole matrices and go back, whatever the cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megamuon.collectives.traffic import Traffic
from megamuon.matrices import LogicalParameter
from megamuon.ownership.update_plan import Journey, compile_moves
from megamuon.placements import Axis, AxisPlacement, Owned, Placement, Replicate, Shard
from megamuon.runtime.exchange import Exchange, moves_along, sum_in_order
from tests.support.ownership import parameter
from tests.support.ranks import run_ranks

TP = 3
OWNERS = {"a": 2, "b": 0, "c": 2, "d": 1}


PARAMETERS = (
    parameter("a", 7, 4, cut=Shard(0, (0, 3, 6, 7))),
    parameter("b", 5, 8, cut=Shard(1, (0, 3, 6, 8))),
    parameter("c", 6, 2, cut=Shard(0, (0, 2, 4, 6))),
    parameter("d", 2, 9, cut=Shard(1, (0, 4, 8, 9))),
)


def whole(p: LogicalParameter) -> torch.Tensor:
    start = 100.0 * PARAMETERS.index(p)
    return torch.arange(start, start + p.numel, dtype=torch.float64).view(p.shape)


def exchange_of(place: int, ranks: int, traffic: Traffic) -> Exchange:
    transports = moves_along(Axis.TP, dist.group.WORLD if ranks > 1 else None, traffic)
    return Exchange(
        transports, sizes={Axis.TP: ranks}, place={Axis.TP: place}, device=torch.device("cpu")
    )


def run(
    exchange: Exchange,
    target: Callable[[LogicalParameter], AxisPlacement],
    tensors: dict[str, torch.Tensor],
    *,
    back: bool = False,
) -> dict[str, torch.Tensor]:
    """Pieces to where ``target`` of a parameter says, or ``back`` from there."""
    journeys = []
    for p in PARAMETERS:
        wanted = Placement.of({Axis.TP: target(p)})
        source, goal = (wanted, p.compute) if back else (p.compute, wanted)
        journeys.append(Journey(name=p.name, shape=p.shape, source=source, target=goal))
    moves = compile_moves(journeys, exchange.sizes, torch.float64, apart=back)
    local = [move.at(exchange.place) for move in moves]
    operation = "matrix_scatter" if back else "matrix_gather"
    return exchange.run(local, tensors, [p.name for p in PARAMETERS], operation=operation)


def work(rank: int, world: int) -> dict[str, object]:
    traffic = Traffic()
    exchange = exchange_of(rank, world, traffic)
    pieces = {p.name: whole(p)[p.piece(rank).slices].contiguous() for p in PARAMETERS}

    def owner(p: LogicalParameter) -> Owned:
        return Owned(OWNERS[p.name])

    owned = run(exchange, owner, pieces)
    gathered = traffic.bytes("matrix_gather", "tp")
    back = run(exchange, owner, {n: 2 * w for n, w in owned.items()}, back=True)
    scattered = traffic.bytes("matrix_scatter", "tp")
    everywhere = run(exchange, lambda p: Replicate(), pieces)
    cut = run(exchange, lambda p: Replicate(), everywhere, back=True)
    single = exchange.whole(
        "b", PARAMETERS[1].shape, Placement.of({Axis.TP: Shard(1, (0, 3, 6, 8))}), pieces["b"]
    )
    parts = [torch.full((3,), 10.0**-rank), torch.full((2, 2), float(rank))]
    sum_in_order(parts, dist.group.WORLD)
    return {
        "owned": sorted(owned),
        "wholes": all(torch.equal(owned[p.name], whole(p)) for p in PARAMETERS if p.name in owned),
        "back": all(torch.equal(back[n], 2 * piece) for n, piece in pieces.items()),
        "everywhere": all(torch.equal(everywhere[p.name], whole(p)) for p in PARAMETERS),
        "cut": all(torch.equal(cut[n], piece) for n, piece in pieces.items()),
        "single": torch.equal(single, whole(PARAMETERS[1])),
        "sent": (gathered, scattered),
        "gathers": traffic.bytes("gather", "tp"),
        "sums": [part.clone() for part in parts],
    }


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run_ranks(work, TP)


def test_pieces_meet_on_the_owner_and_return(results: list[dict]) -> None:
    for rank, result in enumerate(results):
        assert result["owned"] == [name for name, owner in OWNERS.items() if owner == rank]
        assert result["wholes"] and result["back"]
        assert result["everywhere"] and result["cut"] and result["single"]


def test_each_piece_travels_once_each_way(results: list[dict]) -> None:
    """Counted bytes: a piece that stays on its rank is no traffic."""
    away = sum(
        p.piece_numel(rank) * 8 for p in PARAMETERS for rank in range(TP) if rank != OWNERS[p.name]
    )
    assert sum(result["sent"][0] for result in results) == away
    assert sum(result["sent"][1] for result in results) == away
    assert sum(result["gathers"] for result in results) == (TP - 1) * PARAMETERS[1].numel * 8


def test_sums_have_the_same_bits_on_all_ranks(results: list[dict]) -> None:
    first = torch.full((3,), 1.0)
    for exponent in range(1, TP):
        first += torch.full((3,), 10.0**-exponent)
    for result in results:
        assert torch.equal(result["sums"][0], first)
        assert torch.equal(result["sums"][1], torch.full((2, 2), 3.0))


def test_one_rank_needs_no_group() -> None:
    alone = exchange_of(0, 1, Traffic())
    cut = Placement.of({Axis.TP: Shard(0, (0, 7))})
    matrix = whole(PARAMETERS[0])
    assert torch.equal(alone.whole("a", (7, 4), cut, matrix), matrix)
    parts = [torch.ones(2)]
    sum_in_order(parts, None)
    assert torch.equal(parts[0], torch.ones(2))
